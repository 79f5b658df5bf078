"""The simulated machines: their speed, their links, and which learners die or join."""

import random
from typing import Annotated

from pydantic import Field, model_validator

from configurable.configuration import Configuration

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MembershipChange(Configuration):
    """A learner joins or dies."""

    rank: int = Field(ge=0)
    """Number of the learner."""
    at_s: Seconds
    """Virtual time, seconds."""


class Cluster(Configuration):
    """Learners, their speed and their links; learner r is on machine r // per_machine."""

    learners: int = Field(default=4, ge=1, le=65536)
    """Total number of learners (GPUs)."""
    per_machine: int = Field(default=1, ge=1)
    """Learners per machine; they share its network link, and form a node of h-adpsgd."""
    step_s: Positive = 0.1
    """Seconds of a forward and backward pass of one learner's batch."""
    overhead_s: Seconds = 0.0
    """Seconds per step that communication takes on the learner's own processor and that nothing hides: copies,
    additions, launching. A slow-down of the computation does not scale it."""
    jitter: float = Field(default=0.0, ge=0, le=2)
    """Standard deviation of the logarithm of a step's time; the mean stays `step_s`."""
    slow: dict[int, Positive] = Field(default={})
    """Slow-down factor of the computation, by learner number."""
    link_gbit: Positive = 10.0
    """Bandwidth of a machine's network link in either direction, Gbit/s."""
    link_ms: Seconds = 0.05
    """Latency of a message between machines, milliseconds."""
    local_gbit: Positive = 200.0
    """Bandwidth between two learners of a machine, Gbit/s."""
    local_ms: Seconds = 0.01
    """Latency of a message within a machine, milliseconds."""
    timeout_s: Positive = 5.0
    """Seconds until a learner's death is detected."""
    losses: tuple[MembershipChange, ...] = ()
    """Learners that die; with h-adpsgd, each takes its whole node with it."""
    joins: tuple[MembershipChange, ...] = ()
    """Learners that join later, with a neighbour's weights; with h-adpsgd, each brings its whole node."""

    @model_validator(mode="after")
    def _check(self) -> "Cluster":
        named = {*self.slow, *(change.rank for change in (*self.losses, *self.joins))}
        if wrong := sorted(rank for rank in named if not 0 <= rank < self.learners):
            raise ValueError(f"there is no learner {wrong[0]}: learners are 0 to {self.learners - 1}")
        if self.learners % self.per_machine and self.learners > self.per_machine:
            raise ValueError(
                f"{self.learners} learners do not fill machines of {self.per_machine}: use a multiple of it"
            )
        if len({join.rank for join in self.joins}) == self.learners:
            raise ValueError("no learner is there at the start: leave at least one learner out of joins")
        for what, happenings in (("losses", self.losses), ("joins", self.joins)):
            if len({change.rank for change in happenings}) < len(happenings):
                raise ValueError(f"{what} names a learner twice")
        return self

    @property
    def machines(self) -> int:
        """Number of machines; the last one may be partly filled."""
        return -(-self.learners // self.per_machine)

    def machine(self, rank: int) -> int:
        """The machine of a learner."""
        return rank // self.per_machine

    def step_seconds(self, rank: int, chance: random.Random, share: float = 1.0) -> float:
        """Seconds of a learner's next step.

        Args:
            rank: The learner.
            chance: Its random number generator; jitter draws one number.
            share: Fraction of a regular step's work.
        """
        noise = chance.lognormvariate(-(self.jitter**2) / 2, self.jitter) if self.jitter else 1.0
        return share * self.step_s * self.slow.get(rank, 1.0) * noise + self.overhead_s


def chance_of(seed: int, rank: int) -> random.Random:
    """A learner's random number generator in a simulation."""
    return random.Random(f"starling simulation {seed} {rank}")
