"""Configuration of each strategy; it needs pydantic only, unlike the strategies' programs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from speech.choices import Choice


@dataclass(frozen=True)
class Traits:
    """What a strategy requires of machines and of the configuration.

    Attributes:
        one_node: All learners belong to one node and keep step by collectives.
        one_learner: Every node has one learner.
        exchange: Nodes average weights through an exchange.
        grouped: The learners of a node are one super-learner.
        server: There is a parameter server.
        shared: All learners' weights are the same main memory, on one machine.
        buckets: Gradients travel in buckets, which communication hooks support.
        split: Every learner has some of the model's layers.
        own_updates: Learners make updates with their own optimizers, not the servers.
    """

    one_node: bool = False
    one_learner: bool = False
    exchange: bool = False
    grouped: bool = False
    server: bool = False
    shared: bool = False
    buckets: bool = False
    split: bool = False
    own_updates: bool = True


Newcomer = Literal["weights", "weights+optimizer"]
"""What a node that joins a running training takes from a neighbour."""


class StrategyConfig(Choice):
    """A strategy's constants.

    Attributes:
        traits: What it requires of machines and of the rest of the configuration.
    """

    traits: ClassVar[Traits] = Traits()


class SingleConfig(StrategyConfig):
    """One learner alone."""

    kind: Literal["single"] = "single"
    traits: ClassVar[Traits] = Traits(one_node=True, one_learner=True)


class ScpsgdConfig(StrategyConfig):
    """Synchronous centralized SGD: gradients are all-reduced."""

    kind: Literal["scpsgd"] = "scpsgd"
    traits: ClassVar[Traits] = Traits(one_node=True, buckets=True)


class SdpsgdConfig(StrategyConfig):
    """Synchronous decentralized SGD."""

    kind: Literal["sdpsgd"] = "sdpsgd"
    traits: ClassVar[Traits] = Traits(one_node=True)
    graph: Literal["ring", "complete"] = "ring"
    """Learners that each one averages with at every step: both neighbours, or all."""


class D1dConfig(StrategyConfig):
    """Synchronous SGD whose all-reduce overlaps with the next gradient."""

    kind: Literal["d1d"] = "d1d"
    traits: ClassVar[Traits] = Traits(one_node=True)


class GossipConfig(StrategyConfig):
    """Asynchronous decentralized SGD between nodes of one learner."""

    kind: Literal["adpsgd", "h-adpsgd"] = "adpsgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, exchange=True)
    neighbours: Literal["auto", "ring", "random-ring", "exponential"] = "auto"
    """`ring` alternates left and right; `random-ring` shuffles the ring at every exchange; `exponential` cycles through
    the distances 1, 2, 4, ...; `auto` is `ring` below eight nodes and `random-ring` from eight on."""
    per_step: int = Field(default=4, ge=1)
    """Maximum number of exchanges that a node starts per training step, one after the other: more keep replicas
    closer."""
    newcomer: Newcomer = "weights"
    """What a node that joins or rejoins a running training takes from a neighbour: its weights, or weights and
    optimizer state (momentum; AdamW's moments) of one step, which the neighbour copies once."""


class HierarchicalGossipConfig(GossipConfig):
    """Asynchronous decentralized SGD between nodes of several learners, which all-reduce gradients within a node."""

    kind: Literal["h-adpsgd"] = "h-adpsgd"
    traits: ClassVar[Traits] = Traits(exchange=True, grouped=True, buckets=True)


class MaConfig(StrategyConfig):
    """Model averaging."""

    kind: Literal["ma"] = "ma"
    traits: ClassVar[Traits] = Traits(one_node=True)
    tau: int = Field(default=16, ge=1)
    """Steps of a block."""


class WarmConfig(StrategyConfig):
    """A method that starts with plain synchronous SGD."""

    warm_steps: int = Field(default=0, ge=0)
    """Steps of plain synchronous SGD at the start."""
    warm_epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The same in epochs, rounded up to whole steps; 1 is customary. The longer of the two applies."""

    def warm_up(self, epoch_steps: float) -> int:
        """Steps of the warm-up.

        Args:
            epoch_steps: Steps of a learner in an epoch.

        Raises:
            ValueError: If the warm-up is counted in epochs and the length of an epoch is unknown.
        """
        if self.warm_epochs and not epoch_steps > 0:
            raise ValueError("warm_epochs needs to know how many steps an epoch has: use warm_steps")
        # rounding error: 0.1 * 30 is slightly above 3, but three steps are meant
        return max(self.warm_steps, math.ceil(self.warm_epochs * epoch_steps - 1e-6))


class BmufConfig(WarmConfig):
    """Blockwise model-update filtering."""

    kind: Literal["bmuf"] = "bmuf"
    traits: ClassVar[Traits] = Traits(one_node=True)
    tau: int = Field(default=16, ge=1)
    """Steps of a block."""
    eta: float | None = Field(default=None, ge=0, lt=1)
    """Block momentum; empty means 1 - 1/N for N learners."""
    zeta: float = Field(default=1.0, gt=0)
    """Block learning rate."""
    block_start: Literal["nesterov", "classical"] = "nesterov"
    """Start of a block: the look-ahead point (nesterov), or the model (classical)."""
    momentum: Literal["auto", "keep", "reset"] = "auto"
    """What happens to the optimizer's momentum at the end of a block. If it is kept, it adds to the momentum over
    blocks and short blocks diverge (docs/strategies.md); `auto` resets it unless `eta` is 0."""


class AsgdConfig(StrategyConfig):
    """Asynchronous SGD with a parameter server."""

    kind: Literal["asgd"] = "asgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, server=True, own_updates=False)
    servers: int = Field(default=1, ge=1)
    """Number of processes that the server is divided into, each with its own link."""


class EasgdConfig(StrategyConfig):
    """Elastic averaging SGD."""

    kind: Literal["easgd"] = "easgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, server=True)
    tau: int = Field(default=4, ge=1)
    """Steps between two synchronizations with the center."""
    beta: float = Field(default=0.9, gt=0, le=1)
    """Elasticity over all learners: alpha of each is beta / N."""
    servers: int = Field(default=1, ge=1)
    """Number of processes that hold the center, each with its own link."""


class OneBitConfig(WarmConfig):
    """Synchronous SGD with 1-bit gradients."""

    kind: Literal["onebit"] = "onebit"
    traits: ClassVar[Traits] = Traits(one_node=True)
    block: int = Field(default=512, ge=8, multiple_of=8)
    """Gradient values that share two reconstruction levels."""


class HogwildConfig(StrategyConfig):
    """Lock-free SGD on shared weights."""

    kind: Literal["hogwild"] = "hogwild"
    traits: ClassVar[Traits] = Traits(one_learner=True, shared=True)


class LayerPipelineConfig(StrategyConfig):
    """The layers of one model, split over several learners."""

    kind: Literal["pipeline"] = "pipeline"
    traits: ClassVar[Traits] = Traits(one_node=True, split=True)
    micro_batches: int = Field(default=4, ge=1)
    """Parts of a batch that pass through the layers one after the other; more keep more learners busy at a time."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """`gpipe`: all parts forward, then all backward; `1f1b`: backward as soon as possible, which stores fewer
    activations."""


STRATEGY_CONFIGS: Mapping[str, type[StrategyConfig]] = {
    str(config.model_fields["kind"].default): config
    for config in (
        SingleConfig,
        ScpsgdConfig,
        SdpsgdConfig,
        D1dConfig,
        GossipConfig,
        HierarchicalGossipConfig,
        MaConfig,
        BmufConfig,
        AsgdConfig,
        EasgdConfig,
        OneBitConfig,
        HogwildConfig,
        LayerPipelineConfig,
    )
}
"""Strategies by kind."""
