"""Where each value of a configuration came from."""

import pytest
import yaml
from support import ROOT

from tasks.config.origins import annotated, leaves, origins
from tasks.config.pipeline import ConfigError, load_config, parse_config

TEXT = """\
name: mine
data:
  sources:
    - {kind: synthetic, corpus: a}
    - kind: synthetic
      corpus: b
model: blstm
train:
  optimizer: &step
    lr: 0.5
  augment: {speed_factors: [0.9,
    1.1]}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    return file


def origin_of(by_place, name):
    return by_place[tuple(int(part) if part.isdigit() else part for part in name.split("."))]


def test_configured_values_have_lines_and_others_are_defaults(path):
    _, by_place = origins(path)
    lines = {"name": 1, "data.sources.0.corpus": 4, "data.sources.1.corpus": 6, "train.optimizer.lr": 10}
    lines |= {"train.augment.speed_factors": 11, "model.kind": 7}
    assert {name: origin_of(by_place, name) for name in lines} == {
        name: f"mine.yaml:{line}" for name, line in lines.items()
    }
    for name in ("seed", "model.layers", "train.optimizer.kind", "data.sources.1.set", "align"):
        assert origin_of(by_place, name) == "default"


def test_overrides_take_precedence_over_the_file(path):
    words = ["train.optimizer={kind: sgd, momentum: 0.5}", "data.sources.1.corpus=c", "decode=beam", "seed=3"]
    config, by_place = origins(path, words)
    names = ("train.optimizer.kind", "train.optimizer.momentum", "data.sources.1.corpus", "decode.kind", "seed")
    assert {origin_of(by_place, name) for name in names} == {"--set"}
    assert origin_of(by_place, "train.optimizer.lr") == "default"  # the override replaces the whole section
    assert origin_of(by_place, "decode.beam") == "default"
    assert origin_of(by_place, "data.sources.0.corpus") == "mine.yaml:4"
    assert config == load_config(path, words)


def test_merged_mappings_have_the_line_of_the_effective_value(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "name: m\ndata:\n  sources:\n    - &first\n      kind: synthetic\n      corpus: a\n      domain: x\n"
        "    - <<: *first\n      corpus: b\n"
    )
    config, by_place = origins(path)
    assert (config.data.sources[1].corpus, config.data.sources[1].domain) == ("b", "x")
    assert origin_of(by_place, "data.sources.1.corpus") == "m.yaml:9"
    assert origin_of(by_place, "data.sources.1.domain") == "m.yaml:7"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_annotated_text_parses_to_the_same_configuration(path):
    config, by_place = origins(path)
    text = annotated(config, by_place)
    assert parse_config(yaml.safe_load(text)) == config
    assert set(by_place) == set(leaves(config.model_dump(mode="json", by_alias=True)))
    assert text.count("  # ") == len(by_place)


def test_wrong_field_raises_the_usual_error(path):
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        origins(path, ["train.epoch=1"])


def test_wrong_fields_are_reported_with_the_lines_of_the_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "name: m\ntrain:\n  epochs:\n    - 1\n  optimizer:\n    lrr: 1\n  augment:\n    speed_factors:\n      - 1\n"
        "      - x\nmodel: {kind: conformr}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["train.epoch=1", "lm.order=x", "lm.kind=ngram"])
    lines = str(caught.value).splitlines()[1:]
    starts = ("3: train.epochs", "6: train.optimizer.lrr", "10: train.augment.speed_factors.1", "11: model.kind")
    starts += ("1: data",)  # it is missing: its parent is the document
    assert sum("my.yaml" in line for line in lines) == len(starts)
    for start in starts:
        assert any(line.startswith(f"  my.yaml:{start}: ") for line in lines), lines
    assert any(line.startswith("  train.epoch: ") for line in lines)  # of --set
    assert any(line.startswith("  lm.") for line in lines)


def test_section_that_a_set_replaces_has_no_line(path):
    with pytest.raises(ConfigError, match=r"\n  train\.optimizer\.lrr: there is no such field"):
        load_config(path, ["train.optimizer={lrr: 1}"])
