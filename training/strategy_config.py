"""What one can choose about each strategy; apart from `training.strategies`, which needs much more than pydantic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Traits:
    """What a strategy needs of machines and of the configuration.

    Attributes:
        one_node: All learners are of one node: they keep step, by collectives.
        one_learner: Every node has one learner.
        exchange: Nodes average weights through an exchange.
        grouped: The learners of a node are one super-learner.
        server: There is a parameter server.
        shared: All learners' weights are the same main memory, of one machine.
        buckets: Gradients travel in buckets, for which there are communication hooks.
        split: Every learner has some of the model's layers.
        own_updates: Learners make updates by optimizers of their own, and do not leave it to the servers.
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


TRAITS: Mapping[str, Traits] = {
    "single": Traits(one_node=True, one_learner=True),
    "scpsgd": Traits(one_node=True, buckets=True),
    "sdpsgd": Traits(one_node=True),
    "d1d": Traits(one_node=True),
    "adpsgd": Traits(one_learner=True, exchange=True),
    "h-adpsgd": Traits(exchange=True, grouped=True, buckets=True),
    "ma": Traits(one_node=True),
    "bmuf": Traits(one_node=True),
    "asgd": Traits(one_learner=True, server=True, own_updates=False),
    "easgd": Traits(one_learner=True, server=True),
    "onebit": Traits(one_node=True),
    "hogwild": Traits(one_learner=True, shared=True),
    "pipeline": Traits(one_node=True, split=True),
}
Newcomer = Literal["weights", "weights+optimizer"]
"""What a node that joins a running training takes from a neighbour."""


class StrategyConfig(BaseModel):
    """A method without constants of its own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)


class SdpsgdConfig(StrategyConfig):
    """Synchronous decentralized SGD."""

    graph: Literal["ring", "complete"] = "ring"
    """Whom a learner averages with at every step: both neighbours, or all learners."""


class GossipConfig(StrategyConfig):
    """Asynchronous decentralized SGD."""

    neighbours: Literal["auto", "ring", "random-ring", "exponential"] = "auto"
    """As `train.exchange.neighbours`: `ring` alternates left and right; `random-ring` shuffles the ring at every
    exchange; `exponential` asks at distance 1, 2, 4, ... by turns; `auto` is `random-ring` from eight nodes on."""
    per_step: int = Field(default=4, ge=1)
    """As `train.exchange.per_step`: exchanges of a node a step at most, as far as the link allows."""
    newcomer: Newcomer = "weights"
    """As `train.exchange.newcomer`: what a newcomer takes from its neighbour."""


class MaConfig(StrategyConfig):
    """Model averaging."""

    tau: int = Field(default=16, ge=1)
    """Steps of a block."""


class WarmConfig(StrategyConfig):
    """A method that begins with plain synchronous SGD."""

    warm_steps: int = Field(default=0, ge=0)
    """Steps of plain synchronous SGD at the beginning."""
    warm_epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The same in epochs, begun steps included: 1 is customary. The longer of the two counts."""

    def warm_up(self, epoch_steps: float) -> int:
        """Steps of the warm-up.

        Args:
            epoch_steps: Steps of a learner in an epoch.

        Raises:
            ValueError: The warm-up is counted in epochs, and the length of an epoch is not known.
        """
        if self.warm_epochs and not epoch_steps > 0:
            raise ValueError("warm_epochs needs to know how many steps an epoch has: use warm_steps")
        # a product such as 0.1 * 30, a little above 3, is three steps
        return max(self.warm_steps, math.ceil(self.warm_epochs * epoch_steps - 1e-6))


class BmufConfig(WarmConfig):
    """Blockwise model-update filtering."""

    tau: int = Field(default=16, ge=1)
    """Steps of a block."""
    eta: float | None = Field(default=None, ge=0, lt=1)
    """Block momentum; empty means 1 - 1/N for N learners."""
    zeta: float = Field(default=1.0, gt=0)
    """Block learning rate."""
    kind: Literal["nesterov", "classical"] = "nesterov"
    """Where a block starts: at the look-ahead point (nesterov), or at the model."""
    momentum: Literal["auto", "keep", "reset"] = "auto"
    """What becomes of the optimizer's momentum at a block's end. Kept beside the momentum over blocks it counts twice
    and short blocks diverge (docs/strategies.md); `auto` resets it unless `eta` is 0."""


class AsgdConfig(StrategyConfig):
    """Asynchronous SGD with a parameter server."""

    servers: int = Field(default=1, ge=1)
    """Processes that the server is divided into, each with a link of its own."""


class EasgdConfig(StrategyConfig):
    """Elastic averaging SGD."""

    tau: int = Field(default=4, ge=1)
    """Steps between two meetings with the center."""
    beta: float = Field(default=0.9, gt=0, le=1)
    """Elasticity over all learners: each one's alpha is beta / N."""
    servers: int = Field(default=1, ge=1)
    """Processes that hold the center, each with a link of its own."""


class OneBitConfig(WarmConfig):
    """Synchronous SGD with 1-bit gradients."""

    block: int = Field(default=512, ge=8, multiple_of=8)
    """Gradient values that share two reconstruction levels."""


class LayerPipelineConfig(StrategyConfig):
    """Layers of one model on several learners."""

    micro_batches: int = Field(default=4, ge=1)
    """Parts of a batch that follow each other through the layers; more keep more learners busy at a time."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """`gpipe`: all parts forward, then all backward; `1f1b`: backward as soon as possible, which holds fewer
    activations."""
