"""Spaces of searches: their points, and mistakes that are named with the field and the remedy before anything runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny_document

from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.search.config import trial_config
from tasks.search.space import ParameterConfig, Space

LR = {"train.optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}


def searched(space=LR, epochs=9, schedule=None, **search):
    document = tiny_document()
    document["train"] |= {"epochs": epochs} | ({"schedule": schedule} if schedule else {})
    return parse_config(document | {"search": {"space": space, **search}})


@given(
    low=st.floats(1e-6, 1e3),
    factor=st.floats(1.001, 1e4),
    log=st.booleans(),
    position=st.floats(0, 1),
)
def test_every_position_is_a_value_of_its_range(low, factor, log, position):
    parameter = ParameterConfig(low=low, high=low * factor, log=log)
    value = parameter.at(position)
    assert parameter.holds(value)
    assert parameter.position(value) == pytest.approx(position, abs=1e-6)


@pytest.mark.parametrize("log", [False, True])
def test_each_whole_number_of_a_range_can_be_drawn_and_on_a_linear_scale_equally_often(log):
    parameter = ParameterConfig(low=1, high=4, integer=True, log=log)
    drawn = [parameter.at(position) for position in np.linspace(0, 1, 40_000)]
    shares = [drawn.count(value) / 40_000 for value in (1, 2, 3, 4)]
    assert sum(shares) == 1
    ratio = math.log(9)
    expected = [math.log((v + 0.5) / (v - 0.5)) / ratio for v in (1, 2, 3, 4)] if log else [0.25] * 4
    assert shares == pytest.approx(expected, abs=1e-3)
    assert all(type(value) is int for value in drawn)


def test_true_is_not_one_and_a_number_is_not_its_text():
    parameter = ParameterConfig(choices=[1, "1", True])
    assert [parameter.position(value) for value in (1, "1", True)] == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    assert not ParameterConfig(choices=[1]).holds(True)


def test_fields_follow_those_that_their_conditions_name():
    fields = {
        "c": {"low": 0.0, "high": 1.0, "when": {"b": [2, 3]}},
        "b": {"low": 1, "high": 3, "integer": True, "when": {"a": "sgd"}},
        "a": ["adamw", {"kind": "sgd", "momentum": 0.5}],
    }
    space = Space({name: ParameterConfig.model_validate(value) for name, value in fields.items()})
    assert list(space.parameters) == ["a", "b", "c"]
    sgd = {"kind": "sgd", "momentum": 0.5}
    points = {tuple(sorted(space.draw(np.random.default_rng(seed)))) for seed in range(50)}
    assert points == {("a",), ("a", "b"), ("a", "b", "c")}
    assert space.holds({"a": "adamw"})
    assert space.holds({"a": sgd, "b": 1})
    assert space.holds({"a": sgd, "b": 3, "c": 0.5})
    assert not space.holds({"a": "adamw", "b": 1})
    assert not space.holds({"a": sgd, "b": 3})
    assert not space.holds({"a": sgd, "b": 3, "c": 1.5})


def test_a_point_and_its_positions_are_each_others_inverse():
    fields = {"a": [1, 2, 5], "b": {"low": 1, "high": 9, "integer": True, "log": True}}
    fields |= {"c": {"low": -1.0, "high": 1.0, "when": {"a": 5}}}
    space = Space({name: ParameterConfig.model_validate(value) for name, value in fields.items()})
    for seed in range(30):
        values = space.draw(np.random.default_rng(seed))
        assert space.at(np.nan_to_num(space.positions(values))) == pytest.approx(values)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "search.space is empty: name the fields"),
        ({"train.optimizer.lrr": [1]}, "train.optimizer.lrr: there is no such field; did you mean 'lr'?"),
        ({"optimizer.lr": [0.1]}, "optimizer"),
        (
            {"model.dropout": {"low": 0.2, "high": 0.2}},
            "search.space.model.dropout: the range from 0.2 to 0.2 is empty",
        ),
        ({"model.dropout": {"low": 0.3, "high": 0.2}}, "low must be below high"),
        ({"model.dropout": {"low": 0.1}}, "give a list of choices, or a range by low and high"),
        ({"model.dropout": []}, "give a list of choices"),
        ({"model.dropout": {"low": 0, "high": 0.5, "log": True}}, "logarithmic range cannot begin at 0: set low above"),
        ({"model.dropout": {"low": -1, "high": 0.5, "log": True}}, "logarithmic range cannot begin at -1"),
        ({"model.dropout": [0.1, 2]}, "search.space: model.dropout=2 is refused: model.dropout: must be less than 1"),
        ({"model.dropout": [0.1, 0.1]}, "the choice 0.1 is given twice"),
        ({"model.dropout": {"choices": [0.1], "log": True}}, "choices have no log"),
        ({"model.dropout": {"low": 0, "high": 0.5, "points": 1}}, "points is 1"),
        ({"train.optimizer.lr": {"low": 0, "high": 0.1}}, "train.optimizer.lr=0 is refused"),
        ({"train.optimizer": ["adam"]}, "'adam' is none of 'adamw', 'sgd'; did you mean 'adamw'?"),
        ({"model.layers": {"low": 1, "high": 4}}, "must be a whole number (given: 2.11); set integer: true"),
        ({"model.layers": {"low": 1, "high": 4.5, "integer": True}}, "does not end at whole numbers"),
        ({"data.valid_share": [0.1, 0.2]}, "data cannot be searched, because trials would no longer be compared"),
        ({"train.epochs": [1, 2]}, "trials would have different budgets"),
        ({"train": [{}]}, "trials would have different budgets"),
        ({"seed": [1, 2]}, "the best seed is no better configuration"),
        ({"train.seed": [1, 2]}, "the best seed is no better configuration"),
        ({"tokens.kind": ["characters", "bpe"]}, "losses cannot be compared: set search.minimize=wer"),
        (
            {"train.optimizer": ["adamw", "sgd"], "train.optimizer.momentum": {"low": 0, "high": 0.9}},
            "adamw has no such field; sgd has; if train.optimizer.momentum is only for other values of",
        ),
        (
            {"train.optimizer.momentum": {"low": 0, "high": 0.9, "when": {"train.optimiser": "sgd"}}},
            "when.train.optimiser: conditions are on fields of the space",
        ),
        (
            {"train.optimizer": ["adamw"], "model.dropout": {"choices": [0, 0.1], "when": {"train.optimizer": "sgd"}}},
            "train.optimizer is never 'sgd' in this space",
        ),
        (
            {"model.dropout": {"choices": [0], "when": {"model.layers": 1}}}
            | {"model.layers": {"choices": [1], "when": {"model.dropout": 0}}},
            "go in a circle",
        ),
    ],
)
def test_a_mistake_in_the_space_is_named_with_its_field_and_remedy(space, message):
    with pytest.raises(ConfigError) as caught:
        searched(space)
    assert message in str(caught.value)


def test_a_configuration_with_a_space_is_read_from_all_its_fields_as_deployments_have_it():
    config = searched(LR | {"model.dropout": [0.1, 0.2]})
    assert parse_config(config.model_dump(mode="json", by_alias=True)) == config


BEAM = {"decode": "beam", "search": {"minimize": "wer", "space": {"decode.beam": [2, 4]}}}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"minimize": "loss"}, "search.space: decoding changes no loss: set search.minimize=wer"),
        ({"method": "asha"}, "search.method: asha compares trials after a part of their training"),
        ({"budget": "minutes", "max_budget": 9}, "search.budget counts training, and a search over decode trains"),
        ({"total_budget": 9}, "search.total_budget limits training, and a search over decode trains nothing"),
        ({"parallel": 2}, "search.parallel counts trainings, and a search over decode trains nothing"),
        ({"space": {"decode.beam": [0, 4]}}, "search.space: decode.beam=0 is refused: decode.beam: must be at least 1"),
        ({"space": {"decode.beam": {"low": 1, "high": 9}}}, "must be a whole number (given: 3.96); set integer: true"),
        ({"space": {"decode.kind": ["beam"]}}, "search.space: decode: kind is not a number of decode.kind beam"),
        ({"space": {"decode.beem": [2]}}, "decode: beem is not a number of decode.kind beam; did you mean 'beam'?"),
        ({"space": {"decode": ["greedy"]}}, "search.space.decode: decoding is searched for a trained model"),
        ({"space": LR | {"decode.beam": [2]}}, "search.space.decode.beam: decoding is searched for a trained model"),
        ({"space": {"lm.order": [2, 3]}}, "lm cannot be searched, because no trial estimates another language model"),
        ({"space": {"tune.utterances": [2, 3]}}, "tune cannot be searched, because it searches itself"),
    ],
)
def test_a_search_over_decoding_that_cannot_be_made_is_refused_with_the_remedy(search, message):
    assert parse_config(tiny_document(**BEAM)).search.decodes
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_document(**BEAM | {"search": BEAM["search"] | search}))
    assert message in str(caught.value)


def test_every_choice_is_tried_before_a_search_and_a_combination_that_fits_suffices():
    # two nodes fit adpsgd only, so a trial may fail, but no field is wrong
    searched({"train.strategy": ["adpsgd", "scpsgd"], "train.nodes": [1, 2]})
    with pytest.raises(ConfigError, match=r"train\.nodes=2 is refused"):
        searched({"train.strategy": ["single", "scpsgd"], "train.nodes": [1, 2]})


COSINE = {"kind": "cosine"}


def test_a_schedule_that_depends_on_the_length_is_refused_where_trials_are_continued():
    with pytest.raises(ConfigError, match=r"cosine depends on the number of epochs.*train\.schedule\.epochs=9"):
        searched(schedule=COSINE, method="hyperband")
    searched(schedule=COSINE, method="random")
    searched(schedule=COSINE | {"epochs": 9}, method="hyperband")
    searched(schedule=COSINE, method={"kind": "hyperband", "rungs": "restart"})
    kinds = {"train.schedule.kind": ["published", "cosine"]}
    with pytest.raises(ConfigError, match=r"train\.schedule\.kind=cosine is refused"):
        searched(kinds, method="asha")
    searched(kinds, schedule={"epochs": 9}, method="asha")


def test_a_search_without_rungs_to_compare_is_refused():
    with pytest.raises(ConfigError, match=r"train\.epochs is 2, and asha compares trials after 1 and then after 3"):
        searched(epochs=2, method="asha")


def test_a_limit_of_minutes_of_each_training_is_refused_with_the_limits_of_a_search():
    document = tiny_document()
    document["train"] |= {"max_minutes": 5}
    parse_config(document)
    with pytest.raises(ConfigError, match=r"train\.max_minutes is 5, and trials.*max_minutes=0\. search\.budget"):
        parse_config(document | {"search": {"space": LR}})


HYPERBAND = {"kind": "hyperband", "min_budget": 30}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"max_budget": 9}, "max_budget is train.epochs if budgets count epochs: leave it out"),
        ({"budget": "utterances"}, "budget is utterances: set max_budget to how many a trial trains at most"),
        ({"budget": "hours", "max_budget": 9}, "'hours' is none of 'epochs', 'utterances', 'minutes'"),
        (
            {"budget": "utterances", "max_budget": 90, "method": "asha"},
            "asha would compare trials after one utterance: set search.method.min_budget",
        ),
        (
            {"budget": "utterances", "max_budget": 80, "method": HYPERBAND},
            "search.max_budget is 80, and hyperband compares trials after 30 and then after 3 times as many utterances",
        ),
        ({"budget": "minutes", "max_budget": 2, "method": "bohb"}, "search.max_budget is 2, and bohb compares trials"),
        ({"method": {"kind": "asha", "min_epochs": 2}}, "min_epochs is no longer a field: write `min_budget`"),
        ({"total_epochs": 9}, "total_epochs is no longer a field: write `total_budget`"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_remedy(search, message):
    with pytest.raises(ConfigError) as caught:
        searched(**search)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("unit", "field", "value"), [("utterances", "max_utterances", 90), ("minutes", "max_minutes", 90.0)]
)
def test_budgets_other_than_epochs_end_a_training_within_its_epochs_and_leave_its_schedule(unit, field, value):
    config = searched(schedule=COSINE, budget=unit, max_budget=270, method=HYPERBAND)
    assert config.search.largest(config.train) == 270
    assert config.search.build(270).brackets == [((9, 30), (3, 90), (1, 270)), ((3, 90), (1, 270)), ((3, 270),)]
    trial = trial_config(config, {}, 90).train
    assert (getattr(trial, field), trial.epochs, trial.schedule) == (value, 9, config.train.schedule)
    assert type(getattr(trial, field)) is type(value)  # an address tells 90 from 90.0
    assert config.search.model_dump(mode="json")["budget"] == unit


def test_the_name_of_a_study_has_no_slash():
    with pytest.raises(ConfigError, match=r"search\.study: .*has no '/'"):
        searched(study="a/seeds-of-1")


def test_a_password_in_the_url_of_studies_is_refused():
    with pytest.raises(ConfigError, match=r"STARLING_STUDIES"):
        searched(url="postgresql://starling:secret@db/studies")


def test_a_mistake_is_found_in_the_file_and_with_its_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\ndata: {sources: [{kind: synthetic}]}\n"
        "search:\n  space:\n    model.dropout:\n      low: 1\n      high: x\n"
    )
    with pytest.raises(ConfigError, match=r"a\.yaml:7: search\.space\.model\.dropout\.high: must be a number"):
        load_config(path)


def test_a_trial_has_the_configuration_with_its_values_and_epochs_and_without_the_search():
    space = LR | {"train.optimizer": ["adamw", {"kind": "sgd", "momentum": 0.5}], "train.augment.time_masks": [0, 2]}
    config = searched(space)
    values = {
        "train.optimizer.lr": 0.01,
        "train.optimizer": {"kind": "sgd", "momentum": 0.5},
        "train.augment.time_masks": 0,
    }
    trial = trial_config(config, values, 3)
    assert trial.search is None
    assert trial.train.epochs == 3
    assert trial.train.optimizer.model_dump() | {"lr": 0.01} == trial.train.optimizer.model_dump()
    assert (trial.train.optimizer.kind, trial.train.optimizer.momentum) == ("sgd", 0.5)
    assert trial.train.augment == config.train.augment.model_copy(update={"time_masks": 0})
    whole = config.model_copy(update={"search": None})
    assert trial_config(config, {}, 9) == trial_config(whole, {}, 9) == whole
