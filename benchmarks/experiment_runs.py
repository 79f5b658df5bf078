"""One simulated training with its settings, and the file that remembers what came out."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from training.config import OPTIMIZERS, ScheduleConfig
from training.job import TrainJob
from training.simulation import Cluster, MembershipChange, Simulation
from training.simulation.problem import Job, Problem
from training.simulation.speech import Speech
from training.strategies.registry import find_method

WARMUP = 10 / 16
"""The published recipe for large batches (arXiv:1904.04956): 10 of 16 epochs of linear warm-up, then 1/sqrt(2) each."""
STEP_S, JITTER, LINK_GBIT = 0.4, 0.1, 0.025
"""The small model (0.41 MB) takes as long to send as the published one (165 MB) behind a link of 10 Gbit/s: 0.13 s."""

Record = dict[str, Any]


class DivergedError(ArithmeticError):
    """A gradient is not a number any more."""


@dataclass(frozen=True)
class Run:
    """What decides a simulated training.

    Attributes:
        strategy: Name of the method.
        learners: How many.
        batch: Utterances of a step over all learners.
        lr: Highest learning rate of the schedule.
        options: Of the method, as `name=value`.
        slow: How many times slower learner 0 computes.
        per_machine: Learners of a node, for h-adpsgd.
        looks: Evaluations per epoch; 0 looks at the end only.
        clip: Gradients are scaled down to this norm; 0 never.
        optimizer: SGD, or AdamW.
        momentum: Of SGD.
        epochs: Passes over the data; of 16, 10 are warm-up.
        seed: Of weights, order of data, jitter and random neighbours.
        late: Learners that join a training that runs, the last ones.
        join_s: When they do, virtual seconds.
        link: Gbit/s of each learner's link.
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

    @property
    def key(self) -> str:
        """Names the run in the file of results."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def method(self) -> str:
        """The method with its options, for a reader; all blocks of steps are equally long."""
        values = [one.removeprefix("neighbours=") for one in self.options if not one.startswith("tau=")]
        return " ".join([self.strategy, *values, *([] if self.momentum else ["(plain SGD)"])])

    @property
    def cluster(self) -> Cluster:
        """The machines that it is simulated on."""
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
    """Makes the problem of a run."""

    def __call__(self, run: Run) -> Problem:
        """A model, its data and its schedule."""


class Digits:
    """The acoustic model and the data of a job, with the published recipe.

    Args:
        job: As the pipeline makes it.
    """

    def __init__(self, job: TrainJob) -> None:
        self._job, self._first = job, Speech(job, 1)

    def __call__(self, run: Run) -> Problem:
        """See `Problems`."""
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
    """A problem that stops at the first gradient that is not a number: no method here recovers from it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """See `Problem.gradients`."""
        weights = self._problem.gradients(jobs)
        if not all(math.isfinite(float(job.replica.grads.sum())) for job in jobs):
            raise DivergedError
        return weights


def train(run: Run, problems: Problems) -> Record:
    """Simulate a run; its settings, and what came out.

    `loss` and `wer` are None if it diverged. `curve` has a list for each look: virtual seconds, epochs, loss, WER,
    consensus distance.
    """
    from tasks.config.yaml_text import parse_yaml

    began = time.process_time()
    options = {name: parse_yaml(value) for name, _, value in (one.partition("=") for one in run.options)}
    config = find_method(run.strategy).config.model_validate(options)
    simulation = Simulation(
        run.cluster,
        run.strategy,
        _Guarded(problems(run)),  # type: ignore[arg-type]
        config,
        seed=run.seed,
        observe=run.looks,
    )
    found: Record = {"run": asdict(run), "loss": None, "wer": None, "curve": []}
    try:
        outcome = simulation.run()
    except DivergedError:
        return {**found, "cpu_s": round(time.process_time() - began, 1)}
    seen = [
        [one.at_s, one.epochs, one.figures["loss"], one.figures.get("wer", math.nan), one.consensus]
        for one in outcome.observations
    ]
    return {
        **found,
        **_finite(outcome.figures),
        "seconds": _short(outcome.seconds),
        "staleness": _short(outcome.staleness.mean),
        "consensus": _short(outcome.consensus),
        "bytes": _short(outcome.bytes_per_step),
        "curve": [[_short(value) for value in one] for one in seen] if run.looks else [],
        "cpu_s": round(time.process_time() - began, 1),
    }


def _finite(figures: Mapping[str, float]) -> Record:
    return {name: _short(value) for name, value in figures.items()}


def _short(value: float) -> float | None:
    """Five digits; JSON has no word for what is not a number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Results:
    """Finished runs, a line of JSON each: written once, at the end of a run, so that a sweep goes on where it stopped.

    Args:
        path: The file; it need not exist.
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
            return  # torn by a crash in the middle of a write: that run is made again

    def __len__(self) -> int:
        return len(self._records)

    def get(self, run: Run) -> Record | None:
        """What came out of a run, if it was made."""
        return self._records.get(run.key)

    def add(self, record: Record) -> None:
        """Append a record, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def ensure(self, run: Run, problems: Problems) -> Record:
        """The record of a run, made now if there is none."""
        if run.key not in self._records:
            self.add(train(run, problems))
        return self._records[run.key]
