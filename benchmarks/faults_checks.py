"""Checks of finished runs in the fault battery.

Each check yields findings: kind and text. The threshold of the word error rate comes from undisturbed runs.
"""

import json
import math
import sqlite3
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_recipe import NAME, ROOT, command, environment
from recognition.bundle import load_bundle
from storage.locks import is_locked
from storage.objects import ObjectStore
from tasks.locking.lock_owner import LockOwner
from training.coordinator.journal import Entry, read_journal

COMMAND_S = 300.0
"""Time-out of a read-only command on a busy machine, in seconds."""
SIGMAS = 3.0
LEAST_SPREAD = 0.03
"""Minimum standard deviation of the word error rate between runs: a few runs may agree by chance."""


@dataclass(frozen=True)
class Finding:
    """A failed check."""

    kind: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def epochs_whole(entries: Sequence[Entry], epochs: int, size: int) -> Iterator[Finding]:
    """Check that each epoch is closed once and complete, and that repeated utterances are counted and listed.

    Args:
        entries: Valid entries of the journal.
        epochs: Expected number of epochs.
        size: Number of utterances in the training set.
    """
    closed = [entry for entry in entries if entry["kind"] == "epoch"]
    numbers = [entry["epoch"] for entry in closed]
    if numbers != list(range(1, epochs + 1)):
        yield Finding("epochs", f"the journal closes the epochs {numbers} instead of 1 to {epochs}")
    for entry in closed:
        trained, lost = entry["utterances"], entry.get("unreadable", 0)
        if not (entry["index"] == size == trained and not lost):
            text = f"{trained} trained, {lost} unreadable, {entry['index']} in the index of {size} utterances"
            yield Finding("epochs", f"epoch {entry['epoch']}: {text}")
        if len(entry["repeated_ids"]) != entry["repeated"]:
            text = f"{entry['repeated']} repeated, but {len(entry['repeated_ids'])} named"
            yield Finding("epochs", f"epoch {entry['epoch']}: {text}")


def weights_finite(folder: Path) -> Iterator[Finding]:
    """Check that the bundle loads and all weights are finite."""
    try:
        _, model = load_bundle(folder)
    except (OSError, ValueError) as error:
        yield Finding("weights", f"the model does not load: {error}")
        return
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield Finding("weights", f"{name} is not finite")


@dataclass(frozen=True)
class Band:
    """The highest word error rate of undisturbed runs, and the margin for chance."""

    highest: float
    margin: float

    @property
    def limit(self) -> float:
        """The highest acceptable rate."""
        return self.highest + self.margin

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[float]], words: int) -> dict[str, "Band"]:
        """Compute the band of each variant.

        The variance between runs is pooled over variants, because each has only a few; the sampling variance of the
        test set is binomial.

        Args:
            runs: Word error rates by variant.
            words: Number of words in the test set.
        """
        freedom = sum(len(rates) - 1 for rates in runs.values())
        squares = sum(statistics.variance(rates) * (len(rates) - 1) for rates in runs.values() if len(rates) > 1)
        between = max(squares / freedom if freedom else 0.0, LEAST_SPREAD**2)
        bands = {}
        for name, rates in runs.items():
            mean = statistics.fmean(rates)
            bands[name] = cls(max(rates), SIGMAS * math.sqrt(between + mean * (1 - mean) / words))
        return bands


def rate_within(rate: float, band: Band) -> Iterator[Finding]:
    """Check that the word error rate is within the range of undisturbed runs."""
    if not rate <= band.limit:
        text = f"{rate:.1%}; undisturbed runs have {band.highest:.1%} at most, chance explains {band.limit:.1%}"
        yield Finding("word error rate", text)


def no_locks(home: Path, killed: set[int]) -> Iterator[Finding]:
    """Check that no lock is held after all processes have ended.

    A killed command cannot release its leases; they become free when another process requests them.

    Args:
        home: The data folder.
        killed: Process ids of commands ended by a fault.
    """
    for path in sorted(home.rglob("*.lock")):
        if is_locked(path):
            yield Finding("locks", f"{path.relative_to(home)} is held by {path.read_text().strip() or 'a process'}")
    for name, value in _leases(home / "prefect" / "prefect.db"):
        holder = LockOwner.read(value)
        if not holder.gone():
            yield Finding("leases", f"{name} seems to be held by {holder}")
        elif holder.pid not in killed:
            yield Finding("leases", f"{name} was not released by {holder}, which no fault has ended")


def _leases(database: Path) -> list[tuple[str, Any]]:
    if not database.exists():
        return []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as made:
        rows = made.execute("SELECT name, value FROM variable WHERE name LIKE 'lock-%'").fetchall()
    return [(name, json.loads(value)) for name, value in rows]


def registered_once(home: Path) -> Iterator[Finding]:
    """Check that the model is registered once and is the champion."""
    database = home / "mlflow" / "mlflow.db"
    if not database.exists():
        yield Finding("registry", "there is no MLflow database")
        return
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as made:
        versions = made.execute("SELECT version FROM model_versions WHERE name = ?", (NAME,)).fetchall()
        aliases = made.execute("SELECT alias FROM registered_model_aliases WHERE name = ?", (NAME,)).fetchall()
    if len(versions) != 1:
        yield Finding("registry", f"{len(versions)} versions of the model instead of one")
    if {"champion"} - {alias for (alias,) in aliases}:
        yield Finding("registry", f"the only model is not the champion; its aliases: {[alias for (alias,) in aliases]}")


def stored_whole(home: Path) -> Iterator[Finding]:
    """Check that `starling storage verify` finds no problems."""
    done = look(home, "storage", "verify", "--json")
    if done.returncode:
        yield Finding("storage verify", _last_lines(done))


def nothing_left_to_do(home: Path, config: Path, summary: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that a rerun finds every stage done, and reports the same model and scores."""
    done = look(home, "run", config, "--no-prefect", "--json")
    if done.returncode:
        yield Finding("once more", _last_lines(done))
        return
    again = json.loads(done.stdout.strip().splitlines()[-1])
    # the report shows the registry's current state, so its stage may run again
    if repeated := [stage["name"] for stage in again["stages"] if not stage["cached"] and stage["name"] != "report"]:
        yield Finding("once more", f"{', '.join(repeated)} done again although nothing had changed")
    for field in ("model_uri", "sets"):
        if again[field] != summary[field]:
            yield Finding("once more", f"{field} is {again[field]}, and was {summary[field]}")


def look(home: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    """Run a read-only command."""
    return subprocess.run(
        command(*words), cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=COMMAND_S
    )


def _last_lines(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return f"ended with status {done.returncode}: " + " | ".join(lines[-3:])[-400:]


def findings_of(
    home: Path, config: Path, summary: Mapping[str, Any], band: Band | None, killed: set[int], epochs: int, size: int
) -> list[Finding]:
    """Run all checks on a finished run whose processes have ended."""
    output = ObjectStore(next(stage["url"] for stage in summary["stages"] if stage["name"] == "train"))
    journal, bundle = output.local_path("journal.jsonl"), output.local_path("model/bundle.json")
    if journal is None or bundle is None:
        return [Finding("output", f"the training left no journal or no model in {output.url}")]
    findings = [
        *epochs_whole(read_journal(journal), epochs, size),
        *weights_finite(bundle.parent),
        *(rate_within(summary["sets"]["test"]["wer"], band) if band else ()),
        *no_locks(home, killed),
        *registered_once(home),
        *stored_whole(home),
        *nothing_left_to_do(home, config, summary),
    ]
    utterances = summary["utterances"]
    if utterances["quarantined"] or utterances["read"] != utterances["written"]:
        findings.append(Finding("utterances", f"the corpus is whole, and the run tells {utterances}"))
    return findings
