"""The plan of a fault battery: which process gets which signal when, drawn from a seed and from an undisturbed run.

An undisturbed run is observed: how far the work was, and which roles had a living process. A fault's moment is drawn
uniformly from the time in which its role lived there, and given as progress (stages done, epochs closed) and seconds
after that: so it means the same on a slower machine, and in a run that was begun again. Every pair of role and signal
gets its share.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_processes import COMMAND, EVERYTHING, GROUP, OTHER, Found
from storage.stages import DONE
from tasks import STAGES
from training.coordinator.journal import read_journal

STOP_S = (1.0, 20.0)
"""How long a stopped process stands still."""
_SIGNALS = {
    COMMAND: ("KILL", "STOP", "TERM", "INT"),
    GROUP: ("KILL", "STOP", "TERM", "INT"),
    EVERYTHING: ("KILL", "STOP"),
}
_SIGNALS_OF_CHILDREN = ("KILL", "STOP", "TERM")

Pair = tuple[str, str]
"""Role and signal."""


@dataclass(frozen=True, order=True)
class Progress:
    """How far a pipeline is."""

    stages: int = 0
    """Stages done, from the first on."""
    epochs: int = 0
    """Epochs closed of the training that is going on."""

    def __str__(self) -> str:
        stage = STAGES[self.stages] if self.stages < len(STAGES) else "end"
        return f"{stage} {self.epochs}" if self.epochs else stage


def progress_of(home: Path) -> Progress:
    """How far the pipeline of a data folder is."""
    objects = home / "objects"
    done = 0
    while done < len(STAGES) and any(objects.glob(f"{STAGES[done]}/*/{DONE}")):
        done += 1
    if done >= len(STAGES) or STAGES[done] != "train":
        return Progress(done)
    journals = (home / "work").glob("train-*/journal.jsonl")
    return Progress(done, sum(entry["kind"] == "epoch" for path in journals for entry in read_journal(path)))


@dataclass(frozen=True)
class Sample:
    """A look at an undisturbed run."""

    progress: Progress
    since: float
    """Seconds since it got there."""
    roles: tuple[str, ...]
    """Roles that had a living process."""

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Sample":
        """From its JSON form."""
        return cls(Progress(**value["progress"]), value["since"], tuple(value["roles"]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def observe(living: Sequence[Found], progress: Progress, since: float) -> Sample:
    """What a look at a run sees; groups of processes count as roles of their own."""
    roles = {one.role for one in living} - {OTHER}
    return Sample(progress, since, tuple(sorted(roles | ({GROUP, EVERYTHING} if COMMAND in roles else set()))))


@dataclass(frozen=True)
class Fault:
    """One fault that will be given."""

    role: str
    signal: str
    progress: Progress
    """The fault is given when the run has reached this point,"""
    after_s: float
    """this many seconds have passed since then, and a process of the role is alive."""
    pick: float
    """Which of several processes, from 0 to 1."""
    stop_s: float = 0.0
    """How long it stands still."""
    at_once: bool = False
    """Whether a command that ends of it is run again at once, or only when its processes have gone."""

    @property
    def pair(self) -> Pair:
        """Role and signal."""
        return self.role, self.signal

    @property
    def ends_command(self) -> bool:
        """Whether it must end the command."""
        return self.signal != "STOP" and self.role in (COMMAND, GROUP, EVERYTHING)

    def __str__(self) -> str:
        standing = f" for {self.stop_s:.0f} s" if self.stop_s else ""
        return f"{self.signal} to {self.role}{standing}, {self.after_s:.1f} s after {self.progress}"


def pairs_of(samples: Iterable[Sample]) -> list[Pair]:
    """All pairs of role and signal that a run allows."""
    roles = sorted({role for sample in samples for role in sample.roles})
    return [(role, signal) for role in roles for signal in _SIGNALS.get(role, _SIGNALS_OF_CHILDREN)]


def draw(
    rng: random.Random, samples: Sequence[Sample], given: Counter[Pair], count: int, only: Sequence[Pair] = ()
) -> list[Fault]:
    """Draw the faults of one run, in the order in which they come.

    Args:
        rng: Random state.
        samples: The undisturbed run.
        given: How often each pair has had its turn; those with the fewest come first.
        count: How many faults.
        only: Only these pairs, where the run has them.
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
