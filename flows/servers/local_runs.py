"""Shutdown of the flow runs of this machine's workers: they are cancelled and terminated before the workers.

A worker that terminates kills its flows at once: they could not write a last checkpoint or report their state, and
their runs would stay Running. So the flows are stopped first, while the server is running.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from flows.servers.services import Service
from training.processes.children import children

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_RUN = b"PREFECT__FLOW_RUN_ID="
_POLL_S = 0.2
_MESSAGE = "stopped with starling up"


def end_runs(workers: list[Service], patience_s: float) -> None:
    """Cancel the flow runs of workers and wait for their processes to end; those that take too long are killed.

    Args:
        workers: The workers; they keep running.
        patience_s: Time limit for the flows.
    """
    deadline = time.monotonic() + patience_s
    runs_by_pid: dict[int, UUID | None] = {}
    while flows := _flows_of(workers):
        # a worker may start another one meanwhile
        new = {pid: _run_of(pid) for pid in flows if pid not in runs_by_pid}
        runs_by_pid |= new
        if runs := [run for run in new.values() if run]:
            _cancelling(runs)
        for pid in new:
            _send(pid, signal.SIGTERM)  # the flows end their own children
        if time.monotonic() > deadline:
            for pid in flows:
                for below in [*children(pid, all_generations=True), pid]:
                    _send(below, signal.SIGKILL)
            break
        time.sleep(_POLL_S)
    if runs := [run for run in runs_by_pid.values() if run]:
        _cancelled(runs)


def _flows_of(workers: list[Service]) -> list[int]:
    return [pid for worker in workers for pid in children(worker.process.pid)]


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _run_of(pid: int) -> UUID | None:
    """Id of the flow run that a worker's child executes; None if it executes none."""
    with suppress(OSError, ValueError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(_RUN):
                return UUID(variable.removeprefix(_RUN).decode())
    return None


def _cancelling(runs: list[UUID]) -> None:
    """Set the runs to Cancelling, so that their flows know the reason when they end."""
    from prefect.states import Cancelling

    from tasks.locking.leases import impatient_client

    with suppress(Exception), impatient_client() as client:  # the flows end without a server, too
        for run in runs:
            client.set_flow_run_state(run, Cancelling(message=_MESSAGE))


def _cancelled(runs: list[UUID]) -> None:
    """Set runs and their subflow runs to Cancelled, unless their processes have reported a final state."""
    from tasks.locking.leases import impatient_client

    with suppress(Exception), impatient_client() as client:
        for run in runs:
            _cancel(client, run)


def _cancel(client: "SyncPrefectClient", run: UUID) -> None:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
    from prefect.states import Cancelled

    within = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    for part in client.read_flow_runs(flow_run_filter=within):
        _cancel(client, part.id)
    state = client.read_flow_run(run).state
    if state is None or not state.is_final():
        client.set_flow_run_state(
            run, Cancelled(message=f"{_MESSAGE}; not all of its processes have ended in time"), force=True
        )
