"""Configuration of a search, and what is checked before it begins: every value must make a valid configuration."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from storage.batching import derive_seed
from tasks.config.assignments import assign_value
from tasks.config.mistakes import choices, explained
from tasks.search.methods import MethodChoice, MethodConfig
from tasks.search.methods.base import RungsConfig, SearchMethod, SearchPlan
from tasks.search.methods.random import RandomConfig
from tasks.search.space import ParameterConfig, Space, SpaceError, Values
from training.config import TrainConfig

_POINTS = 10
"""Points at which each choice, and each of a few values of a range, is tried before a search."""
_RESULT = "trials would no longer be compared on the same validation set"
_NO_RESULT = "it has no effect on a trial's result"
_NOT_SEARCHED = {
    "name": _NO_RESULT,
    "seed": "the best seed is no better configuration",
    "data": _RESULT,
    "train.epochs": "it is the largest budget of a trial",
    "train.max_minutes": "trials would have different budgets",
    "train.schedule.epochs": "it must fit the budgets",
    "train.seed": "the best seed is no better configuration",
    "search": "a search cannot vary itself",
    **dict.fromkeys(("storage", "runner", "slots", "score", "register", "report"), _NO_RESULT),
}
"""Fields and sections that a search may not vary, and why."""
_OWN_LOSS = ("tokens", "train.objective", "recognizer")
"""Fields that change what a loss counts, so that losses cannot be compared."""


class SearchConfig(BaseModel):
    """A search for the best values of some fields, on the validation set."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    method: MethodChoice = RandomConfig()
    """How trials are chosen. `grid` tries all combinations, `random` draws each trial, and `tpe` models the results;
    these train every trial to the end. `hyperband`, `asha` and `bohb` begin many trials and train the best on."""
    space: dict[str, ParameterConfig]
    """The fields to vary, such as `train.optimizer.lr`, each with a range or a list of choices."""
    minimize: Literal["loss", "wer"] = "loss"
    """What of the validation set is minimized: the model's loss, or its word error rate by greedy decoding."""
    trials: int = Field(default=0, ge=0, le=1_000_000)
    """Number of trials to begin; 0: all of a grid, one pass of the brackets of `hyperband` and `bohb`, otherwise 20.
    Brackets are begun until they have at least this many."""
    seed: int = 1
    """Seed of the search's draws; all trials are trained with the configuration's `seed`."""
    parallel: int = Field(default=1, ge=1, le=1000)
    """Trials that train at the same time, as far as `slots.trainings` allows."""
    total_epochs: int = Field(default=0, ge=0)
    """No trial begins or continues once the trials have trained this many epochs in all; 0: no limit."""
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

    def plan(self, largest: int) -> SearchPlan:
        """What the method is to do.

        Args:
            largest: Epochs of a whole training.

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


def trial_config(config: Any, values: Values, epochs: int) -> Any:
    """The configuration that a trial is trained with.

    Args:
        config: The searched configuration, a `PipelineConfig`.
        values: The trial's, by field.
        epochs: Epochs to train to.

    Raises:
        ValueError: A value, or a combination of values, is refused.
    """
    fields = frozenset(choices(type(config)))
    document = trial_document(plain_document(config), values | {"train.epochs": epochs}, fields)
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
    if train.max_minutes:
        raise SpaceError(
            f"search: train.max_minutes is {train.max_minutes:g}, and trials would have different budgets: set "
            "train.max_minutes=0; search.trial_hours limits a trial, and search.hours the search"
        )
    space = search.plan(train.epochs).space
    _check_fields(search)
    _check_budgets(search.method, train.epochs)
    document, fields = plain_document(config), frozenset(choices(type(config)))

    def refused(values: Values) -> str:
        try:
            trial = type(config).model_validate(trial_document(document, values, fields))
        except ValidationError as error:
            return "; ".join(explained(error, type(config)))
        except ValueError as error:
            return str(error)
        return _not_continued(search.method, trial.train)

    varied = any(name == "train.schedule" or name.startswith("train.schedule.") for name in search.space)
    if not varied and (why := _not_continued(search.method, train)):
        raise SpaceError(f"search.method: {why}")
    if mistakes := list(_refused_values(space, refused)):
        raise SpaceError("; ".join(mistakes))
    if search.method.kind != "tpe":  # which refuses no space, and imports Optuna
        search.build(train.epochs)


def _check_fields(search: SearchConfig) -> None:
    for name in search.space:
        for other, why in _NOT_SEARCHED.items():
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise SpaceError(f"search.space.{name}: {other} cannot be searched, because {why}: leave it out")
        if search.minimize == "loss" and any(name == own or name.startswith(f"{own}.") for own in _OWN_LOSS):
            raise SpaceError(
                f"search.space.{name} changes what the loss counts, so that losses cannot be compared: set "
                "search.minimize=wer"
            )


def _check_budgets(method: MethodConfig, largest: int) -> None:
    if isinstance(method, RungsConfig) and len(method.budgets(largest)) == 1:
        raise SpaceError(
            f"search.method: train.epochs is {largest}, and {method.kind} compares trials after {method.min_epochs} "
            f"and then after {method.eta} times as many epochs: raise train.epochs, or use method random or tpe"
        )


def _not_continued(method: MethodConfig, train: TrainConfig) -> str:
    """Why a trial cannot train on from where it paused, if the method wants that; empty if it can."""
    if train.schedule.fixed or not method.pauses or method.restarts:
        return ""
    return (
        f"train.schedule.kind {train.schedule.kind} depends on the number of epochs, and {method.kind} continues "
        f"trials: set train.schedule.epochs={train.epochs} (a rung is then the first part of a whole training), "
        "another kind of schedule, or search.method.rungs=restart (every rung trains from the start, with a schedule "
        "of its own)"
    )


def _refused_values(space: Space, refused: Callable[[Values], str]) -> Iterator[str]:
    """A message for each field of which a choice, or a part of its range, makes no valid configuration.

    Args:
        space: The space.
        refused: Says why a configuration with values is not valid; empty if it is.
    """
    for name, parameter in space.parameters.items():
        rng = np.random.Generator(np.random.PCG64(derive_seed("check", name)))
        for value in parameter.probes():
            why = ""
            for _ in range(_POINTS):  # another field's value may be what does not fit
                if (values := space.draw_with(name, value, rng)) is None:
                    why = "its conditions (when) hold nowhere"
                elif not (why := refused(values)):
                    break
            if why:
                yield f"search.space: {name}={_shown(value)} is refused: {why}{_remedy(space, name, why)}"
                break


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remedy(space: Space, name: str, why: str) -> str:
    if not space.parameters[name].choices and "must be a whole number" in why:
        return "; set integer: true"
    if others := [other for other in space.parameters if other != name and f"{other}: " in why]:
        return f"; if {others[0]} is only for other values of {name}, give it a condition (when)"
    return ""
