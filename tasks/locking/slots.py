"""Mutual exclusion of runs that make the same output or train in the same pool.

Processes of one machine use a file lock, which the system frees when its owner dies. Within flows, a lease at the
Prefect server is required as well (see `tasks.locking.leases`), which excludes other machines. Without a Prefect server
(`starling run --no-prefect`) there is only the file lock.
"""

import hashlib
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.locks import LockTimeoutError, any_file_lock
from tasks.config.home import home
from tasks.dataset.policies import SlotsConfig
from tasks.failures import passes
from tasks.locking.lock_owner import LockOwner

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from tasks.config.pipeline import PipelineConfig
    from tasks.locking.leases import LockLease

REFUSE_S = 5.0
"""Seconds that a run waits with `collision: refuse`, since a run that only checks for work holds a lock briefly."""
OUTAGE_S = 300.0
"""Seconds that a run waits for an unreachable Prefect server when it takes a lease."""
NOTICE_S = 60.0
"""Seconds after which a waiting run says again for whom it waits."""
_POLL_S = 2.0
Say = Callable[[str], None]
_log = logging.getLogger(__name__)


class SlotTakenError(RuntimeError):
    """Another run makes the same output or trains in the same pool."""


def run_log() -> Any:
    """Logger of the current flow or task run, or else of this module."""
    if _flow_api():
        from prefect.exceptions import MissingContextError
        from prefect.logging import get_run_logger

        try:
            return get_run_logger()
        except MissingContextError:
            pass
    return _log


def _flow_api() -> str:
    """URL of the current flow's Prefect API; empty outside of flows."""
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.settings import PREFECT_API_URL

    inside = FlowRunContext.get() is not None or TaskRunContext.get() is not None
    return (PREFECT_API_URL.value() or "") if inside else ""


def patience_s(config: SlotsConfig) -> float:
    """Seconds that a run waits for another run."""
    return REFUSE_S if config.collision == "refuse" else config.wait_hours * 3600


def lock_name(*parts: str) -> str:
    """Name of a lock, valid as the name of a Prefect variable; the same on every machine."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(("lock", *parts)).lower()).strip("-")[:200]


def output_lock_name(url: str) -> str:
    """Name of the lock of a stage's output: stage, key, and a digest of the URL."""
    stage, key = url.rstrip("/").rsplit("/", 2)[-2:]
    return lock_name(stage, key, hashlib.sha256(url.encode()).hexdigest()[:8])


@dataclass
class Waits:
    """How long a block has waited for locks."""

    seconds: float = 0.0


_counting: ContextVar[Waits | None] = ContextVar("counting", default=None)


@contextmanager
def waits_counted() -> Iterator[Waits]:
    """Count how long the block waits for locks of this machine and for those between machines."""
    waits = Waits()
    before = _counting.set(waits)
    try:
        yield waits
    finally:
        _counting.reset(before)


@contextmanager
def _counted(notice: "WaitNotice") -> Iterator[None]:
    """Count the time of the block as waiting if it has waited for others: a busy server takes its time, too."""
    began = time.monotonic()
    try:
        yield
    finally:
        if (waits := _counting.get()) is not None and notice.others:
            waits.seconds += time.monotonic() - began


@contextmanager
def machine_lock(
    paths: list[Path], what: str, config: SlotsConfig, holder: LockOwner, say: Say | None = None
) -> Iterator[None]:
    """Hold one of several locks of this machine.

    Args:
        paths: The lock files.
        what: What the locks protect, for messages.
        config: Whether and how long to wait.
        holder: The run that requests the lock.
        say: Tells for whom the run waits; by default the run's log.

    Raises:
        SlotTakenError: If others hold all of them for too long; the message names the owners.
    """
    notice = WaitNotice(what, say)
    with ExitStack() as stack:
        try:
            with _counted(notice):
                stack.enter_context(any_file_lock(paths, patience_s(config), holder=str(holder), on_wait=notice.wait))
        except LockTimeoutError as error:
            raise SlotTakenError(taken_text(what, notice.others)) from error
        yield


class WaitNotice:
    """Says for whom a run waits: at once, when that changes, and every minute.

    Args:
        what: What the run waits for.
        say: Receives the text; by default the run's log.
    """

    def __init__(self, what: str, say: Say | None = None) -> None:
        self.what, self.others = what, ""
        self._say = say or (lambda text: run_log().info("%s", text))
        self._since = self._said = time.monotonic()

    def wait(self, others: str) -> None:
        """Say who holds the lock, unless that was said less than a minute ago."""
        now = time.monotonic()
        if others != self.others or now - self._said >= NOTICE_S:
            minutes = int((now - self._since) / 60)
            waited = f" (for {minutes} min so far)" if minutes else ""
            self._say(f"{self.what}: waiting for {others}{waited}")
            self._said = now
        self.others = others


def taken_text(what: str, others: str) -> str:
    """The error message of a run that does not get a lock."""
    return (
        f"{what}: held by {others}. Wait until that has ended (slots.collision: wait does so), or cancel it; a lock "
        "whose owner has died becomes free within two minutes"
    )


@contextmanager
def shared_lock(
    names: list[str], what: str, config: SlotsConfig, holder: LockOwner, say: Say | None = None
) -> Iterator["LockLease | None"]:
    """Hold one of several locks between all machines of a Prefect server; outside of flows, do nothing.

    Args:
        names: Names of the locks, see `lock_name`.
        what: What the locks protect, for messages.
        config: Whether and how long to wait.
        holder: The run that requests the lock.
        say: Tells for whom the run waits; by default the run's log.

    Yields:
        The lease; None outside of flows.

    Raises:
        SlotTakenError: If others hold all of them for too long; the message names the owners.
    """
    if not _flow_api():
        yield None
        return
    notice = WaitNotice(what, say)
    with _counted(notice):
        lease = _acquire(names, notice, patience_s(config), holder)
    try:
        yield lease
    finally:
        lease.give_back()


def _acquire(names: list[str], notice: WaitNotice, patience: float, holder: LockOwner) -> "LockLease":
    """Wait for one of several leases."""
    from tasks.locking.leases import LeaseTable, LockLease, impatient_client

    deadline = time.monotonic() + patience
    with impatient_client() as client:
        table = LeaseTable(client)
        while True:
            others = []
            for name in names:
                taken = _patiently(lambda name=name: table.take(name, holder))  # type: ignore[misc]
                if isinstance(taken, str):
                    return LockLease(name, taken, holder, run_log())
                others.append(str(taken))
            if time.monotonic() > deadline:
                raise SlotTakenError(taken_text(notice.what, " and ".join(others)))
            notice.wait(" and ".join(others))
            time.sleep(_POLL_S * random.uniform(0.5, 1.5))


def _patiently(action: Callable[[], Any]) -> Any:
    """Send a request to the Prefect server, and retry for a while if it is unreachable."""
    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return action()
        except Exception as error:
            if not passes(error) or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))


@contextmanager
def training_slot(config: "PipelineConfig", holder: LockOwner, say: Say | None = None) -> Iterator[None]:
    """Hold one of the training slots of a pool of GPUs.

    Args:
        config: The configuration.
        holder: The run that requests the lock.
        say: Tells for whom the run waits; by default the run's log.

    Raises:
        SlotTakenError: If others hold all slots for too long; the message names them.
    """
    slots, launch = config.slots, config.train.launch
    if not slots.trainings:
        yield
        return
    pool = slots.pool or (launch.pool if launch.kind == "prefect" else socket.gethostname())
    names = [lock_name("training", pool, str(number)) for number in range(1, slots.trainings + 1)]
    what = f"training in the pool {pool}"
    paths = [home() / "locks" / f"{name}.lock" for name in names]
    with machine_lock(paths, what, slots, holder, say), shared_lock(names, what, slots, holder, say):
        yield


@contextmanager
def kept_lease(
    name: str, holder: LockOwner, on_beat: "Callable[[SyncPrefectClient], None] | None" = None
) -> Iterator[LockOwner | None]:
    """Hold a lease if it is free, without waiting.

    Args:
        name: Name of the lease, see `lock_name`.
        holder: The run that requests the lock.
        on_beat: Called after each renewal.

    Yields:
        The current owner if it is not free, else None.
    """
    from tasks.locking.leases import LeaseTable, LockLease, impatient_client

    with impatient_client() as client:
        taken = _patiently(lambda: LeaseTable(client).take(name, holder))
    if isinstance(taken, LockOwner):
        yield taken
        return
    lease = LockLease(name, taken, holder, run_log(), on_beat)
    try:
        yield None
    finally:
        lease.give_back()
