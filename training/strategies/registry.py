"""Registry of the strategies by name: a new one is a file beside this one, and a line here."""

from collections.abc import Mapping

from training.strategies.base import StrategyError
from training.strategies.blocks import BMUF, MA
from training.strategies.gossip import ADPSGD, H_ADPSGD
from training.strategies.hogwild import HOGWILD
from training.strategies.onebit import ONEBIT
from training.strategies.pairs import PAIRS
from training.strategies.pipeline import PIPELINE
from training.strategies.servers import ASGD, EASGD
from training.strategies.strategy import Method, Strategy, StrategyConfig
from training.strategies.synchronous import D1D, SCPSGD, SDPSGD, SingleConfig

_ALL: tuple[Strategy, ...] = (
    SCPSGD,
    SDPSGD,
    D1D,
    ADPSGD,
    H_ADPSGD,
    MA,
    BMUF,
    PAIRS,
    ASGD,
    EASGD,
    ONEBIT,
    HOGWILD,
    PIPELINE,
)
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _ALL}
"""All strategies of several learners by name."""
METHODS: Mapping[str, Method] = {
    name: strategy for name, strategy in STRATEGIES.items() if isinstance(strategy, Method)
}
"""Those with a program."""
STRATEGY_CONFIGS: Mapping[str, type[StrategyConfig]] = {
    "single": SingleConfig,
    **{name: strategy.config for name, strategy in STRATEGIES.items()},
}
"""Classes of constants by kind of strategy, one learner alone included."""


def find_strategy(name: str) -> Strategy:
    """Find a strategy by name.

    Raises:
        StrategyError: If there is none.
    """
    if name not in STRATEGIES:
        raise StrategyError(f"{name!r} is not a strategy: choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def find_method(name: str) -> Method:
    """Find a method by name.

    Raises:
        StrategyError: If there is none, or the strategy has no program.
    """
    if name not in METHODS:
        find_strategy(name)
        raise StrategyError(f"the learners of {name} have no program: choose one of {', '.join(METHODS)}")
    return METHODS[name]


def method_of(strategy: str) -> Method:
    """The method whose program a strategy's learners run; `single` and a `pipeline` of one run the one of `scpsgd`."""
    return METHODS.get(strategy, SCPSGD)
