"""Methods by name, each with the facts that one chooses by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from training.strategies.base import Program, StrategyError
from training.strategies.blocks import bmuf, ma
from training.strategies.gossip import adpsgd, h_adpsgd
from training.strategies.hogwild import hogwild
from training.strategies.onebit import onebit, wire_bytes
from training.strategies.servers import asgd, easgd
from training.strategies.synchronous import d1d, scpsgd, sdpsgd
from training.strategy_config import (
    AsgdConfig,
    BmufConfig,
    EasgdConfig,
    GossipConfig,
    MaConfig,
    OneBitConfig,
    SdpsgdConfig,
    StrategyConfig,
)

Sent = Callable[[int, float, Any], float]
Joins = Literal["at once", "during a gradient", "before an outcome is applied", "after an outcome was applied"]


@dataclass(frozen=True)
class Facts:
    """What one chooses by.

    Attributes:
        synchronizes: What, and with whom.
        sent: Mean bytes that a learner sends a step, from the learners' number, the model's bytes and the
            configuration; for h-adpsgd, that a node's first learner sends over the network.
        staleness: In steps.
        slow: What a slow learner does to the others.
        dead: What a dead one does.
    """

    synchronizes: str
    sent: Sent
    staleness: str
    slow: str
    dead: str


@dataclass(frozen=True)
class Method:
    """A method and what it needs.

    Attributes:
        name: In configurations.
        program: One learner's.
        config: Class of its constants.
        facts: What one chooses by.
        exchange: Whether it averages through an `Exchange`.
        grouped: Whether the learners of a node are one super-learner.
        server: Whether it needs a parameter server.
        shared: Whether all replicas are views of the same weights.
        joins: When a newcomer can take over a neighbour's weights and state: at once where learners are free; when all
            have taken up a collective's outcome where they wait for each other; before they do where it is applied one
            step late; during a gradient where neighbours keep step.
    """

    name: str
    program: Callable[..., Program]
    config: type[StrategyConfig]
    facts: Facts
    exchange: bool = False
    grouped: bool = False
    server: bool = False
    shared: bool = False
    joins: Joins = "at once"

    @property
    def free(self) -> bool:
        """Whether learners go on without waiting for each other."""
        return self.exchange or self.server or self.shared


def _ring(learners: int, size: float) -> float:
    return 2 * (learners - 1) / learners * size


def _mixed(learners: int, size: float, cfg: SdpsgdConfig) -> float:
    return min(2, learners - 1) * size if cfg.graph == "ring" else _ring(learners, size)


_ALL_WAIT = "all wait for it at every step"
_BLOCK_WAITS = "all wait for it at the end of a block"
_FREE = "trains less, holds up nobody"
_STOPS = "stops all until it is known to be dead"
_BLOCKS = Facts(
    "weights, with all, after a block", lambda n, size, cfg: _ring(n, size) / cfg.tau, "0", _BLOCK_WAITS, _STOPS
)
_METHODS = (
    Method(
        "scpsgd",
        scpsgd,
        StrategyConfig,
        Facts("gradients, with all", lambda n, size, _: _ring(n, size), "0", _ALL_WAIT, _STOPS),
        joins="after an outcome was applied",
    ),
    Method(
        "sdpsgd",
        sdpsgd,
        SdpsgdConfig,
        Facts("weights, with two neighbours", _mixed, "0", "holds up its neighbours, in the end all", _STOPS),
        joins="during a gradient",
    ),
    Method(
        "d1d",
        d1d,
        StrategyConfig,
        Facts("gradients, with all", lambda n, size, _: _ring(n, size), "1", _ALL_WAIT, _STOPS),
        joins="before an outcome is applied",
    ),
    Method(
        "adpsgd",
        adpsgd,
        GossipConfig,
        Facts(
            "weights, with a neighbour",
            lambda n, size, _: 2 * size * (n > 1),
            "at least 1",
            _FREE,
            "costs its neighbours one time-out",
        ),
        exchange=True,
    ),
    Method(
        "h-adpsgd",
        h_adpsgd,
        GossipConfig,
        Facts(
            "gradients in a node, weights with a neighbouring node",
            lambda n, size, _: 2 * size * (n > 1),
            "at least 1",
            "slows its node only",
            "takes its node with it",
        ),
        exchange=True,
        grouped=True,
    ),
    Method(
        "ma",
        ma,
        MaConfig,
        _BLOCKS,
        joins="after an outcome was applied",
    ),
    Method(
        "bmuf",
        bmuf,
        BmufConfig,
        _BLOCKS,
        joins="after an outcome was applied",
    ),
    Method(
        "asgd",
        asgd,
        AsgdConfig,
        Facts(
            "gradients and weights, with the server",
            lambda n, size, _: size,
            "about N - 1",
            _FREE,
            "costs its work only; a dead server stops all until it is back",
        ),
        server=True,
    ),
    Method(
        "easgd",
        easgd,
        EasgdConfig,
        Facts(
            "weights, with a center",
            lambda n, size, cfg: size / cfg.tau,
            "at most tau - 1",
            _FREE,
            "costs its work only; a dead server stops all until it is back",
        ),
        server=True,
    ),
    Method(
        "onebit",
        onebit,
        OneBitConfig,
        Facts(
            "1-bit gradients, with all",
            lambda n, size, cfg: (n - 1) * wire_bytes(size, cfg.block),
            "0",
            _ALL_WAIT,
            _STOPS,
        ),
        joins="after an outcome was applied",
    ),
    Method(
        "hogwild",
        hogwild,
        StrategyConfig,
        Facts("nothing: shared memory", lambda n, size, _: 0.0, "about N - 1", _FREE, "costs its work only"),
        shared=True,
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        StrategyError: There is none.
    """
    if name not in METHODS:
        raise StrategyError(f"{name!r} is no strategy: choose one of {', '.join(METHODS)}")
    return METHODS[name]
