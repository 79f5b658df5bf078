import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_document, write_config

from configurable.configuration import descriptions
from speech.models import BlstmConfig
from tasks.config.decoding import tuned_space
from tasks.config.pipeline import ConfigError, PipelineConfig, load_config, parse_config
from training.strategies.registry import STRATEGY_CONFIGS

SOURCE = {"kind": "table", "path": "corpus/metadata.csv"}


def minimal(**fields):
    return {"name": "m", "data": {"sources": [SOURCE]}} | fields


def message(document):
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    return str(caught.value)


def test_smallest_configuration_has_defaults_for_all_other_fields():
    config = parse_config(minimal())
    assert config.model_name == "m"
    assert config.model.kind == "conformer"
    assert parse_config(minimal(register={"model": "other"})).model_name == "other"


@pytest.mark.parametrize(
    ("document", "field", "nearest"),
    [
        (minimal(modelx={}), "modelx", "'model'"),
        (minimal(train={"epoch": 3}), "train.epoch", "'epochs'"),
        (minimal(train={"optimizer": {"zzz": 1}}), "train.optimizer.zzz", "there are: kind, lr, weight_decay"),
        (minimal(train={"augment": {"time_mask": 1}}), "train.augment.time_mask", "'time_masks'"),
        (minimal(registers={}), "registers", "'register'"),
        (minimal(register={"significanse": 0.1}), "register.significanse", "'significance'"),
        ({"name": "m", "data": {"sources": [SOURCE | {"speaker": "a"}]}}, "data.sources.0.speaker", "'speakers'"),
        (
            {"name": "m", "data": {"sources": [{"kind": "synthetic", "synthesis": {"tests": 1}}]}},
            "data.sources.0.synthesis.tests",
            "'test'",
        ),
    ],
)
def test_unknown_field_is_reported_with_the_nearest_known_one(document, field, nearest):
    text = message(document)
    assert f"  {field}: there is no such field" in text
    assert nearest in text


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (minimal(train={"epochs": "many"}), ["train.epochs: must be a whole number (given: 'many')"]),
        (minimal(train={"epochs": -1}), ["train.epochs: must be at least 0 (given: -1)"]),
        (minimal(model={"kind": "blstmm"}), ["model.kind", "'blstm'", "'conformer'", "'blstmm'"]),
        (minimal(model={"dim": 20, "heads": 4}), ["model", "multiple of 2 x heads"]),
        (minimal(train=[1]), ["train: must be a mapping of fields (given: [1])"]),
        ({"name": "m", "data": {"sources": []}}, ["data.sources: too few items: at least 1, not 0"]),
        ({"name": "m"}, ["data: this field is required"]),
        (minimal(name=[1]), ["name: must be text (given: [1])"]),
        (minimal(train={"epochs": 2.5}), ["train.epochs: must be a whole number (given: 2.5)"]),
        (minimal(train={"max_minutes": "x"}), ["train.max_minutes: must be a number (given: 'x')"]),
        (minimal(train={"max_minutes": math.nan}), ["train.max_minutes: must be a finite number"]),
        (minimal(features={"stored": "maybe"}), ["features.stored: must be true or false (given: 'maybe')"]),
        (minimal(data={"sources": 4}), ["data.sources: must be a list (given: 4)"]),
        (minimal(tokens={"kind": "word"}), ["tokens.kind: 'word' is none of 'characters', 'bpe', 'words'; did you "]),
        (minimal(model="conformr"), ["model.kind: 'conformr' is none of", "; did you mean 'conformer'?"]),
        ({"name": "m", "data": {"sources": [{"kind": "table"}]}}, ["data.sources.0", "'table' needs a path"]),
        (minimal(name="a/b"), ["name", "'a/b'"]),
        (minimal(name=""), ["name", "must not be empty"]),
        (minimal(register={"model": "a:b"}), ["register.model", "'a:b'"]),
        ({"name": "m", "data": {"sources": [SOURCE | {"set": "a/b"}]}}, ["data.sources.0.set", "'a/b'"]),
        (minimal(storage={"url": "s3://key:secret@bucket"}), ["storage.url", "must not carry credentials"]),
    ],
)
def test_wrong_value_is_reported_with_the_allowed_ones(document, words):
    text = message(document)
    assert all(word in text for word in words), text


def test_secret_in_a_url_is_not_repeated_in_the_message():
    assert "hunter2" not in message(minimal(storage={"url": "s3://key:hunter2@bucket"}))


def test_every_wrong_field_is_listed():
    text = message(minimal(train={"epochs": "x", "epoch": 1}, model={"kind": 3}))
    assert "3 wrong fields" in text
    assert all(field in text for field in ("train.epochs", "train.epoch:", "model.kind"))


def test_overrides_reach_nested_fields_lists_and_new_mappings(tmp_path):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    config = load_config(
        path,
        [
            "train.optimizer.lr=1e-3",
            "data.sources.0.synthesis.test=3",
            "data.sources.0.speakers=[f1, m1]",
            "decode.kind=beam",
            "train.augment.gain_db=6",
            "train.augment.enabled=false",
            "register.model=other",
            "name=renamed",
        ],
    )
    assert config.train.optimizer.lr == 0.001
    assert config.data.sources[0].synthesis.test == 3
    assert config.data.sources[0].speakers == ("f1", "m1")
    assert config.decode.kind == "beam"
    assert config.train.augment.gain_db == 6
    assert config.train.augment.enabled is False
    assert (config.name, config.model_name) == ("renamed", "other")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.epochs", "write field=value"),
        ("=3", "write field=value"),
        ("name.first=x", "name is 'tiny', which has no field 'first'"),
        ("data.sources.7.limit=1", "it has no item '7'"),
        ("data.sources.x=1", "data.sources is a list of 1, whose items are numbered from 0: it has no item 'x'"),
        ("train.epoch=1", "did you mean 'epochs'"),
        ("train.epochs=[", "not a YAML value"),
        (
            "train.epochs=soon",
            "c.yaml .with --set for train.epochs. has 1 wrong field:\n  train.epochs: must be a whole number",
        ),
    ],
)
def test_error_of_a_wrong_override_names_the_mistake(tmp_path, assignment, words):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    with pytest.raises(ConfigError, match=words):
        load_config(path, [assignment])


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", "just words", "\x00"])
def test_file_that_is_not_a_configuration_is_refused_by_name(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


def test_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="none.yaml does not exist: check the path"):
        load_config(tmp_path / "none.yaml")


def test_yaml_cannot_create_python_objects(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(path)


def test_source_paths_are_relative_to_the_file_with_variables_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("CORPORA", "/corpora")
    sources = [
        SOURCE,
        {"kind": "kaldi", "path": "$CORPORA/x"},
        {"kind": "kaldi", "path": "/abs"},
        {"kind": "table", "path": "~/t.csv"},
    ]
    path = write_config(tmp_path / "c.yaml", {"name": "m", "data": {"sources": sources}})
    paths = [source.path for source in load_config(path).data.sources]
    assert paths == [
        str(tmp_path.resolve() / "corpus/metadata.csv"),
        "/corpora/x",
        "/abs",
        str(Path("~/t.csv").expanduser()),
    ]


def test_configuration_survives_a_json_round_trip():
    config = parse_config(tiny_document(register={"model": "other"}))
    sent = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True)))
    assert parse_config(sent) == config
    assert "register" in sent


def every_field(model, seen=()):
    for name, field in model.model_fields.items():
        yield model, name
        for part in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if hasattr(part, "model_fields") and part not in seen:
                yield from every_field(part, (*seen, part))


def test_every_field_has_a_description_for_the_parameter_form():
    missing = [
        f"{model.__name__}.{name}" for model, name in every_field(PipelineConfig) if name not in descriptions(model)
    ]
    assert not missing


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "data", "sources", "kind", "train", "epochs", "synthesis", "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_a_configuration_or_a_config_error(value):
    document = value if isinstance(value, dict) else {"data": value}
    try:
        parse_config(document)
    except ConfigError as error:
        message = str(error)
    else:
        message = "1 wrong field"
    assert "wrong field" in message


def test_loading_does_not_change_the_environment(tmp_path):
    before = dict(os.environ)
    load_config(write_config(tmp_path / "c.yaml", tiny_document()))
    assert dict(os.environ) == before


def test_defaults_of_quarantine_limit_promotion_and_slots():
    config = parse_config(tiny_document())
    assert config.data.max_quarantined == 0.05
    assert config.register_as.significance == 0.05
    assert config.register_as.promote == "auto"
    assert (config.slots.collision, config.slots.trainings) == ("wait", 1)


def test_override_may_set_a_field_below_a_short_kind(tmp_path):
    path = write_config(tmp_path / "c.yaml", minimal(train={"strategy": "bmuf"}, decode="beam"))
    config = load_config(path, ["train.strategy.tau=3", "decode.beam=5", "model=blstm", "model.bottleneck=7"])
    assert (config.train.strategy.tau, config.decode.beam, config.model.bottleneck) == (3, 5, 7)


def test_field_of_another_kind_is_reported_with_its_kind():
    assert "  model.heads: blstm has no such field; conformer has" in message(
        minimal(model={"kind": "blstm", "heads": 4})
    )
    text = message(minimal(train={"strategy": {"kind": "scpsgd", "warm_steps": 1}}))
    having = [kind for kind, config in STRATEGY_CONFIGS.items() if "warm_steps" in config.model_fields]
    assert {"bmuf", "onebit"} <= set(having)
    assert f"  train.strategy.warm_steps: scpsgd has no such field; {' and '.join(having)} have" in text


def test_a_model_that_cannot_be_split_is_refused_with_the_strategy_that_splits(monkeypatch):
    pipelined = minimal(train={"strategy": "pipeline", "learners_per_node": 2}, model="blstm")
    parse_config(pipelined)
    monkeypatch.setattr(BlstmConfig, "can_be_split", False)
    assert "model blstm cannot be split into stages: use another strategy than pipeline" in message(pipelined)


def test_whisper_that_hears_silence_is_not_split():
    whisper = {"kind": "whisper", "source": "whisper-base", "silence": "encoder"}
    pipelined = minimal(
        train={"strategy": "pipeline", "learners_per_node": 2},
        model=whisper,
        features={"kind": "whisper_logmel", "tail": True},
        data={"sources": [SOURCE], "sample_rate": 16000},
    )
    assert "with model.silence=encoder, Whisper cannot be split" in message(pipelined)
    parse_config(pipelined | {"model": whisper | {"silence": "none"}})


def test_a_conformer_that_draws_chunks_is_not_split():
    pipelined = minimal(train={"strategy": "pipeline", "learners_per_node": 2}, features={"cmvn": "none"})
    parse_config(pipelined)
    assert "with model.chunk, a Conformer cannot be split" in message(pipelined | {"model": {"chunk": {}}})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decode": "words"}, "decode.kind words needs words: give decode.lm .* or add a section lm"),
        ({"decode": "tokens"}, "decode.kind tokens needs a language model of tokens: give decode.lm .*section lm"),
        ({"decode": "words", "lm": {"unit": "token"}}, "needs a language model of words: set lm.unit: word"),
        ({"decode": "tokens", "lm": {}}, "needs a language model of tokens: set lm.unit: token"),
        (
            {"decode": "words", "lm": {"kind": "class"}},
            "lm.kind class makes none: use lm.kind ngram or .*unigram, or name",
        ),
        ({"tune": {}}, "decode.kind greedy has no parameters to tune"),
        ({"decode": "beam", "tune": {"space": {"lm_weight": [1]}}}, "tune.space: lm_weight is not a number of .* beam"),
        (
            {"decode": "words", "lm": {}, "tune": {"space": {"lm_weight": [-1]}}},
            "tune.space: lm_weight=-1 is refused: must be at least 0",
        ),
        ({"decode": "beam", "tune": {"space": {"beam": [1.5]}}}, "beam=1.5 is refused: must be a whole number"),
        (
            {"decode": "beam", "tune": {"method": "tpe", "space": {"beam": {"low": 1, "high": 9}}}},
            "tune.space: beam=3.96 is refused: must be a whole number.*set integer: true",
        ),
        (
            {"decode": "beam", "tune": {"space": {"beam_threshold": {"low": 1, "high": 9}}}},
            r"tune.space.beam_threshold: a grid cannot exhaust .*\(points\)",
        ),
        (
            {"decode": "beam", "tune": {"trials": 2, "space": {"beam": [1, 2, 3]}}},
            "tune.space: the grid has more than 2 points, and tune.trials is 2.*Set tune.trials=0",
        ),
        (
            {"decode": "beam", "tune": {"method": "hyperband", "space": {"beam": [1, 2]}}},
            "tune.method: hyperband compares trials after a part of their training, .* use grid, random or tpe",
        ),
        (
            {"decode": "beam", "tune": {"space": {"beam": {"choices": [1], "when": {"beem": 1}}}}},
            "tune.space.beam.when.beem: conditions are on fields of the space",
        ),
        ({"decode": "beam", "tune": {"grid": {"beam": [1]}, "space": {"beam": [1]}}}, "write all fields in space"),
    ],
)
def test_decoders_with_missing_parts_are_refused(fields, said):
    assert re.search(said, message(minimal(**fields)))


def test_decoders_use_the_stages_or_a_named_language_model():
    assert parse_config(minimal(decode="words", lm={})).lm.kind == "ngram"
    assert parse_config(minimal(decode="tokens", lm={"unit": "token"})).lm.unit == "token"
    parse_config(minimal(decode={"kind": "words", "lm": "x.arpa"}, lm={"kind": "class"}))  # names its own


def tuned_values(**tune):
    config = parse_config(minimal(decode={"kind": "beam", "beam": 4}, tune=tune))
    return {name: parameter.choices for name, parameter in tuned_space(config.decode, config.tune).parameters.items()}


def test_values_to_tune_are_whole_numbers_where_the_decoder_has_them_and_the_configured_one_among_them():
    assert tuned_values(space={"beam": [8.0, 2]}) == {"beam": (2, 4, 8)}
    assert all(type(value) is int for value in tuned_values(space={"beam": [8.0, 2]})["beam"])
    assert tuned_values(grid={"beam": [8, 2]}) == {"beam": (2, 4, 8)}  # as older configurations have it
    assert tuned_values(space={"beam": {"low": 1, "high": 3, "integer": True}}) == {"beam": (1, 2, 3, 4)}
    assert tuned_values(method="random", space={"beam": {"low": 1, "high": 3, "integer": True}}) == {"beam": ()}
