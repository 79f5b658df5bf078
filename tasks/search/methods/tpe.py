"""The tree-structured Parzen estimator (Bergstra et al. 2011), by Optuna.

A trial's values are drawn where the density of the good trials is high relative to that of the others. Optuna's study
is in memory and follows ours, so that the same trials give the same proposals, also after a kill.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from configurable.extras import install_remedy
from storage.batching import derive_seed
from tasks.search.methods.base import MethodConfig, SearchPlan, SearchTrial, WholeTrainings
from tasks.search.space import ParameterConfig, Space, Values

if TYPE_CHECKING:
    import optuna


class TpeConfig(MethodConfig):
    """Tree-structured Parzen estimator (Bergstra et al. 2011, NeurIPS 24), by Optuna."""

    kind: Literal["tpe"] = "tpe"
    first: int = Field(default=10, ge=1)
    """Number of random trials before the model proposes."""

    def build(self, plan: SearchPlan) -> "TpeSearch":
        """The method; it can search any space."""
        return TpeSearch(plan, self.first)


class TpeSearch(WholeTrainings):
    """Proposes by Optuna's sampler.

    Args:
        plan: What to do.
        first: Number of random trials.
    """

    def __init__(self, plan: SearchPlan, first: int) -> None:
        super().__init__(plan)
        self._first = first
        self._optuna = optuna_library(f"{plan.space.section}.method tpe, unlike other methods,")
        self._begin()

    def _begin(self) -> None:
        self._study = self._optuna.create_study()  # the sampler comes with each proposal
        self._running: set[int] = set()

    def propose(self, number: int, trials: Sequence[SearchTrial]) -> Values:
        """What the sampler suggests after the trials so far; running ones count as poor, so that none is doubled."""
        self._follow(trials)
        self._study.sampler = self._optuna.samplers.TPESampler(
            n_startup_trials=self._first, constant_liar=True, seed=derive_seed("tpe", self.plan.seed, number) % 2**32
        )
        asked = self._study.ask()
        assert asked.number == number
        self._running.add(number)
        values: Values = {}
        for name, parameter in self.plan.space.parameters.items():
            if self.plan.space.active(name, values):
                values[name] = _suggested(asked, name, parameter)
        return values

    def _follow(self, trials: Sequence[SearchTrial]) -> None:
        """Tell Optuna of the trials that it does not know, and of the results that it lacks."""
        if (known := len(self._study.get_trials(deepcopy=False))) > len(trials):
            self._begin()  # the last proposal was not taken up
            known = 0
        for trial in trials[known:]:
            self._study.add_trial(optuna_trial(self._optuna, self.plan.space, trial.values))
            self._running.add(trial.number)
        states = self._optuna.trial.TrialState
        for number in sorted(self._running):
            trial = trials[number]
            if trial.state == "running":
                continue
            self._running.discard(number)
            loss = trial.losses.get(self.plan.largest)
            if loss is None:
                self._study.tell(number, state=states.FAIL)
            else:
                self._study.tell(number, loss)


def optuna_trial(optuna: Any, space: Space, values: Values, loss: float | None = None) -> Any:
    """A trial for a study of Optuna's.

    Args:
        optuna: The package.
        space: The space.
        values: The trial's, by field.
        loss: Its result; None while it trains.
    """
    state = optuna.trial.TrialState
    return optuna.create_trial(
        state=state.RUNNING if loss is None else state.COMPLETE,
        value=loss,
        params={name: _told(space.parameters[name], value) for name, value in values.items()},
        distributions={name: _distribution(optuna, space.parameters[name]) for name in values},
    )


def _distribution(optuna: Any, parameter: ParameterConfig) -> Any:
    if parameter.choices:
        return optuna.distributions.CategoricalDistribution(range(len(parameter.choices)))
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.integer:
        return optuna.distributions.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return optuna.distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def optuna_library(user: str) -> Any:
    """The package optuna, which logs warnings only.

    Args:
        user: What needs it, for the message.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError(f"{user} needs the package optuna: {install_remedy('pipeline')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggested(asked: "optuna.Trial", name: str, parameter: ParameterConfig) -> Any:
    if parameter.choices:  # by number: Optuna takes no sections
        return parameter.choices[asked.suggest_categorical(name, range(len(parameter.choices)))]
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.integer:
        return asked.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return asked.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


def _told(parameter: ParameterConfig, value: Any) -> Any:
    return int(parameter.position(value) * len(parameter.choices)) if parameter.choices else value
