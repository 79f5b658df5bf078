"""Description of a strategy: its constants, what it requires, and the properties that one chooses by."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from configurable.choices import Choice
from training.strategies.base import StrategyError
from training.strategies.requests import Program

SentBytes = Callable[[int, float, Any], float]
JoinPoint = Literal["immediately", "during compute", "before update", "after update"]
"""When a newcomer can copy a neighbour's weights and state: immediately if learners do not wait for each other; if they
do, after all have updated their weights with a collective's result; before that if the result is applied one step late;
while the neighbour computes a gradient if learners wait for their neighbours only."""

ALL_WAIT = "all learners wait for it at every step"
BLOCK_WAITS = "all learners wait for it at the end of each block"
NOBODY_WAITS = "does less work; delays no other learner"
ALL_STOP = "all learners wait until its failure is detected"


@dataclass(frozen=True)
class Traits:
    """What a strategy requires of machines and of the configuration.

    Attributes:
        one_node: All learners belong to one node and synchronize by collectives.
        one_learner: Every node has one learner.
        exchange: Nodes average weights through an exchange.
        decentralized: Replicas differ and are averaged with neighbours only; those of a `grouped` node are equal.
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
    decentralized: bool = False
    grouped: bool = False
    server: bool = False
    shared: bool = False
    buckets: bool = False
    split: bool = False
    own_updates: bool = True


class StrategyConfig(Choice):
    """A strategy's constants. The field for the steps between two synchronizations, if there is one, is `tau`.

    Attributes:
        traits: What it requires of machines and of the rest of the configuration.
    """

    traits: ClassVar[Traits] = Traits()


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


def ring_bytes(learners: int, size: float) -> float:
    """Bytes that a learner sends in a ring all-reduce of `size` bytes."""
    return 2 * (learners - 1) / learners * size


@dataclass(frozen=True)
class Facts:
    """Properties of a strategy that one chooses by.

    Attributes:
        synchronizes: What is synchronized, and with which learners.
        sent: Mean bytes that a learner sends per step, as a function of the number of learners, the model's bytes and
            the configuration; for h-adpsgd, the bytes that a node's first learner sends over the network; for pipeline,
            where no weights are sent, a function of a batch's bytes at a border instead of the model's.
        sent_text: The same as a formula for docs/strategies.md, with N learners, M bytes of the model, τ steps of a
            block.
        staleness: In steps.
        slow: Effect of a slow learner on the others.
        dead: Effect of a dead learner on the others.
        advice: Reason for recommending it, as a function of what is uneven about the learners (empty if nothing is);
            None for a strategy without published accuracy at scale, which is never recommended.
    """

    synchronizes: str
    sent: SentBytes
    staleness: str
    slow: str
    dead: str
    sent_text: str = field(kw_only=True)
    advice: Callable[[str], str] | None = None


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
        state_per_rank: Whether the states of a node's learners differ, so that every learner writes its part of a
            checkpoint.
        join_point: When a newcomer can copy a neighbour's weights and state.
    """

    program: Callable[..., Program] = field(kw_only=True)
    equal: bool = False
    state_per_rank: bool = True
    join_point: JoinPoint = "immediately"
