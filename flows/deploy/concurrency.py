"""One scheduled run of a deployment at a time, so that runs longer than their schedule's interval do not pile up.

A scheduled run that starts while another run of its deployment is active ends at once as `Skipped`; scheduled runs that
become due in the meantime and that no worker has taken are skipped by the active run. A run that a user starts is never
skipped: its stages wait for each other (see `tasks.locking.slots`).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import wraps
from typing import Any, ParamSpec
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run as current
from prefect.states import Cancelled

from flows.servers.shutdown import bounded_end, cause, interrupted, left_s, outlive_reader, shutdown_signal
from tasks.locking.leases import impatient_client
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import kept_lease, lock_name, run_log
from tasks.orchestration.logs import secrets_kept

P = ParamSpec("P")
_PAGE = 100
_LOOK_S = 3.0
"""Seconds between two checks whether a terminal's run has been cancelled."""
_LAST_S = 3.0
"""Seconds reserved to report the state of an interrupted run before it is killed."""
_open: list[FlowRun] = []
"""The active flow runs of this process, outermost first."""


def in_turn(flow: Callable[P, Any]) -> Callable[P, Any]:
    """Decorate a flow's function: it skips scheduled runs that overlap, and ends promptly when cancelled."""

    @wraps(flow)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        context = FlowRunContext.get()
        run = context.flow_run if context else None
        with secrets_kept():
            if run is None:
                return flow(*args, **kwargs)
            if run.parent_task_run_id is not None:
                with prompt_end(run):
                    return flow(*args, **kwargs)
            outlive_reader()
            with bounded_end(), prompt_end(run), heeding(run):
                return _as_deployed(run, lambda: flow(*args, **kwargs))

    return wrapped


@contextmanager
def prompt_end(run: FlowRun) -> Iterator[None]:
    """Set a run to Cancelled if it ends because it was cancelled, or interrupted in its terminal.

    A worker does so too, but only after it has loaded the flow again in another process, and not if it is stopped
    before.
    """
    _open.append(run)
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt) as error:
        with suppress(Exception), impatient_client() as client:
            state = client.read_flow_run(_open[0].id).state  # a run within another is cancelled with it
            if interrupted() or (state is not None and state.is_cancelling()):
                how = _stopped_text() if interrupted() else "cancelled"
                _set_cancelled(client, run, f"{how}; all its processes have ended")
        if isinstance(error, KeyboardInterrupt):  # the engine drops it if the state is final
            raise TerminationSignal(signal.SIGINT) from error
        raise
    finally:
        _open.remove(run)


def _set_cancelled(client: SyncPrefectClient, run: FlowRun, message: str) -> None:
    ended: State[Any] = Cancelled(message=message)
    client.set_flow_run_state(run.id, ended, force=True)
    run.state = ended  # otherwise the engine sets it to Crashed if no worker has cancelled it


@contextmanager
def heeding(run: FlowRun) -> Iterator[None]:
    """End a terminal's run when it is cancelled in the UI: Prefect notifies only workers, and this run has none."""
    over = threading.Event()
    if run.deployment_id is None:
        threading.Thread(target=_heed, args=(run.id, over), name="cancellation", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _heed(run: UUID, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        if interrupted():
            if not over.wait(left_s() - _LAST_S):
                _cancel_all()
            return
        with suppress(Exception), impatient_client() as client:  # ignore an unreachable server
            state = client.read_flow_run(run).state
            if state is not None and state.is_cancelling() and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _stopped_text() -> str:
    return f"stopped in its terminal by {cause(shutdown_signal())}"


def _cancel_all() -> None:
    """Set the runs of this process to Cancelled before it is killed, since it does not end in time by itself."""
    with suppress(Exception), impatient_client() as client:
        for run in list(_open):
            _set_cancelled(client, run, f"{_stopped_text()}; not all of its processes have ended in time")


def _as_deployed(run: FlowRun, flow: Callable[[], Any]) -> Any:
    """Run a flow, unless it is a scheduled run and another run of its deployment is active."""
    if run.deployment_id is None:
        return flow()
    holder = LockOwner.here(run.name, str(current.ui_url or ""))
    with kept_lease(lock_name("deployment", str(run.deployment_id)), holder, _skipper(run)) as other:
        if other is not None and _by_schedule(run):
            run_log().info("skipped: this deployment is already running: %s", other)
            return _skipped(other)
        return flow()


def _by_schedule(run: FlowRun) -> bool:
    """Whether a schedule started a run; False for its retries, which a user starts."""
    return run.auto_scheduled and run.run_count <= 1


def _skipped(other: object) -> State[Any]:
    return Cancelled(
        name="Skipped", message=f"this deployment is already running: {other}; the next run handles later changes"
    )


def _skipper(mine: FlowRun) -> Callable[[SyncPrefectClient], None]:
    """Returns a function that skips the scheduled runs that become due while a run of their deployment is active."""

    def skip(client: SyncPrefectClient) -> None:
        due = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(UTC)),
        )
        of_mine = DeploymentFilter(id=DeploymentFilterId(any_=[mine.deployment_id]))
        for run in client.read_flow_runs(flow_run_filter=due, deployment_filter=of_mine, limit=_PAGE):
            if run.auto_scheduled and not run.run_count and run.id != mine.id:
                client.set_flow_run_state(run.id, _skipped(f"run {mine.name}"))

    return skip
