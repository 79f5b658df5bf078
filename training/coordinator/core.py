"""State shared by the parts of the coordinator: settings, ledger, clocks, and the events of the current request."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.objects import ObjectStore
from training.coordinator.ledger import Event, Ledger
from training.coordinator.messages import CoordinatorError, JsonObject
from training.coordinator.packing import unpack_rows
from training.learner.sampling import SamplingConfig

# --- settings


@dataclass(frozen=True)
class Settings:
    """The part of a `TrainJob` that concerns the coordinator; names and units are those of `TrainConfig`.

    It is read from JSON, because `TrainJob` imports torch.
    """

    run: str
    seed: int
    train_url: str
    """Empty if the nodes name the data set when they join."""
    output_url: str
    journal: Path
    nodes: int
    machines_per_node: int
    learners_per_node: int
    epochs: int
    max_minutes: float
    max_utterances: int
    checkpoint_steps: int
    """0 makes no checkpoints: the nodes keep their weights themselves."""
    checkpoint_keep: int
    beat_s: float
    dead_after_s: float
    start_patience_s: float
    sampling: SamplingConfig
    job: JsonObject
    """The whole job, for the nodes."""

    @classmethod
    def from_job(cls, job: JsonObject) -> "Settings":
        """Parse a job's JSON.

        Raises:
            CoordinatorError: If a field is missing or invalid.
        """
        try:
            train = job["train"]
            member = train["membership"]
            return cls(
                run=str(job["run"]),
                seed=int(job["seed"]),
                train_url=str(job["task"]["train_url"]),
                output_url=str(job["output_url"]),
                journal=Path(job["journal"]),
                nodes=int(train["nodes"]),
                machines_per_node=int(train.get("machines_per_node", 1)),
                learners_per_node=int(train["learners_per_node"]),
                epochs=int(train["epochs"]),
                max_minutes=float(train["max_minutes"]),
                max_utterances=int(train.get("max_utterances", 0)),
                checkpoint_steps=int(train["checkpoint_steps"]),
                checkpoint_keep=int(train["checkpoint_keep"]),
                beat_s=float(member["beat_s"]),
                dead_after_s=float(member["dead_after_s"]),
                start_patience_s=float(member["start_patience_s"]),
                sampling=SamplingConfig(**train.get("sampling", {})),
                job=job,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CoordinatorError(
                f"the job has a missing or invalid field ({error!r}): write it from a TrainJob"
            ) from error

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Read a job's file.

        Raises:
            CoordinatorError: If it cannot be read or is not a job.
        """
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CoordinatorError(f"cannot read the job {path}: {error}") from error
        if not isinstance(job, dict):
            raise CoordinatorError(f"{path} is not a job: write it from a TrainJob")
        return cls.from_job(job)


# --- shared state


class Core:
    """Shared state; every change of the ledger goes through `do`.

    Args:
        settings: The job.
        ledger: The state; empty, or restored from the event log.
        output: The training's output.
        clock: Monotonic seconds.
        wall: Seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        output: ObjectStore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.ledger, self.output = settings, ledger, output
        self.clock, self.wall = clock, wall
        self.compact = False
        """Whether the event log should be compacted into one state."""
        self._events: list[Event] = []

    def do(self, event: str, **values: object) -> object:
        """Apply an event to the ledger and return its result."""
        body, lines = {"event": event, **values}, len(self.ledger.lines)
        try:
            result = self.ledger.apply(body)
        except Exception:
            del self.ledger.lines[lines:]  # of an event that is not recorded
            raise
        self._events.append(body)
        return result

    def set(self, **values: object) -> None:
        """Change some of the ledger's counters."""
        self.do("value", values=values)

    def note_elapsed(self, seconds: float) -> None:
        """Add to the training time."""
        self.set(elapsed=self.ledger.values.elapsed + seconds, at=self.wall())

    def drain(self) -> tuple[list[Event], list[JsonObject]]:
        """Take the events and journal lines since the last call, to be committed."""
        taken = self._events, self.ledger.lines
        self._events, self.ledger.lines = [], []
        return taken

    def check_rows(self, epoch: int, packed: str) -> int:
        """Validate the epoch and rows that a node names and return the number of rows.

        Raises:
            CoordinatorError: If epoch or rows do not exist.
        """
        rows = unpack_rows(packed)
        if not 0 <= epoch < self.ledger.total:
            raise CoordinatorError(f"epoch {epoch} is not one of {self.ledger.total}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.ledger.size:
            raise CoordinatorError(
                f"rows beyond the index of {self.ledger.size} utterances: does the node use another index?"
            )
        return len(rows)
