"""One run of the fault battery: a pipeline in a separate data folder, disturbed and rerun until it finishes.

If the run survives a fault, the next one follows. If the command ends, it is rerun: immediately, or after the processes
that it left have ended. All waits are bounded, and all processes alive at the end are killed.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults_checks import Band, Finding, findings_of
from benchmarks.faults_plan import Fault, Progress, Sample, observe, progress_of
from benchmarks.faults_processes import EVERYTHING, GROUP, Found, Household, describe, send, with_role
from benchmarks.faults_recipe import ROOT, TRAIN_UTTERANCES, Variant, environment, run_command, write_config
from training.processes.children import bind_to_parent

LOOK_S = 0.4
QUIET_S = 2.0
"""Minimum seconds between two faults."""
ORPHANS_S = 60.0
"""How long processes may outlive their command: ten seconds are promised, but the machine may be busy."""
END_S = 120.0
"""How long a command may take to end on request before that is a finding; again, ten seconds are promised."""
MAX_BY_ITSELF = 2
"""Number of commands that fail without a fault or hang after which a run is abandoned."""


@dataclass
class Given:
    """An injected fault and its consequences."""

    fault: Fault
    attempt: int
    pid: int
    at_s: float
    """Seconds since the start of the run's first command."""
    progress: str
    status: int | None = None
    """Exit status of the command, if this fault ended it."""
    end_s: float | None = None
    """Seconds until the command ended."""
    said: str = ""
    """The command's last message."""
    finished_s: float | None = None
    """Seconds until the run finished, including further faults."""

    @property
    def ended(self) -> bool:
        """Whether the fault ended the command."""
        return self.status is not None

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value."""
        return asdict(self)


@dataclass
class Outcome:
    """The result of a run."""

    variant: str
    seed: int
    folder: str
    given: list[Given] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Samples of the run, if it was not disturbed."""
    attempts: int = 0
    finished: bool = False
    rate: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value, without the samples."""
        values = asdict(self)
        del values["samples"]
        return values


def _as_from_a_terminal() -> None:
    """Set up the child: it ends with the battery, and accepts SIGINT even if the battery runs in the background."""
    bind_to_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Attempt:
    """One start of the command.

    Args:
        words: The command line.
        home: The data folder.
        folder: Folder of its outputs.
        number: Number of the start.
    """

    def __init__(self, words: list[str], home: Path, folder: Path, number: int) -> None:
        self.number, self.began = number, time.monotonic()
        self.output, self.log = folder / f"attempt-{number}.out", folder / f"attempt-{number}.log"
        with self.output.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment(home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # a separate process group, like that of a command in a terminal
                preexec_fn=_as_from_a_terminal,
            )

    def status(self) -> int | None:
        """Its exit status, or None while it is running."""
        return self.process.poll()

    def words(self) -> str:
        """Its standard error."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def summary(self) -> dict[str, Any]:
        """The JSON summary that it printed after a finished run."""
        text = self.output.read_text(encoding="utf-8")
        summary: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return summary


def last_word(text: str) -> str:
    """The last message of a command: the line of the error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error\b|[\w.]*(Error|Exception|Signal|Interrupt)\b)", line)]
    word = (errors or lines or [""])[-1]
    # if an error is followed by the last lines of a log, the last one is the cause
    return f"{word[:150]} {lines[-1][:150]}" if word.endswith(":") and word != lines[-1] else word[:300]


class Trial:
    """A run in a separate data folder.

    Args:
        variant: Variant of the pipeline.
        seed: Seed of the pipeline.
        folder: Folder to create for the data folder, the configuration and logs.
        corpus: Table of the corpus.
        faults: Faults in chronological order; without any, the run is sampled.
        epochs: Number of training epochs.
        limit_s: Time-out of one command in seconds.
        say: Called with progress messages.
    """

    def __init__(
        self,
        variant: Variant,
        seed: int,
        folder: Path,
        corpus: Path,
        faults: Sequence[Fault],
        epochs: int,
        limit_s: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self.variant, self.epochs, self.limit_s, self.say = variant, epochs, limit_s, say
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.config = write_config(folder / "config.yaml", variant.document(corpus, seed, epochs))
        self.household = Household(self.home)
        self.outcome = Outcome(variant.name, seed, str(folder))
        self.waiting = list(faults)
        self._observes = not faults
        self._reached: dict[Progress, float] = {}
        self._quiet_until = self._began = time.monotonic()
        self._killed: set[int] = set()

    def run(self, band: Band | None) -> Outcome:
        """Run until finished, and check the results.

        Args:
            band: Acceptable word error rates; None skips this check.
        """
        try:
            attempt = self._until_finished()
            if attempt is not None:
                self._check(attempt, band)
        finally:
            self.household.end()
            self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _until_finished(self) -> Attempt | None:
        by_itself = 0
        while by_itself < MAX_BY_ITSELF:
            self.outcome.attempts += 1
            attempt = Attempt(run_command(self.variant, self.config), self.home, self._folder, self.outcome.attempts)
            hung = not self._attend(attempt)
            self._note_end(attempt)
            if attempt.status() == 0:
                return attempt
            mine = [given for given in self.outcome.given if given.attempt == attempt.number]
            by_itself += hung or not mine
            if not (hung or mine):
                self._find("fails by itself", f"status {attempt.status()}: {last_word(attempt.words())}")
            if not (mine and mine[-1].fault.at_once):
                self._await_orphans()
        self._find("not finished", f"the same command does not finish the work; given up after {attempt.number}")
        return None

    @property
    def _folder(self) -> Path:
        return Path(self.outcome.folder)

    def _find(self, kind: str, text: str) -> None:
        self.outcome.findings.append(Finding(kind, text))
        self.say(f"  FINDING {kind}: {text}")

    # --- a command

    def _attend(self, attempt: Attempt) -> bool:
        """Inject faults until the command ends; returns False if it hangs."""
        while attempt.status() is None:
            if time.monotonic() > attempt.began + self.limit_s:
                self._hangs(attempt, f"the command has not ended after {self.limit_s:.0f} s")
                return False
            living, progress = self.household.living(), progress_of(self.home)
            since = time.monotonic() - self._reached.setdefault(progress, time.monotonic())
            if self._observes:
                self.outcome.samples.append(observe(living, progress, since))
            fault = self._due(living, progress)
            if fault is not None and not self._give(fault, attempt, living, progress):
                return False
            time.sleep(LOOK_S)
        return True

    def _hangs(self, attempt: Attempt, text: str) -> None:
        self._find("does not end", f"{text}; last word: {last_word(attempt.words())!r}; {self._alive()}")
        self.household.end()
        attempt.process.wait()

    def _alive(self) -> str:
        return describe(self.household.living())

    def _due(self, living: Sequence[Found], progress: Progress) -> Fault | None:
        """The first waiting fault that is due and whose process is alive."""
        now = time.monotonic()
        if now < self._quiet_until:
            return None
        roles = {role for sample in [observe(living, progress, 0.0)] for role in sample.roles}
        for fault in self.waiting:
            if fault.progress > progress:
                return None
            reached = min(at for there, at in self._reached.items() if there >= fault.progress)
            if now >= reached + fault.after_s and fault.role in roles:
                return fault
        return None

    def _give(self, fault: Fault, attempt: Attempt, living: Sequence[Found], progress: Progress) -> bool:
        """Send a fault's signal; returns False if the command should end but hangs."""
        targets = with_role(living, fault.role)
        victim = attempt.process.pid
        if targets and fault.role != EVERYTHING:
            targets = [targets[int(fault.pick * len(targets))]]
            victim = targets[0].pid
        given = Given(fault, attempt.number, victim, self._elapsed(), str(progress))
        self.waiting.remove(fault)
        self.outcome.given.append(given)
        self.say(f"  {given.at_s:6.1f} s, at {progress}: {fault}, process {victim}")
        self._send(fault, attempt, targets)
        self._quiet_until = time.monotonic() + QUIET_S
        return not fault.ends_command or self._await_end(attempt, given)

    def _send(self, fault: Fault, attempt: Attempt, targets: Sequence[Found]) -> None:
        def deliver(number: signal.Signals) -> None:
            if fault.role == GROUP:
                with suppress(ProcessLookupError):
                    os.killpg(attempt.process.pid, number)
            else:
                send(targets, number)

        deliver(signal.Signals[f"SIG{fault.signal}"])
        if fault.signal == "STOP":
            time.sleep(fault.stop_s)
            deliver(signal.SIGCONT)

    def _await_end(self, attempt: Attempt, given: Given) -> bool:
        deadline = time.monotonic() + self.limit_s
        while attempt.status() is None:
            if time.monotonic() > deadline:
                self._hangs(
                    attempt, f"{given.fault.signal} to {given.fault.role}: not ended after {self.limit_s:.0f} s"
                )
                return False
            time.sleep(0.1)
        took = self._elapsed() - given.at_s
        if took > END_S:
            self._find("ends slowly", f"{given.fault.signal} to {given.fault.role}: the command took {took:.0f} s")
        return True

    def _note_end(self, attempt: Attempt) -> None:
        """Record the end of a command, attributed to the last fault unless it has finished."""
        words, status = attempt.words(), attempt.status()
        mine = [given for given in self.outcome.given if given.attempt == attempt.number]
        if status:
            self._killed.add(attempt.process.pid)
            self.say(f"  {self._elapsed():6.1f} s: the command ended with {status}: {last_word(words)}")
        if mine and status:
            mine[-1].status, mine[-1].said = status, last_word(words)
            mine[-1].end_s = self._elapsed() - mine[-1].at_s
        if "Traceback (most recent call last)" in words:
            self._find("traceback", f"attempt {attempt.number}, status {status}: {last_word(words)}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _await_orphans(self) -> None:
        if left := self.household.wait_until_gone(ORPHANS_S):
            self._find("orphans", f"{ORPHANS_S:.0f} s after the command's end: {describe(left)}")
            self.household.end()

    # --- the end

    def _check(self, attempt: Attempt, band: Band | None) -> None:
        for given in self.outcome.given:
            given.finished_s = self._elapsed() - given.at_s
        self.outcome.finished = True
        self._await_orphans()
        summary = attempt.summary()
        self.outcome.rate = summary["sets"]["test"]["wer"]
        try:
            findings = findings_of(self.home, self.config, summary, band, self._killed, self.epochs, TRAIN_UTTERANCES)
        except subprocess.TimeoutExpired as error:
            findings = [Finding("does not end", str(error))]
        for finding in findings:
            self._find(finding.kind, finding.text)
