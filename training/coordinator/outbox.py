"""What a node has to report, kept until the coordinator has acknowledged it, so that an outage loses nothing."""

from dataclasses import dataclass, field
from typing import Any

from training.coordinator.packing import pack_rows
from training.coordinator.requests import CheckpointRecord, Counts, Heartbeat, ReturnedBatch, StartedBatch, TrainedBatch
from training.coordinator.worklist import Assignment

REPORTS = 500
"""Maximum number of reports per message."""


@dataclass
class Outbox:
    """What the next heartbeat reports; the attributes are fields of `Heartbeat`."""

    reports: list[TrainedBatch] = field(default_factory=list)
    started: list[StartedBatch] = field(default_factory=list)
    returned: list[ReturnedBatch] = field(default_factory=list)
    answered: int = 0
    snapshots: list[int] = field(default_factory=list)
    records: list[tuple[int, CheckpointRecord]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def fields(self) -> dict[str, Any]:
        """Fields of the next heartbeat."""
        more = len(self.reports) > REPORTS
        # a record must not arrive before the reports that its weights contain
        return vars(self) | {"reports": self.reports[:REPORTS], "records": [] if more else self.records}

    def forget(self, sent: Heartbeat) -> None:
        """Remove what an acknowledged heartbeat contained."""
        for name in ("reports", "started", "returned", "snapshots", "records"):
            del getattr(self, name)[: len(getattr(sent, name))]
        if self.answered == sent.answered:
            self.answered = 0

    def renumbered(self) -> "Outbox":
        """What a new incarnation still has to report: the reports, renumbered from 1, and the replicas."""
        reports = [report.model_copy(update={"seq": number}) for number, report in enumerate(self.reports, 1)]
        return Outbox(reports=reports, snapshots=self.snapshots)

    def start(self, assignment: Assignment) -> None:
        """Add a batch that was started or soon will be."""
        rows = pack_rows(assignment.rows)
        self.started.append(StartedBatch(epoch=assignment.epoch, own=assignment.own, rows=rows))

    def report(self, seq: int, assignment: Assignment, counts: Counts) -> None:
        """Add a trained batch."""
        self.reports.append(
            TrainedBatch(seq=seq, epoch=assignment.epoch, rows=pack_rows(assignment.rows), counts=counts)
        )

    def give_back(self, number: int, assignments: list[Assignment]) -> None:
        """Add the batches that are returned in answer to a revocation."""
        self.answered = number
        for given in assignments:
            self.returned.append(ReturnedBatch(epoch=given.epoch, lease=int(given.lease), rows=pack_rows(given.rows)))
