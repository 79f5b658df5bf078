"""The coordinator's part of a job's settings. Read from JSON, because the job's own class imports torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from training.coordinator.messages import CoordinatorError, JsonObject
from training.learner.sampling import SamplingConfig


@dataclass(frozen=True)
class Settings:
    """The part of a `TrainJob` that concerns the coordinator; names and units are those of `TrainConfig`."""

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
