"""What a simulation yields."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """A look at the average model in mid-run.

    Attributes:
        at_s: Virtual seconds.
        epochs: Trained so far, fractions included.
        consensus: RMS distance of the learners' weights from their mean, by weight; 0 when all are equal.
        figures: Of the average model.
    """

    at_s: float
    epochs: float
    consensus: float
    figures: dict[str, float]


@dataclass
class Staleness:
    """A running mean and maximum, in steps."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, steps: float) -> None:
        """Something has been applied that is so many steps old."""
        self.count += 1
        self.total += steps
        self.most = max(self.most, steps)

    @property
    def mean(self) -> float:
        """0 if nothing was told."""
        return self.total / self.count if self.count else 0.0


@dataclass
class Outcome:
    """A finished simulation.

    Attributes:
        strategy: Name of the method.
        learners: How many.
        seconds: Virtual seconds until the last batch was trained on.
        epoch_s: Of them, per epoch.
        open_epoch_s: What an epoch takes in a long training, where the next one begins before its last batch is done;
            from the times at which batches were taken.
        steps: Of each learner.
        staleness: Of gradients and averagings, in steps.
        bytes_per_step: Mean bytes that a learner sends a step.
        bytes_per_nic: Bytes that the busiest machine sends over the network in an epoch.
        consensus: Mean of the observations'; before the learners are averaged at the end.
        observations: In mid-run and, last, of the finished model.
        weights: Mean of the learners that reached the end.
        spread: RMS distance between the learners at the very end.
        repeated: Batches that had to be trained on again because a learner died.
    """

    strategy: str
    learners: int
    seconds: float
    epoch_s: float
    open_epoch_s: float
    steps: list[int]
    staleness: Staleness
    bytes_per_step: float
    bytes_per_nic: float
    consensus: float
    observations: list[Observation] = field(default_factory=list)
    weights: Tensor | None = None
    spread: float = 0.0
    repeated: int = 0

    @property
    def figures(self) -> dict[str, float]:
        """Of the finished model."""
        return self.observations[-1].figures if self.observations else {}

    def curve(self) -> list[dict[str, float]]:
        """The average model on the way: virtual seconds, epochs trained, consensus distance, and its figures."""
        return [
            {"at_s": one.at_s, "epochs": one.epochs, "consensus": one.consensus, **one.figures}
            for one in self.observations
        ]

    def row(self, condition: str, one_epoch_s: float | None = None) -> dict[str, Any]:
        """As a row of a table.

        Args:
            condition: What was done to the cluster.
            one_epoch_s: Epoch of a learner that trains alone, for the speed-up.
        """
        return {
            "strategy": self.strategy,
            "learners": self.learners,
            "condition": condition,
            "epoch_s": self.epoch_s,
            "speedup": one_epoch_s / self.epoch_s if one_epoch_s else None,
            "loss": self.figures.get("loss"),
            "wer": self.figures.get("wer"),
            "staleness": self.staleness.mean,
            "consensus": self.consensus,
            "bytes": self.bytes_per_step,
        }
