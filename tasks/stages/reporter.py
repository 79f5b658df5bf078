"""Reports the progress of a running training from its journal, for the terminal and Prefect."""

from pathlib import Path
from typing import Any

from tasks.stages import progress
from tasks.tracking.forwarding import Forwarder
from tasks.tracking.metrics import is_number
from tasks.tracking.training_view import TrainingView, training_line
from training.coordinator.journal import JournalTail


class Reporter:
    """Turns new journal lines into progress reports, and validations into a line for each epoch.

    A resume has a line, too. The lines of earlier sessions are read, but not reported again.

    Args:
        journal: The journal; it may have lines of earlier sessions.
        nodes: Configured number of nodes.
        stage: The stage that trains.
    """

    def __init__(self, journal: Path, nodes: int, stage: str = "train") -> None:
        self.tail, self.view = JournalTail(journal), TrainingView()
        self.forwarder: Forwarder | None = None
        self._nodes, self._stage = nodes, stage
        for entry in self.tail.new_entries():
            self.view.feed(entry)

    @property
    def present(self) -> set[int] | None:
        """Nodes in the ring; None before the journal lists any."""
        return self.view.nodes

    def __call__(self) -> None:
        """Report new journal lines."""
        for text, url in (self.forwarder.links if self.forwarder is not None else {}).items():
            progress.link(self._stage, text, url)
        validated = None
        for entry in self.tail.new_entries():
            self.view.feed(entry)
            if entry["kind"] == "step":
                # a validation has its own report, and a bar has room for one line
                self._report(training_line(self.view.figures() | {"valid": None}))
            elif entry["kind"] == "valid" and self.view.valid is entry:
                validated = entry
                self._report(self._epoch_line(entry))
            elif entry["kind"] == "resume":
                progress.announce(self._stage, self._resume_line(entry))
        if validated is not None:
            progress.announce(self._stage, self._epoch_line(validated))

    def _resume_line(self, entry: dict[str, Any]) -> str:
        """Where the training resumes; the number of epochs is known from the journal of the session before."""
        total = f" of {self.view.epochs:g}" if self.view.epochs else ""
        done = f"after epoch {entry['epoch']}" if entry.get("epoch") else "within epoch 1"
        return f"resumes {done}{total}, from step {entry.get('step', 0):,}"

    def _epoch_line(self, entry: dict[str, Any]) -> str:
        """The training at the end of an epoch, with its validation."""
        figures = self.view.figures() | {"epoch": float(entry["epoch"])}
        if is_number(entry.get("train_loss")):
            figures["loss"] = entry["train_loss"]
        return training_line(figures)

    @property
    def _alive(self) -> int:
        return self._nodes if self.view.nodes is None else len(self.view.nodes)

    def _report(self, note: str) -> None:
        view = self.view
        learners = len(view.present)
        note += f", {learners} learners" if learners > self._alive else ""
        if self._nodes > 1:
            note += f", {self._alive} of {self._nodes} nodes"
        if self.forwarder is not None and self.forwarder.trouble:
            note += ", MLflow is unreachable"
        done = max(view.progress, float(view.valid["epoch"]) if view.valid is not None else 0.0)
        progress.report(self._stage, done, view.epochs, note)
