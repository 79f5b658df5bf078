import re
from pathlib import Path

import pytest

from tasks.config.pipeline import load_config, parse_config

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))


def test_documented_configurations_exist():
    assert {path.stem for path in CONFIGS} >= {
        *("demo", "fsdd", "several", "mini_librispeech", "librispeech_100", "librispeech_960")
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads(path, monkeypatch):
    for variable in re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", path.read_text()):
        monkeypatch.setenv(variable, "/data")
    config = load_config(path)
    assert parse_config(config.model_dump(mode="json", by_alias=True)) == config
    assert all("$" not in source.path for source in config.data.sources)
    assert path.read_text().startswith("#"), "say first what the configuration is for"


def test_every_configuration_registers_a_different_model():
    names = [load_config(path).model_name for path in CONFIGS]
    assert len(set(names)) == len(names) or all(name.startswith("starling") for name in names)


def test_test_voices_of_the_demo_are_not_in_training():
    sources = load_config(next(path for path in CONFIGS if path.stem == "demo")).data.sources
    voices = sources[0].synthesis
    assert sources[0].kind == "synthetic"
    assert not set(voices.train_voices) & {*voices.valid_voices, *voices.test_voices}


def test_several_corpora_share_a_test_set_and_are_sampled_by_domain(monkeypatch):
    monkeypatch.setenv("STARLING_SHARED_DATA", "/data")
    config = load_config(next(path for path in CONFIGS if path.stem == "several"))
    tested = [source for source in config.data.sources if source.set == "test"]
    assert {(source.corpus, source.domain) for source in tested} == {("fsdd", "digits"), ("speechocean762", "read")}
    assert config.train.sampling.kind == "temperature"
    assert config.train.sampling.by == "domain"
    assert config.data.normalizer.kind == "auto"
