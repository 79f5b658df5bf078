"""Configurations with lost or meaningless fields were accepted; a stage failed later, or the error went unnoticed.

`lr: .inf` ended as "not JSON compliant" without a field; shares that left nothing to train on were noticed in the stage
`shard`; a key given twice silently took the last value, in a file and with `--set`.
"""

import math

import pytest
from pydantic import BaseModel, ValidationError
from support import tiny_document, write_config

from flows.cli.simulate import _constants
from tasks.config.pipeline import ConfigError, PipelineConfig, load_config, parse_config
from tasks.config.yaml_text import parse_yaml

SOURCE = {"kind": "table", "path": "x"}


def models_in(annotation, seen):
    """Every configuration class below an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        seen.add(annotation)
        for field in annotation.model_fields.values():
            models_in(field.annotation, seen)
    for part in getattr(annotation, "__args__", ()):
        models_in(part, seen)
    return seen


def number_fields():
    """Class and name of every field that takes a floating-point number."""
    for model in sorted(models_in(PipelineConfig, set()), key=lambda kind: kind.__name__):
        for name, field in model.model_fields.items():
            if "float" in repr(field.annotation):
                yield model, field.alias or name


def refused_as_infinite(model, name, value):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: value})
    return any(error["loc"][0] == name and error["type"] == "finite_number" for error in caught.value.errors())


def test_every_number_field_refuses_infinity_and_nan():
    fields = list(number_fields())
    assert len(fields) > 50
    taken = [
        f"{model.__name__}.{name}: {value}"
        for model, name in fields
        for value in (math.inf, -math.inf, math.nan, "1e999")
        if not any(
            refused_as_infinite(model, name, shape) for shape in (value, [value, value], {"1": value}, {"1": [value]})
        )
    ]
    assert not taken


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1.0e+999"])
def test_non_finite_number_is_refused_naming_its_field(tmp_path, text):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    with pytest.raises(ConfigError, match=r"train\.optimizer\.lr: .*finite"):
        load_config(path, [f"train.optimizer.lr={text}"])


@pytest.mark.parametrize("value", [math.inf, [math.nan], {"deep": [math.inf]}, {1, 2}])
def test_layout_options_must_be_plain_and_finite(value):
    source = {"kind": "gigaspeech", "path": "x", "options": {"subset": value}}
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.options: option 'subset' is .*finite numbers"):
        parse_config({"name": "n", "data": {"sources": [source]}})


@pytest.mark.parametrize("shares", [(0.6, 0.6), (0.5, 0.5), (0.95, 0.1)])
def test_shares_that_leave_no_training_data_are_refused(shares):
    document = {"name": "n", "data": {"sources": [SOURCE], "valid_share": shares[0], "test_share": shares[1]}}
    with pytest.raises(ConfigError, match=r"data: valid_share 0\.\d+ and test_share 0\.\d+ leave nothing to train on"):
        parse_config(document)
    document["data"] |= {"valid_share": 0.4, "test_share": 0.5}
    parse_config(document)  # the remedy
    document["data"] |= {"valid_share": 0.9, "test_share": 0.1, "folds": 4}
    parse_config(document)  # folds take no test share


TWICE = {
    "name: a\nseed: 1\nname: b\n": "'name' is given in line 1 and again in line 3",
    "name: a\ntrain:\n  epochs: 1\n  'epochs': 2\n": "'epochs' is given in line 3 and again in line 4",
    "a: [{b: 1, c: 2, b: 3}]\n": "'b' is given in line 1 and again in line 1",
    "a: {yes: 1, true: 2}\n": "'true' is given in line 1 and again in line 1",
    "x: &x {a: 1}\ny: &y {b: 1}\nz:\n  <<: *x\n  <<: *y\n": "'<<' is given in line 4 and again in line 5",
}


@pytest.mark.parametrize("text", TWICE)
def test_duplicate_key_is_refused_naming_both_lines(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=TWICE[text]):
        load_config(tmp_path / "c.yaml")


def test_similar_keys_and_merged_keys_are_accepted():
    assert parse_yaml("1: a\n'1': b\nno: {a: 1}\nx: {a: 2}\n") == {1: "a", "1": "b", False: {"a": 1}, "x": {"a": 2}}
    merged = "base: &base {a: 1, b: 2}\none: {<<: *base, b: 3}\ntwo: {<<: *base, a: 4}\n"
    assert parse_yaml(merged)["one"] == {"a": 1, "b": 3}
    assert parse_yaml(merged)["two"] == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["train.epochs=1", "seed=2", "train.epochs=3"],
            "'train.epochs=1' and --set 'train.epochs=3' set the same field",
        ),
        (["train.epochs=1", " train.epochs =3"], "set the same field"),
        (["train.epochs=1", "train={epochs: 2}"], "put the one of train before that of train.epochs"),
    ],
)
def test_override_undone_by_another_is_refused(tmp_path, overrides, words):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    with pytest.raises(ConfigError, match=words):
        load_config(path, overrides)


def test_overrides_from_section_to_field_apply_in_order(tmp_path):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    config = load_config(path, ["train={epochs: 2, log_steps: 3}", "train.epochs=5", "train.log_steps=7"])
    assert (config.train.epochs, config.train.log_steps) == (5, 7)


def test_strategy_option_may_be_given_only_once():
    assert _constants("bmuf", ["bmuf.tau=8", "ma.tau=4"]).tau == 8
    with pytest.raises(ValueError, match=r"second one of bmuf\.tau"):
        _constants("bmuf", ["bmuf.tau=8", "bmuf.tau=4"])
    with pytest.raises(ValueError, match="no YAML value"):
        _constants("bmuf", ["bmuf.tau=["])
