"""Runs a search: asks the method what to train, has it trained, and keeps the result; until there is nothing to do.

Everything that it knows is in the study. So it may be killed at any moment: the next one first trains what was
training, and then asks the method, which gives the same answers.
"""

import contextvars
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from configurable.wording import counted
from tasks.figures import clock
from tasks.search.config import SearchConfig
from tasks.search.methods.base import SearchMethod, TrialJob
from tasks.search.study import Study, StudyTrial, TrialOutcome, budget_text

_POLL_S = 1.0
_GAP_S = 10.0
"""Most seconds between two calls of a `Watch` that count as work: in between, a trial may wait for a lock or a slot."""
_NOTED_S = 5.0
"""Seconds between two notes of how long the search has taken."""


class SearchFailedError(RuntimeError):
    """So many trials in a row have failed that the search ends."""


class SearchStoppedError(RuntimeError):
    """A trial was stopped because its search ends; it continues with the next one."""


class TrialTimeoutError(RuntimeError):
    """A trial has been worked on for longer than its limit."""


@dataclass
class Watch:
    """Ends the work on a trial in time; called about once a second while its stages work and it trains.

    Args:
        limit_s: Seconds of work after which the trial has failed; 0: no limit. Longer times between two calls, in which
            it waits for others, count little.
        ended: Set when the search ends.
    """

    limit_s: float
    ended: threading.Event
    _last: float | None = field(default=None, init=False)
    _spent: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        """Check.

        Raises:
            TrialTimeoutError: The trial has been worked on for too long.
            SearchStoppedError: The search ends.
        """
        now = time.monotonic()
        self._spent += min(now - (now if self._last is None else self._last), _GAP_S)
        self._last = now
        if self.ended.is_set():
            raise SearchStoppedError("the search has ended; the same command continues this trial")
        if 0 < self.limit_s < self._spent:
            raise TrialTimeoutError(f"it took more than search.trial_hours, {self.limit_s / 3600:g} h")


Train = Callable[[TrialJob, Watch], TrialOutcome]
"""Trains a trial to a budget."""


@dataclass
class SearchDriver:
    """Runs one search.

    Args:
        study: Its trials.
        method: Proposes.
        search: Its configuration.
        largest: Budget of a whole training; 0 if the search trains nothing.
        train: Trains; an exception is the trial's failure.
        ends: Whether an exception is not the trial's fault, such as a full disk: the search ends by it, and the trial
            is trained again by the next one.
        say: Receives a line for each result.
        on_result: Called after each result or failure.
    """

    study: Study
    method: SearchMethod
    search: SearchConfig
    largest: int
    train: Train
    ends: Callable[[Exception], bool] = lambda error: False
    say: Callable[[str], None] = lambda text: None
    on_result: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._left = self.study.interrupted
        self._failed = 0
        self._began = self._noted = time.monotonic()
        self._before_s = self.study.seconds

    def run(self) -> None:
        """Search until there is nothing to do, a limit is reached, or somebody has asked to stop.

        Raises:
            SearchFailedError: Too many trials in a row have failed.
        """
        try:
            if self.search.parallel == 1:
                self._one_by_one()
            else:
                self._together()
        finally:
            self._note_time(at_once=True)

    def _one_by_one(self) -> None:
        """In this thread, so that an interrupt ends the training itself."""
        while job := self._next():
            self._settle(job, lambda job=job: self._timed(job))  # type: ignore[misc]

    def _together(self) -> None:
        running: dict[Future[TrialOutcome], TrialJob] = {}
        with ThreadPoolExecutor(self.search.parallel, thread_name_prefix="trial") as pool:
            try:
                while True:
                    while len(running) < self.search.parallel and (job := self._next()):
                        # a flow that is started in a thread finds the one around it in the context
                        running[pool.submit(contextvars.copy_context().run, self._timed, job)] = job
                    if not running:
                        return
                    for future in wait(running, _POLL_S, FIRST_COMPLETED).done:
                        self._settle(running.pop(future), future.result)
                    self._note_time()
            finally:
                self._ended.set()  # on an error, the others' trainings end soon, each after a checkpoint

    def _timed(self, job: TrialJob) -> TrialOutcome:
        began = time.monotonic()
        try:
            outcome = self.train(job, Watch(self.search.trial_hours * 3600, self._ended))
        except Exception as error:
            error.__dict__["trial_seconds"] = time.monotonic() - began
            raise
        return outcome._replace(seconds=time.monotonic() - began)

    def _next(self) -> TrialJob | None:
        """The next job, noted as begun; those of a former search that was killed come first."""
        if self._left:
            return self._left.pop(0)
        if self._over() or self.study.stopping:
            return None
        if job := self.method.next(self.study.trials):
            self.study.begin(job)
        return job

    def _over(self) -> bool:
        limit, seconds = self.search.total_budget, self.search.hours * 3600
        return (0 < limit <= self.spent) or (0 < seconds <= self._seconds)

    @property
    def _seconds(self) -> float:
        return self._before_s + time.monotonic() - self._began

    @property
    def spent(self) -> int:
        """What all trials have trained, and the running ones will have, in what budgets count."""
        return spent_budget(self.study.trials, self.search.method.restarts)

    def _note_time(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self._noted > _NOTED_S:
            self._noted = time.monotonic()
            self.study.note_seconds(self._seconds)

    def _settle(self, job: TrialJob, result: Callable[[], TrialOutcome]) -> None:
        """Keep the result of a job, or why it has none."""
        try:
            outcome = result()
            if not math.isfinite(outcome.loss):
                raise ArithmeticError(f"the validation's {self.search.minimize} is {outcome.loss}")
        except SearchStoppedError:
            return
        except Exception as error:
            if self.ends(error):
                raise
            self._fail(job, error)
        else:
            self._failed = 0
            self.study.report(job, outcome, "finished" if job.budget >= self.largest else "paused")
            self.say(self._line(job, f"{self.search.minimize} {outcome.loss:.4f}"))
        self.on_result()
        self._note_time()
        if self._failed >= self.search.failures:
            raise SearchFailedError(
                f"{counted(self._failed, self.method.noun)} in a row failed, the last one ({self._title(job)}) with: "
                f"{self.study.trials[job.number].error}. Mend the cause and run the same command again: it "
                "goes on with further ones (search.failures sets the limit)"
            )

    def _fail(self, job: TrialJob, error: Exception) -> None:
        self._failed += 1
        text = str(error) or type(error).__name__
        self.study.fail(job, text, error.__dict__.get("trial_seconds", 0.0))
        self.say(self._line(job, f"failed: {text.splitlines()[0]}"))

    def _line(self, job: TrialJob, what: str) -> str:
        best, work = self.study.best, work_left(self.study, self._seconds)
        found = f"; best so far: {self._title(best)}, {best.losses[max(best.losses)]:.4f}" if best else ""
        trained = f", {budget_text(job.budget, self.study.unit)}" if self.largest else ""
        done = f"; {work.done:,} of {work.done + work.left:,} {self.study.unit}" if work and self.largest else ""
        return f"{self._title(job)} of {self.method.total}{trained}: {what}{found}{done}{work or ''}"

    def _title(self, trial: TrialJob | StudyTrial) -> str:
        return f"{self.method.noun} {trial.number}"


def spent_budget(trials: Sequence[StudyTrial], restarts: bool, running: bool = True) -> int:
    """What trials have trained, in epochs or what else budgets count.

    Args:
        trials: The trials.
        restarts: Whether every rung trained from the start.
        running: Whether those count, too, that the running ones will have trained.
    """
    spent = 0
    for trial in trials:
        budget = trial.budget if running and trial.state == "running" else 0
        spent += sum(trial.losses) + budget if restarts else max(trial.trained, budget)
    return spent


class WorkLeft(NamedTuple):
    """What a search has done, and what it still has to do."""

    done: int
    """What its trials have trained; of a search that trains nothing, the trials that have ended."""
    left: int
    """Likewise what is to come, at most as much as the limits leave."""
    seconds: float | None
    """About how long these take, at the rate so far, and at most what `search.hours` leaves; None before anything is
    done."""

    def __str__(self) -> str:
        """How long, for the end of a line; empty if that is unknown, or nothing is left."""
        return f"; about {clock(self.seconds)} left" if self.left and self.seconds is not None else ""


def work_left(study: Study, seconds: float | None = None) -> WorkLeft | None:
    """What a search still has to do; None if its last run did not say how much it does in all.

    Args:
        study: The study.
        seconds: How long it has been searched in, if that is longer than the study knows.
    """
    if "work" not in study.about:
        return None
    seconds = study.seconds if seconds is None else seconds
    failed = [trial for trial in study.trials if trial.state == "failed"]
    if study.trains:
        restarts, limit = bool(study.about.get("restarts")), study.about.get("total_budget")
        done = spent_budget(study.trials, restarts, running=False)
        never = sum(trial.budget - (0 if restarts else trial.trained) for trial in failed)
        left = max(0, study.about["work"] - done - never)
        left = min(left, max(0, limit - done)) if limit else left
    else:
        done = len(failed) + sum(trial.state == "finished" for trial in study.trials)
        left = max(0, study.about["trials"] - done)
    if not done:
        return WorkLeft(done, left, None)
    longer = seconds / done * left
    if hours := study.about.get("hours"):
        longer = min(longer, max(0.0, hours * 3600 - seconds))
    return WorkLeft(done, left, longer)
