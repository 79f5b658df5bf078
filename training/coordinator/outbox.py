"""What a node has to report, kept until the coordinator has acknowledged it, so that an outage loses nothing."""

from dataclasses import dataclass, field
from typing import Any

from training.coordinator.messages import Message, pack_rows
from training.coordinator.worklist import Assignment

REPORTS = 500
"""Maximum number of reports per message."""


@dataclass
class Outbox:
    """What the next heartbeat reports.

    Attributes:
        reports: Trained batches.
        begun: Batches that were started or soon will be.
        back: Batches returned to the pool.
        answered: Number of the revocation that `back` answers; 0 for none.
        snapshots: Epochs whose replica is written.
        records: Checkpoint numbers, each with this node's record.
    """

    reports: list[Message] = field(default_factory=list)
    begun: list[Message] = field(default_factory=list)
    back: list[Message] = field(default_factory=list)
    answered: int = 0
    snapshots: list[int] = field(default_factory=list)
    records: list[tuple[int, Message]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reports or self.begun or self.back or self.snapshots or self.records or self.answered)

    def message(self) -> Message:
        """JSON representation; a copy, because entries may be added while it is in transit."""
        more = len(self.reports) > REPORTS
        return {
            "reports": self.reports[:REPORTS],
            "begun": list(self.begun),
            "back": list(self.back),
            "answered": self.answered,
            "snapshots": list(self.snapshots),
            # a record must not arrive before the reports that its weights contain
            "records": [] if more else list(self.records),
        }

    def forget(self, sent: Message) -> None:
        """Remove what an acknowledged message contained."""
        self.reports = self.reports[len(sent["reports"]) :]
        self.begun = self.begun[len(sent["begun"]) :]
        self.back = self.back[len(sent["back"]) :]
        self.snapshots = self.snapshots[len(sent["snapshots"]) :]
        self.records = self.records[len(sent["records"]) :]
        if self.answered == sent["answered"]:
            self.answered = 0

    def renumber(self) -> None:
        """Renumber the reports from 1 for a new incarnation; drop what belongs to the old one."""
        self.reports = [{**report, "seq": number} for number, report in enumerate(self.reports, 1)]
        self.begun, self.back, self.answered, self.records = [], [], 0, []

    def begin(self, assignment: Assignment) -> None:
        """Add a batch that was started or soon will be."""
        entry = {"epoch": assignment.epoch, "own": assignment.own, "rows": pack_rows(assignment.rows)}
        self.begun.append(entry)

    def report(self, seq: int, assignment: Assignment, counts: dict[str, Any]) -> None:
        """Add a trained batch."""
        rows = pack_rows(assignment.rows)
        self.reports.append({"seq": seq, "epoch": assignment.epoch, "rows": rows, "counts": counts})

    def give_back(self, number: int, assignments: list[Assignment]) -> None:
        """Add the batches that are returned in answer to a revocation."""
        self.answered = number
        for assignment in assignments:
            entry = {"epoch": assignment.epoch, "lease": assignment.lease, "rows": pack_rows(assignment.rows)}
            self.back.append(entry)
