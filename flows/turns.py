"""A deployment's turn: one run at a time, and a schedule whose runs take longer than its interval does not pile up.

A scheduled run that begins while another run of its deployment is going ends at once as `Skipped`; one that falls due
meanwhile, and that no worker has taken yet, is skipped by the run that is going. A run that a person asks for is never
skipped: its stages wait for each other (see `tasks.slots`).
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

from flows.ending import bounded_end, interrupted, left_s, outlive_reader
from tasks.holder import Holder
from tasks.leases import impatient_client
from tasks.logs import secrets_kept
from tasks.slots import kept_lease, lock_name, run_log

P = ParamSpec("P")
_PAGE = 100
_INTERRUPTED = "interrupted in its terminal"
_LOOK_S = 3.0
"""Between two looks whether the run of a terminal has been cancelled."""
_LAST_S = 3.0
"""Before an interrupted run is ended hard: time to say what has become of it."""
_open: list[FlowRun] = []
"""The flow runs that this process is in, from the outermost on."""


def in_turn(flow: Callable[P, Any]) -> Callable[P, Any]:
    """For the function of a flow: it takes its deployment's turn, and ends soon when it is told to."""

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
    """Let a run that is being cancelled, or interrupted in its terminal, be Cancelled once what it started has ended.

    A worker says so too, but only after it has loaded the flow once more in another process, and not if it is told
    to end meanwhile.
    """
    _open.append(run)
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt) as error:
        with suppress(Exception), impatient_client() as client:
            state = client.read_flow_run(_open[0].id).state  # a run within another is cancelled with it
            if interrupted() or (state is not None and state.is_cancelling()):
                how = _INTERRUPTED if interrupted() else "cancelled"
                _set_cancelled(client, run, f"{how}; all its processes have ended")
        if isinstance(error, KeyboardInterrupt):  # which the engine drops where the state is final
            raise TerminationSignal(signal.SIGINT) from error
        raise
    finally:
        _open.remove(run)


def _set_cancelled(client: SyncPrefectClient, run: FlowRun, message: str) -> None:
    ended: State[Any] = Cancelled(message=message)
    client.set_flow_run_state(run.id, ended, force=True)
    run.state = ended  # the engine would call it crashed otherwise, where no worker has told it why


@contextmanager
def heeding(run: FlowRun) -> Iterator[None]:
    """Let the run of a terminal end when it is cancelled in the UI: Prefect tells workers only, and this has none."""
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
        with suppress(Exception), impatient_client() as client:  # a server that is away cancels nothing
            state = client.read_flow_run(run).state
            if state is not None and state.is_cancelling() and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _cancel_all() -> None:
    """Call the runs of this process cancelled while that can be said: it will not end by itself in time."""
    with suppress(Exception), impatient_client() as client:
        for run in list(_open):
            _set_cancelled(client, run, f"{_INTERRUPTED}; its processes are killed")


def _as_deployed(run: FlowRun, flow: Callable[[], Any]) -> Any:
    """Run a flow unless it is a schedule's, and another run of its deployment is going."""
    if run.deployment_id is None:
        return flow()
    holder = Holder.here(run.name, str(current.ui_url or ""))
    with kept_lease(lock_name("deployment", str(run.deployment_id)), holder, _skipper(run)) as other:
        if other is not None and _by_schedule(run):
            run_log().info("skipped: this deployment is run by %s", other)
            return _skipped(other)
        return flow()


def _by_schedule(run: FlowRun) -> bool:
    """Whether a schedule started a run, and no user has asked for it since (a retry is a user's wish)."""
    return run.auto_scheduled and run.run_count <= 1


def _skipped(other: object) -> State[Any]:
    return Cancelled(name="Skipped", message=f"this deployment is run by {other}; what is new since is the next run's")


def _skipper(mine: FlowRun) -> Callable[[SyncPrefectClient], None]:
    """Skips the runs of a deployment that fall due while one of it is going."""

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
