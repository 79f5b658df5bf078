"""Configuration of a search, and what is checked before it begins: every value must make a valid configuration."""

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from configurable.configuration import Configuration
from configurable.former_fields import former_fields
from tasks.config.assignments import assign_value
from tasks.config.decoding import check_searched
from tasks.config.mistakes import choices, explained
from tasks.search.methods import MethodChoice
from tasks.search.methods.base import RungsConfig, SearchMethod, SearchPlan, check_untrained
from tasks.search.methods.random import RandomConfig
from tasks.search.space import ParameterConfig, Space, SpaceError, Values
from training.config import TrainConfig

BUDGET_FIELDS = {"epochs": "epochs", "utterances": "max_utterances", "minutes": "max_minutes"}
"""The field of `train` that ends a training, by what it counts."""
_RESULT = "trials would no longer be compared on the same validation set"
_BUDGET = "trials would have different budgets"
_NO_RESULT = "it has no effect on a trial's result"
_NOT_SEARCHED = {
    "name": _NO_RESULT,
    "seed": "the best seed is no better configuration",
    "data": _RESULT,
    **{f"train.{name}": _BUDGET for name in BUDGET_FIELDS.values()},
    "train.schedule.epochs": "it must fit the budgets",
    "train.seed": "the best seed is no better configuration",
    "search": "a search cannot vary itself",
    "tune": "it searches itself, over fields of decode",
    **dict.fromkeys(("lm", "lm_train", "rescoring"), "no trial estimates another language model"),
    **dict.fromkeys(("storage", "runner", "slots", "score", "register", "report"), _NO_RESULT),
}
"""Fields and sections that a search may not vary, and why."""
_DECODE = "decode."
_OWN_LOSS = ("tokens", "train.objective", "recognizer")
"""Fields that change what a loss counts, so that losses cannot be compared."""


class SearchConfig(Configuration):
    """A search for the best values of some fields, on the validation set."""

    _former = former_fields("write `total_budget`", total_epochs=0)

    method: MethodChoice = RandomConfig()
    """How trials are chosen. `grid` tries all combinations, `random` draws each trial, and `tpe` models the results;
    these train every trial to the end. `hyperband`, `asha` and `bohb` begin many trials and train the best on."""
    space: dict[str, ParameterConfig]
    """The fields to vary, such as `train.optimizer.lr`, each with a range or a list of choices. If all are numbers of
    `decode`, the configuration is trained once, and trials train nothing."""
    minimize: Literal["loss", "wer"] = "loss"
    """What of the validation set is minimized: the model's loss, or its word error rate, by greedy decoding or, in a
    search over `decode`, as the trial says."""
    trials: int = Field(default=0, ge=0, le=1_000_000)
    """Number of trials to begin; 0: all of a grid, one pass of the brackets of `hyperband` and `bohb`, otherwise 20.
    Brackets are begun until they have at least this many."""
    budget: Literal["epochs", "utterances", "minutes"] = "epochs"
    """What the budget of a trial counts: its epochs, utterances of all epochs together, or minutes of training."""
    max_budget: int = Field(default=0, ge=0)
    """Budget of a trial's whole training; with epochs it is `train.epochs`, and this is 0."""
    seed: int = 1
    """Seed of the search's draws; all trials are trained with the configuration's `seed`."""
    parallel: int = Field(default=1, ge=1, le=1000)
    """Trials that train at the same time, as far as `slots.trainings` allows."""
    utterances: int = Field(default=200, ge=1)
    """Of a search over `decode`: number of validation utterances, drawn at random; a smaller set is used whole."""
    total_budget: int = Field(default=0, ge=0)
    """No trial begins or continues once the trials have trained this much in all, in what `budget` counts; 0: no
    limit."""
    hours: float = Field(default=0.0, ge=0)
    """No trial begins or continues after this much time, pauses of the search not counted; 0: no limit."""
    trial_hours: float = Field(default=0.0, ge=0)
    """A trial that works longer than this at a time, on its own data and its training, is stopped, and counts as
    failed; 0: no limit."""
    failures: int = Field(default=5, ge=1)
    """The search ends after this many failed trials in a row: what they share is probably wrong."""
    keep_gb: float = Field(default=20.0, ge=0)
    """Most gigabytes of checkpoints of paused trials; the trials with the highest losses lose theirs first, and
    begin again with their first epoch if they go on."""
    seeds: int = Field(default=0, ge=0, le=100)
    """Once the search has ended or reached a limit, its best configuration is trained again with this many other seeds,
    which gives the mean and how much trainings differ by chance; 0: not."""
    evaluate_best: bool = True
    """Whether the best of these trainings decodes and scores the test sets and is registered, as by `starling run`."""
    study: str = ""
    """Name that the results are kept under; by default the configuration's name."""
    url: str = ""
    """Database of the results, as SQLAlchemy writes it; by default $STARLING_STUDIES, or SQLite in the data folder."""

    @field_validator("study")
    @classmethod
    def _plain_name(cls, study: str) -> str:
        if "/" in study:
            raise ValueError(f"the name of a study has no '/' (given: {study!r}): use '-'")
        return study

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if re.search(r"://[^/]*:[^/]*@", url):
            raise ValueError("a database's URL must not carry a password here: set $STARLING_STUDIES to it")
        return url

    @model_validator(mode="after")
    def _check_max_budget(self) -> "SearchConfig":
        if self.budget == "epochs" and self.max_budget:
            raise ValueError("max_budget is train.epochs if budgets count epochs: leave it out, and set train.epochs")
        if self.budget != "epochs" and not self.max_budget:
            raise ValueError(f"budget is {self.budget}: set max_budget to how many a trial trains at most")
        return self

    @property
    def decodes(self) -> bool:
        """Whether only decoding is searched: trials then train nothing, and decode with the same model."""
        return bool(self.space) and all(name.startswith(_DECODE) for name in self.space)

    def largest(self, train: TrainConfig) -> int:
        """Budget of a trial's whole training; 0 if it trains nothing."""
        return 0 if self.decodes else self.max_budget or train.epochs

    def plan(self, largest: int) -> SearchPlan:
        """What the method is to do.

        Args:
            largest: Budget of a whole training; 0 if trials train nothing.

        Raises:
            SpaceError: The space is empty, or a condition cannot hold.
        """
        return SearchPlan(Space(self.space), largest, self.trials, self.seed)

    def build(self, largest: int) -> SearchMethod:
        """The method at work on the space.

        Raises:
            ValueError: It cannot search this space, or a package is missing.
        """
        return self.method.build(self.plan(largest))


def trial_document(document: Mapping[str, Any], values: Values, fields: frozenset[str]) -> dict[str, Any]:
    """The document of a trial's configuration: the searched one with other values, and without the search.

    Args:
        document: The searched configuration's, without what equals the defaults.
        values: The trial's, by field.
        fields: Those that take one of several kinds.
    """
    changed = copy.deepcopy({name: part for name, part in document.items() if name != "search"})
    for name in sorted(values, key=lambda name: name.count(".")):  # a section first, then its fields
        assign_value(changed, name, copy.deepcopy(values[name]), fields)
    return changed


def budget_fields(config: Any, budget: int) -> dict[str, float]:
    """The field of `train` that ends a training after a budget, with its value.

    Args:
        config: The searched configuration, a `PipelineConfig`; without a section `search`, budgets are epochs.
        budget: Of a trial.
    """
    unit = config.search.budget if config.search else "epochs"
    return {BUDGET_FIELDS[unit]: float(budget) if unit == "minutes" else budget}


def trial_config(config: Any, values: Values, budget: int) -> Any:
    """The configuration that a trial is trained with.

    Args:
        config: The searched configuration, a `PipelineConfig`.
        values: The trial's, by field.
        budget: What to train to; 0 leaves the training as it is.

    Raises:
        ValueError: A value, or a combination of values, is refused.
    """
    fields = frozenset(choices(type(config)))
    ends = budget_fields(config, budget) if budget else {}
    values = values | {f"train.{name}": value for name, value in ends.items()}
    document = trial_document(plain_document(config), values, fields)
    try:
        return type(config).model_validate(document)
    except ValidationError as error:
        raise ValueError("; ".join(explained(error, type(config)))) from error


def plain_document(config: BaseModel) -> dict[str, Any]:
    """A configuration as YAML would have it, without fields that equal their defaults."""
    return config.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def check_search(config: Any) -> None:
    """Check that a search can be made: its fields exist and accept all values, and its method can search them.

    Args:
        config: The searched configuration, a `PipelineConfig`.

    Raises:
        ValueError: If not; the message names the fields, and the remedies.
    """
    search, train = config.search, config.train
    space = search.plan(search.largest(train)).space
    _check_fields(search)
    if search.decodes:
        _check_decoding(config)
    else:
        _check_budgets(search, train)
    document, fields = plain_document(config), frozenset(choices(type(config)))

    def refused(values: Values) -> str:
        try:
            trial = type(config).model_validate(trial_document(document, values, fields))
        except ValidationError as error:
            return "; ".join(explained(error, type(config)))
        except ValueError as error:
            return str(error)
        return _not_continued(search, trial.train)

    varied = any(name == "train.schedule" or name.startswith("train.schedule.") for name in search.space)
    if not varied and (why := _not_continued(search, train)):
        raise SpaceError(f"search.method: {why}")
    if mistakes := list(space.refused(refused)):
        raise SpaceError("; ".join(mistakes))
    if search.method.kind != "tpe":  # which refuses no space, and imports Optuna
        search.build(search.largest(train))


def decoding_values(config: Any, values: Values) -> Values:
    """A trial's values by field of `decode`, as the decoder's configuration takes them.

    Args:
        config: The searched configuration, a `PipelineConfig`.
        values: By field, such as `decode.beam`.

    Raises:
        ValueError: A combination of values is refused.
    """
    decode = trial_config(config, values, 0).decode
    return {name: getattr(decode, name) for name in (path.removeprefix(_DECODE) for path in values)}


def _check_decoding(config: Any) -> None:
    search = config.search
    check_untrained(search.method, "search")
    config.system.require("tuning")
    check_searched(config.decode, [name.removeprefix(_DECODE) for name in search.space], "search.space: decode")
    if search.minimize != "wer":
        raise SpaceError("search.space: decoding changes no loss: set search.minimize=wer")
    for name, what in (
        ("budget", "counts training"),
        ("total_budget", "limits training"),
        ("parallel", "counts trainings"),
        ("seeds", "trains again"),
    ):
        if getattr(search, name) != SearchConfig.model_fields[name].default:
            raise SpaceError(
                f"search.{name} {what}, and a search over decode trains nothing: leave it out (search.trials and "
                "search.hours limit such a search, and runner.workers are the processes that decode)"
            )


def _check_fields(search: SearchConfig) -> None:
    if not search.decodes and (mixed := [name for name in search.space if f"{name}.".startswith(_DECODE)]):
        raise SpaceError(
            f"search.space.{mixed[0]}: decoding is searched for a trained model, without training. Name fields of "
            "decode alone, such as decode.beam, or none: search the training first, and then the decoding with the "
            "values found"
        )
    for name in search.space:
        for other, why in _NOT_SEARCHED.items():
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise SpaceError(f"search.space.{name}: {other} cannot be searched, because {why}: leave it out")
        if search.minimize == "loss" and any(name == own or name.startswith(f"{own}.") for own in _OWN_LOSS):
            raise SpaceError(
                f"search.space.{name} changes what the loss counts, so that losses cannot be compared: set "
                "search.minimize=wer"
            )


def _check_budgets(search: SearchConfig, train: TrainConfig) -> None:
    method, largest = search.method, search.largest(train)
    for name in (name for name in BUDGET_FIELDS.values() if name != "epochs"):
        if limit := getattr(train, name):
            raise SpaceError(
                f"search: train.{name} is {limit:g}, and trials would have different budgets: set train.{name}=0. "
                "search.budget says what trials are trained to, search.trial_hours limits a trial, search.hours the "
                "search"
            )
    if not isinstance(method, RungsConfig):
        return
    unit, where = search.budget, "search.max_budget" if search.max_budget else "train.epochs"
    if unit == "utterances" and method.min_budget == 1:
        raise SpaceError(
            f"search.method: {method.kind} would compare trials after one utterance: set search.method.min_budget to "
            "as many utterances as tell trials apart, such as those of an epoch"
        )
    if len(method.budgets(largest)) == 1:
        raise SpaceError(
            f"search.method: {where} is {largest}, and {method.kind} compares trials after {method.min_budget} and "
            f"then after {method.eta} times as many {unit}: raise {where}, or use method random or tpe"
        )


def _not_continued(search: SearchConfig, train: TrainConfig) -> str:
    """Why a trial cannot train on from where it paused, if the method wants that; empty if it can."""
    method = search.method
    if train.schedule.fixed or not method.pauses or method.restarts or search.budget != "epochs":
        return ""  # other budgets end a training within its epochs, whose number stays
    return (
        f"train.schedule.kind {train.schedule.kind} depends on the number of epochs, and {method.kind} continues "
        f"trials: set train.schedule.epochs={train.epochs} (a rung is then the first part of a whole training), "
        "another kind of schedule, or search.method.rungs=restart (every rung trains from the start, with a schedule "
        "of its own)"
    )
