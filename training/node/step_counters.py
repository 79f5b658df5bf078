"""A node's step counters: its reports to the coordinator, and each learner's lines for the journal."""

from dataclasses import dataclass
from typing import Any

from training.coordinator.node_client import NodeClient
from training.coordinator.worklist import Assignment
from training.exchange.base import ExchangeStats
from training.learner.compute import Losses


@dataclass
class StepReport:
    """One rank's part of a step; all ranks' parts go to all ranks."""

    losses: Losses
    ready: bool
    """Whether its exchange has a result to add."""
    exchange_s: float = 0.0
    """Seconds of its last exchange."""
    staleness: float = 0.0
    distance: float = 0.0
    exchanges_per_step: float = 0.0
    """Successful exchanges of its rank per step; below 1, averaging does not keep up."""
    lost: bool = False
    """Whether its rank has found more damaged shards than are tolerated."""

    @classmethod
    def of(
        cls, losses: Losses, ready: bool, stats: ExchangeStats | None, per_step: float = 0.0, lost: bool = False
    ) -> "StepReport":
        """Build from a step's sums and the exchange's statistics."""
        if stats is None:
            return cls(losses, ready, lost=lost)
        return cls(losses, ready, stats.last_s, stats.staleness, stats.distance, per_step, lost)

    def to_list(self) -> list[float]:
        """All fields as numbers."""
        return [
            *self.losses.to_list(),
            float(self.ready),
            self.exchange_s,
            self.staleness,
            self.distance,
            self.exchanges_per_step,
            float(self.lost),
        ]

    @classmethod
    def from_list(cls, values: list[float]) -> "StepReport":
        """Build from the result of `to_list`."""
        *losses, ready, exchange_s, staleness, distance, per_step, lost = values
        return cls(Losses(*losses), bool(ready), exchange_s, staleness, distance, per_step, bool(lost))


def together(parts: list[StepReport]) -> Losses:
    """Sums over the ranks; NaN propagates to the sum."""
    return Losses(*(sum(column) for column in zip(*(part.losses.to_list() for part in parts), strict=True)))


class StepCounters:
    """Counters of a node's learners, kept at rank 0.

    Args:
        node: Number of the node.
        ranks: Number of its learners.
        epochs: Epochs to train.
        client: Receives reports and journal lines.
        measured: Fields of `StepReport` that the strategy measures, for the journal.
    """

    def __init__(self, node: int, ranks: int, epochs: int, client: NodeClient, measured: tuple[str, ...] = ()) -> None:
        self.node, self.ranks, self.epochs, self.client = node, ranks, epochs, client
        self.measured = measured
        self.reset()

    def reset(self) -> None:
        """Set all counters to 0."""
        self.totals = [Losses() for _ in range(self.ranks)]

    def to_list(self) -> list[dict[str, float]]:
        """The counters of each learner, for a checkpoint."""
        return [vars(total).copy() for total in self.totals]

    def load(self, totals: list[dict[str, float]]) -> None:
        """Restore the counters of a checkpoint; ignored if that node had another number of learners."""
        if len(totals) == len(self.totals):
            self.totals = [Losses(**total) for total in totals]

    def step(self, assignment: Assignment, parts: list[StepReport], good: bool) -> None:
        """Count a batch, and report it to the coordinator.

        Args:
            assignment: The batch.
            parts: Reports of all ranks.
            good: Whether it changed the weights; otherwise its loss, which may be NaN, is left out of the sum.
        """
        for total, part in zip(self.totals, parts, strict=True):
            total.utterances += part.losses.utterances
            total.seconds += part.losses.seconds
            total.unalignable += part.losses.unalignable
            total.divided += part.losses.divided
        sums = together(parts)
        self.client.trained(
            assignment,
            loss_sum=sums.loss if good else 0.0,
            tokens=int(sums.tokens) if good else 0,
            seconds=sums.seconds,
            utterances=int(sums.utterances),
            unalignable=int(sums.unalignable),
            skipped=0 if good else int(sums.utterances),
            unreadable=int(sums.unreadable),
        )

    def journal(self, parts: list[StepReport], **shared: Any) -> None:
        """Write a journal line for each learner.

        Args:
            parts: Reports of all ranks.
            shared: Values that are the same for all ranks: `step`, `epoch`, `lr`, `grad_norm`, `elapsed`, `step_s`,
                `nodes` and, with an exchange, its counters.
        """
        for rank, (total, part) in enumerate(zip(self.totals, parts, strict=True)):
            if not part.losses.utterances:
                continue  # this rank had no rows in the last step of a lease, or no readable ones
            entry = {
                "kind": "step",
                "learner": f"{self.node}.{rank}",
                "epochs": self.epochs,
                "loss": part.losses.loss / max(1.0, part.losses.tokens),
                "utterances": int(total.utterances),
                "audio_seconds": total.seconds,
                **({"divided": int(total.divided)} if total.divided else {}),
                **shared,
            }
            self.client.journal(entry | {name: getattr(part, name) for name in self.measured})
