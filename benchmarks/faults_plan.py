"""Plans of the fault battery: which process gets which signal when, drawn from a seed and an undisturbed run.

An undisturbed run is sampled: its progress, and which roles had a live process. The time of a fault is drawn uniformly
from the time in which its role was alive, and stored as progress (stages done, epochs closed) plus seconds, so that it
is meaningful on slower machines and in restarted runs. All pairs of role and signal are drawn equally often.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_processes import COMMAND, EVERYTHING, GROUP, OTHER, Found
from storage.stages import DONE
from tasks.config.pipeline import parse_config
from tasks.stages.base import stages_of
from training.coordinator.journal import read_journal

STOP_S = (1.0, 20.0)
"""Range of the seconds that a process is stopped."""
_SIGNALS = {
    COMMAND: ("KILL", "STOP", "TERM", "INT"),
    GROUP: ("KILL", "STOP", "TERM", "INT"),
    EVERYTHING: ("KILL", "STOP"),
}
_SIGNALS_OF_CHILDREN = ("KILL", "STOP", "TERM")

BATTERY_STAGES = stages_of(parse_config({"name": "battery", "data": {"sources": [{"kind": "synthetic"}]}}))
"""The stages of the battery's pipelines, which have none that is optional."""

Pair = tuple[str, str]
"""Role and signal."""


@dataclass(frozen=True, order=True)
class Progress:
    """Progress of a pipeline."""

    stages: int = 0
    """Number of leading stages that are done."""
    epochs: int = 0
    """Number of closed epochs of the running training."""

    def __str__(self) -> str:
        stage = BATTERY_STAGES[self.stages] if self.stages < len(BATTERY_STAGES) else "end"
        return f"{stage} {self.epochs}" if self.epochs else stage


def progress_of(home: Path) -> Progress:
    """Progress of the pipeline in a data folder."""
    objects = home / "objects"
    done = 0
    while done < len(BATTERY_STAGES) and any(objects.glob(f"{BATTERY_STAGES[done]}/*/{DONE}")):
        done += 1
    if done >= len(BATTERY_STAGES) or BATTERY_STAGES[done] != "train":
        return Progress(done)
    journals = (home / "work").glob("train-*/journal.jsonl")
    return Progress(done, sum(entry["kind"] == "epoch" for path in journals for entry in read_journal(path)))


@dataclass(frozen=True)
class Sample:
    """One sample of an undisturbed run."""

    progress: Progress
    since: float
    """Seconds since this progress was reached."""
    roles: tuple[str, ...]
    """Roles that had a live process."""

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Sample":
        """Read from a JSON value."""
        return cls(Progress(**value["progress"]), value["since"], tuple(value["roles"]))

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value."""
        return asdict(self)


def observe(living: Sequence[Found], progress: Progress, since: float) -> Sample:
    """Sample a run; groups of processes count as separate roles."""
    roles = {process.role for process in living} - {OTHER}
    return Sample(progress, since, tuple(sorted(roles | ({GROUP, EVERYTHING} if COMMAND in roles else set()))))


@dataclass(frozen=True)
class Fault:
    """A planned fault."""

    role: str
    signal: str
    progress: Progress
    """The fault is injected when the run has reached this progress,"""
    after_s: float
    """this many seconds have passed since then, and a process of the role is alive."""
    pick: float
    """Selects one of several processes, from 0 to 1."""
    stop_s: float = 0.0
    """Seconds that the process is stopped."""
    at_once: bool = False
    """Whether a command ended by the fault is rerun immediately, or only after its processes have ended."""

    @property
    def pair(self) -> Pair:
        """Role and signal."""
        return self.role, self.signal

    @property
    def ends_command(self) -> bool:
        """Whether the fault must end the command."""
        return self.signal != "STOP" and self.role in (COMMAND, GROUP, EVERYTHING)

    def __str__(self) -> str:
        standing = f" for {self.stop_s:.0f} s" if self.stop_s else ""
        return f"{self.signal} to {self.role}{standing}, {self.after_s:.1f} s after {self.progress}"


def pairs_of(samples: Iterable[Sample]) -> list[Pair]:
    """All pairs of role and signal that are possible in a run."""
    roles = sorted({role for sample in samples for role in sample.roles})
    return [(role, signal) for role in roles for signal in _SIGNALS.get(role, _SIGNALS_OF_CHILDREN)]


def draw(
    rng: random.Random, samples: Sequence[Sample], given: Counter[Pair], count: int, only: Sequence[Pair] = ()
) -> list[Fault]:
    """Draw the faults of one run, in chronological order.

    Args:
        rng: Random state.
        samples: Samples of the undisturbed run.
        given: How often each pair has been drawn; the least frequent are drawn first.
        count: Number of faults.
        only: Draw only these pairs, as far as the run has them; empty for all.
    """
    pairs = [pair for pair in pairs_of(samples) if not only or pair in only]
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: given[pair])
    chosen = (pairs * count)[:count] if pairs else []
    return sorted((_draw_one(rng, samples, pair) for pair in chosen), key=lambda fault: (fault.progress, fault.after_s))


def _draw_one(rng: random.Random, samples: Sequence[Sample], pair: Pair) -> Fault:
    role, signal = pair
    moment = rng.choice([sample for sample in samples if role in sample.roles])
    return Fault(
        role=role,
        signal=signal,
        progress=moment.progress,
        after_s=round(moment.since + rng.random(), 2),
        pick=rng.random(),
        stop_s=round(rng.uniform(*STOP_S), 1) if signal == "STOP" else 0.0,
        at_once=rng.random() < 0.5,
    )
