"""Registry of the strategies by name, with the properties that one chooses by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from training.strategies.base import StrategyError
from training.strategies.blocks import bmuf, ma
from training.strategies.config import (
    AsgdConfig,
    BmufConfig,
    D1dConfig,
    EasgdConfig,
    GossipConfig,
    HierarchicalGossipConfig,
    HogwildConfig,
    LayerPipelineConfig,
    MaConfig,
    OneBitConfig,
    ScpsgdConfig,
    SdpsgdConfig,
    StrategyConfig,
    Traits,
)
from training.strategies.gossip import adpsgd, h_adpsgd
from training.strategies.hogwild import hogwild
from training.strategies.onebit import onebit, wire_bytes
from training.strategies.requests import Program
from training.strategies.servers import asgd, easgd
from training.strategies.synchronous import d1d, scpsgd, sdpsgd

Sent = Callable[[int, float, Any], float]
Joins = Literal["at once", "during a gradient", "before an outcome is applied", "after an outcome was applied"]


@dataclass(frozen=True)
class Facts:
    """Properties of a strategy that one chooses by.

    Attributes:
        synchronizes: What is synchronized, and with which learners.
        sent: Mean bytes that a learner sends per step, as a function of the number of learners, the model's bytes and
            the configuration; for h-adpsgd, the bytes that a node's first learner sends over the network; for pipeline,
            where no weights are sent, a function of a batch's bytes at a border instead of the model's.
        staleness: In steps.
        slow: Effect of a slow learner on the others.
        dead: Effect of a dead learner on the others.
    """

    synchronizes: str
    sent: Sent
    staleness: str
    slow: str
    dead: str


@dataclass(frozen=True)
class Strategy:
    """A way to train with several learners.

    Attributes:
        name: Name in configurations.
        config: Class of its configuration.
        facts: Properties that one chooses by.
    """

    name: str
    config: type[StrategyConfig]
    facts: Facts

    @property
    def traits(self) -> Traits:
        """What it requires of machines."""
        return self.config.traits

    @property
    def free(self) -> bool:
        """Whether learners never wait for each other."""
        return self.traits.exchange or self.traits.server or self.traits.shared

    def check(self, config: StrategyConfig) -> None:
        """Check that a configuration is this strategy's.

        Raises:
            StrategyError: If it is another strategy's.
        """
        if not isinstance(config, self.config):
            raise StrategyError(f"{self.name} is configured by a {self.config.__name__}, not {type(config).__name__}")


@dataclass(frozen=True)
class Method(Strategy):
    """A strategy whose learners each have a replica of the whole model and run a program.

    Attributes:
        program: Program of a learner.
        equal: Whether a node's replicas are equal after every step, because gradients are averaged (`Compute.reduce`).
        apart: Whether the states of a node's learners differ, so that every learner writes its part of a checkpoint.
        joins: When a newcomer can copy a neighbour's weights and state: at once if learners do not wait for each other;
            after all have applied a collective's outcome if they do; before that if it is applied one step late; during
            a gradient if neighbours keep step.
    """

    program: Callable[..., Program] = field(kw_only=True)
    equal: bool = False
    apart: bool = True
    joins: Joins = "at once"


def _ring(learners: int, size: float) -> float:
    return 2 * (learners - 1) / learners * size


def _mixed(learners: int, size: float, cfg: SdpsgdConfig) -> float:
    return min(2, learners - 1) * size if cfg.graph == "ring" else _ring(learners, size)


_ALL_WAIT = "all wait for it at every step"
_BLOCK_WAITS = "all wait for it at the end of a block"
_FREE = "trains less, delays no other"
_STOPS = "stops all until it is known to be dead"
_BLOCKS = Facts(
    "weights, with all, after a block", lambda n, size, cfg: _ring(n, size) / cfg.tau, "0", _BLOCK_WAITS, _STOPS
)
_METHODS = (
    Method(
        "scpsgd",
        ScpsgdConfig,
        Facts("gradients, with all", lambda n, size, _: _ring(n, size), "0", _ALL_WAIT, _STOPS),
        program=scpsgd,
        equal=True,
        apart=False,
        joins="after an outcome was applied",
    ),
    Method(
        "sdpsgd",
        SdpsgdConfig,
        Facts("weights, with two neighbours", _mixed, "0", "holds up its neighbours, in the end all", _STOPS),
        program=sdpsgd,
        joins="during a gradient",
    ),
    Method(
        "d1d",
        D1dConfig,
        Facts("gradients, with all", lambda n, size, _: _ring(n, size), "1", _ALL_WAIT, _STOPS),
        program=d1d,
        joins="before an outcome is applied",
    ),
    Method(
        "adpsgd",
        GossipConfig,
        Facts(
            "weights, with a neighbour",
            lambda n, size, cfg: 2 * size * cfg.per_step * (n > 1),
            "at least 1",
            _FREE,
            "costs its neighbours one time-out",
        ),
        program=adpsgd,
        equal=True,
        apart=False,
    ),
    Method(
        "h-adpsgd",
        HierarchicalGossipConfig,
        Facts(
            "gradients in a node, weights with a neighbouring node",
            lambda n, size, cfg: 2 * size * cfg.per_step * (n > 1),
            "at least 1",
            "slows its node only",
            "takes its node with it",
        ),
        program=h_adpsgd,
        equal=True,
        apart=False,
    ),
    Method(
        "ma",
        MaConfig,
        _BLOCKS,
        program=ma,
        joins="after an outcome was applied",
    ),
    Method(
        "bmuf",
        BmufConfig,
        _BLOCKS,
        program=bmuf,
        joins="after an outcome was applied",
    ),
    Method(
        "asgd",
        AsgdConfig,
        Facts(
            "gradients and weights, with the server",
            lambda n, size, _: size,
            "about N - 1",
            _FREE,
            "costs its work only; a dead server stops all until it is back",
        ),
        program=asgd,
    ),
    Method(
        "easgd",
        EasgdConfig,
        Facts(
            "weights, with a center",
            lambda n, size, cfg: size / cfg.tau,
            "at most tau - 1",
            _FREE,
            "costs its work only; a dead server stops all until it is back",
        ),
        program=easgd,
    ),
    Method(
        "onebit",
        OneBitConfig,
        Facts(
            "1-bit gradients, with all",
            lambda n, size, cfg: (n - 1) * wire_bytes(size, cfg.block),
            "0",
            _ALL_WAIT,
            _STOPS,
        ),
        program=onebit,
        equal=True,
        joins="after an outcome was applied",
    ),
    Method(
        "hogwild",
        HogwildConfig,
        Facts("nothing: shared memory", lambda n, size, _: 0.0, "about N - 1", _FREE, "costs its work only"),
        program=hogwild,
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}
PIPELINE = Strategy(
    "pipeline",
    LayerPipelineConfig,
    Facts(
        "activations and their gradients, with the stages before and after; every learner has some of the layers",
        lambda n, size, _: 2 * (n - 1) * size,
        "0",
        _ALL_WAIT,
        "its layers are missing: training cannot go on without it",
    ),
)
"""A model whose layers are split over the learners (`training.node.pipeline_learner`): one replica, so no program."""
STRATEGIES: Mapping[str, Strategy] = {**METHODS, PIPELINE.name: PIPELINE}
"""All strategies by name."""


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
    return find_method(strategy if strategy in METHODS else "scpsgd")
