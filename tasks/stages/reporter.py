"""Reports the progress of a running training from its journal, for the terminal and Prefect."""

from pathlib import Path
from typing import Any

from tasks.stages import progress
from tasks.tracking.forwarding import Forwarder
from tasks.tracking.training_view import TrainingView, validation_text
from training.coordinator.journal import JournalTail


class Reporter:
    """Turns new journal lines into progress reports.

    Args:
        journal: The journal.
        nodes: Configured number of nodes.
        stage: The stage that trains.
    """

    def __init__(self, journal: Path, nodes: int, stage: str = "train") -> None:
        self.tail, self.view = JournalTail(journal), TrainingView()
        self.forwarder: Forwarder | None = None
        self._nodes, self._stage = nodes, stage

    @property
    def present(self) -> set[int] | None:
        """Nodes in the ring; None before the journal lists any."""
        return self.view.nodes

    def __call__(self) -> None:
        """Report new journal lines."""
        for text, url in (self.forwarder.links if self.forwarder is not None else {}).items():
            progress.link(self._stage, text, url)
        for entry in self.tail.new_entries():
            self.view.feed(entry)
            if entry["kind"] == "step":
                self._report(self._speed(entry))
            elif entry["kind"] == "valid" and self.view.valid is entry:
                self._report(validation_text(entry))

    def _speed(self, entry: dict[str, Any]) -> str:
        note = f"loss {self.view.loss:.3f}" if self.view.loss is not None else "no finite loss"
        note += f", lr {entry['lr']:.2e}" if entry.get("lr") is not None else ""
        rate, left = self.view.steps_per_s, self.view.eta_s
        note += f", {rate:.1f} steps/s" if rate is not None else ""
        note += f", {left / 60:.0f} min left" if left is not None and left >= 60 else ""
        learners = len(self.view.present)
        return note + (f", {learners} learners" if learners > self._alive else "")

    @property
    def _alive(self) -> int:
        return self._nodes if self.view.nodes is None else len(self.view.nodes)

    def _report(self, note: str) -> None:
        view = self.view
        if self._nodes > 1:
            note += f", {self._alive} of {self._nodes} nodes"
        if self.forwarder is not None and self.forwarder.trouble:
            note += ", MLflow is unreachable"
        done = max(view.progress, float(view.valid["epoch"]) if view.valid is not None else 0.0)
        progress.report(self._stage, done, view.epochs, note)
