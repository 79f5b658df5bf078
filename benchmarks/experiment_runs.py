"""Simulated training runs, their settings, and the file of their results."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tasks.simulated_speech import Speech
from training.config import OPTIMIZERS, ScheduleConfig
from training.job import TrainJob
from training.simulation import Cluster, MembershipChange, Simulation
from training.simulation.problem import Job, Problem
from training.strategies.registry import find_method

WARMUP = 10 / 16
"""The published recipe for large batches (arXiv:1904.04956): 10 of 16 epochs of linear warm-up, then 1/sqrt(2) each."""
STEP_S, JITTER, LINK_GBIT = 0.4, 0.1, 0.025
"""The small model (0.41 MB) takes as long to send as the published one (165 MB) over 10 Gbit/s: 0.13 s."""

Record = dict[str, Any]
Data = Literal["digits", "segments"]


class DivergedError(ArithmeticError):
    """A gradient is not finite."""


@dataclass(frozen=True)
class Run:
    """Settings of a simulated training run.

    Attributes:
        strategy: Name of the method.
        learners: Number of learners.
        batch: Utterances or segments per step over all learners.
        lr: Highest learning rate of the schedule.
        options: Options of the method as `name=value`.
        slow: Factor by which learner 0 is slower.
        per_machine: Learners per node, for h-adpsgd.
        looks: Evaluations per epoch; 0 evaluates only at the end.
        clip: Norm to which gradients are clipped; 0 for no clipping.
        optimizer: SGD or AdamW.
        momentum: Momentum of SGD.
        epochs: Passes over the data; 10/16 of them are warm-up.
        seed: Seed of weights, order of data, jitter and random neighbours.
        late: Number of learners that join the running training; the last ones.
        join_s: Time of their joining in virtual seconds.
        link: Bandwidth of each learner's link in Gbit/s.
        data: What is trained on: digits (CTC, whole recordings), or segments of 21 frames with tied states.
    """

    strategy: str
    learners: int
    batch: int
    lr: float
    options: tuple[str, ...] = ()
    slow: float = 1.0
    per_machine: int = 1
    looks: int = 0
    clip: float = 5.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    epochs: int = 16
    seed: int = 1
    late: int = 0
    join_s: float = 0.0
    link: float = LINK_GBIT
    data: Data = "digits"

    @property
    def key(self) -> str:
        """Key of the run in the results file."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def method(self) -> str:
        """The method with its options for display, without the block length, which is the same in all runs."""
        values = [option.removeprefix("neighbours=") for option in self.options if not option.startswith("tau=")]
        return " ".join([self.strategy, *values, *([] if self.momentum else ["(plain SGD)"])])

    @property
    def cluster(self) -> Cluster:
        """The simulated cluster."""
        return Cluster(
            learners=self.learners,
            per_machine=self.per_machine,
            step_s=STEP_S,
            jitter=JITTER,
            slow={0: self.slow} if self.slow != 1.0 else {},
            link_gbit=self.link,
            joins=tuple(
                MembershipChange(rank=rank, at_s=self.join_s)
                for rank in range(self.learners - self.late, self.learners)
            ),
        )


class Problems(Protocol):
    """Creates the problem of a run."""

    def __call__(self, run: Run) -> Problem:
        """Return the model, data and schedule of a run."""


class PublishedRecipe:
    """Problems with the acoustic model and data of a job and the published recipe.

    Args:
        job: The training job from the pipeline.
    """

    def __init__(self, job: TrainJob) -> None:
        self._job, self._first = job, Speech(job, 1)

    def __call__(self, run: Run) -> Problem:
        """Return the problem of a run."""
        common = {"lr": run.lr, "weight_decay": 0.0, "clip_norm": run.clip}
        own = {"momentum": run.momentum} if run.optimizer == "sgd" else {}
        optimizer = OPTIMIZERS[run.optimizer].model_validate(common | own)
        warmup = WARMUP * run.epochs
        schedule = ScheduleConfig(kind="published", warmup_epochs=warmup, hold_epochs=warmup)
        changes = {"max_batch": run.batch, "batch_seconds": 1e9, "optimizer": optimizer, "schedule": schedule}
        train = self._job.train.model_copy(update=changes)
        job = self._job.model_copy(update={"train": train, "seed": run.seed})
        return Speech(job, run.learners, run.epochs, like=self._first)


class _Guarded:
    """A problem that stops at the first non-finite gradient, from which no method here recovers."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """Compute gradients; raises `DivergedError` if one is not finite."""
        weights = self._problem.gradients(jobs)
        if not all(math.isfinite(float(job.replica.grads.sum())) for job in jobs):
            raise DivergedError
        return weights


def train(run: Run, problems: Problems) -> Record:
    """Simulate a run; returns its settings and results.

    `loss` and `wer` are None if it diverged; segments have `frame_accuracy` instead of `wer`. `curve` has a list for
    each evaluation: virtual seconds, epochs, loss, WER, consensus distance.
    """
    from tasks.config.yaml_text import parse_yaml

    began = time.process_time()
    options = {name: parse_yaml(value) for name, _, value in (option.partition("=") for option in run.options)}
    config = find_method(run.strategy).config.model_validate(options)
    simulation = Simulation(
        run.cluster,
        run.strategy,
        _Guarded(problems(run)),  # type: ignore[arg-type]
        config,
        seed=run.seed,
        observe=run.looks,
    )
    without: Record = {"run": asdict(run), "loss": None, "wer": None, "curve": []}
    try:
        outcome = simulation.run()
    except DivergedError:
        return {**without, "cpu_s": round(time.process_time() - began, 1)}
    seen = [
        [
            observation.at_s,
            observation.epochs,
            observation.figures["loss"],
            observation.figures.get("wer", math.nan),
            observation.consensus,
        ]
        for observation in outcome.observations
    ]
    return {
        **without,
        **_finite(outcome.figures),
        "seconds": _short(outcome.seconds),
        "staleness": _short(outcome.staleness.mean),
        "consensus": _short(outcome.consensus),
        "bytes": _short(outcome.bytes_per_step),
        "curve": [[_short(value) for value in point] for point in seen] if run.looks else [],
        "cpu_s": round(time.process_time() - began, 1),
    }


def _finite(figures: Mapping[str, float]) -> Record:
    return {name: _short(value) for name, value in figures.items()}


def _short(value: float) -> float | None:
    """Round to five digits; None for values that JSON cannot represent."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Results:
    """A file of finished runs, one line of JSON each, so that an interrupted sweep continues where it stopped.

    Args:
        path: The file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, Record] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
            self._records[Run(**{**record["run"], "options": tuple(record["run"]["options"])}).key] = record
        except json.JSONDecodeError:
            return  # truncated by a crash during a write: that run is repeated

    def __len__(self) -> int:
        return len(self._records)

    def get(self, run: Run) -> Record | None:
        """The record of a run, or None."""
        return self._records.get(run.key)

    def add(self, record: Record) -> None:
        """Append a record and sync it to disk; starts a new line after a truncated one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def ensure(self, run: Run, problems: Problems) -> Record:
        """The record of a run; simulates it if there is none."""
        if run.key not in self._records:
            self.add(train(run, problems))
        return self._records[run.key]
