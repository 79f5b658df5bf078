"""Requests of the train stage to Prefect about node runs, with time limits."""

from contextlib import ExitStack
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling

from tasks.stages.base import StageError

_REQUEST_S = 5.0
_PAGE = 100
_LIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]


class PrefectApi:
    """Node runs of one training at the configured Prefect server.

    Args:
        name: The configuration's name; the deployment is `node/<name>`.
        training: Identity of the training.
    """

    def __init__(self, name: str, training: str) -> None:
        self._deployment = f"node/{name}"
        self._tags = ["starling-node", f"training-{training}"]
        self._stack = ExitStack()

    def __enter__(self) -> "PrefectApi":
        self._client = self._stack.enter_context(_client())
        self._id = self._client.read_deployment_by_name(self._deployment).id
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, rank: int, parameters: dict[str, Any], idempotency_key: str) -> UUID:
        """Start a run of one node."""
        with _impatient():
            return self._client.create_flow_run_from_deployment(
                self._id,
                name=f"node {rank} of {self._tags[1]}",
                parameters=parameters,
                idempotency_key=idempotency_key,
                tags=self._tags,
            ).id

    def states(self, runs: list[UUID]) -> dict[UUID, tuple[str, str]]:
        """State type and message of runs."""
        states: dict[UUID, tuple[str, str]] = {}
        for start in range(0, len(runs), _PAGE):
            chosen = FlowRunFilter(id=FlowRunFilterId(any_=runs[start : start + _PAGE]))
            with _impatient():
                for run in self._client.read_flow_runs(flow_run_filter=chosen, limit=_PAGE):
                    if run.state is not None:
                        states[run.id] = (run.state.type.value, run.state.message or run.state.name or "")
        return states

    def left(self) -> dict[UUID, dict[str, Any]]:
        """Parameters of runs of this training that have not ended."""
        chosen = FlowRunFilter(
            tags=FlowRunFilterTags(all_=self._tags),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LIVE)),
        )
        with _impatient():
            return {run.id: run.parameters for run in self._client.read_flow_runs(flow_run_filter=chosen)}

    def cancel(self, run: UUID) -> None:
        """Cancel a run: its worker ends the process."""
        with _impatient():
            self._client.set_flow_run_state(run, Cancelling(message="the training has ended"))


def _client() -> SyncPrefectClient:
    return get_client(httpx_settings={"timeout": _REQUEST_S}, sync_client=True)


def _impatient() -> Any:
    """Settings that limit retries; by default, requests are repeated for a minute if the server is unreachable."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1})


def check_pool(pool: str, name: str) -> None:
    """Check that nodes have a Prefect server, a work pool and the node deployment.

    Args:
        pool: Name of the pool.
        name: The configuration's name.

    Raises:
        StageError: If one of them is missing.
    """
    if not PREFECT_API_URL.value():
        raise StageError(
            "train.launch.kind is prefect, but no Prefect server is configured: run this as a flow (without "
            "--no-prefect) with `starling up` or PREFECT_API_URL, or use train.launch.kind=local"
        )
    with _impatient(), _client() as api:
        try:
            api.read_work_pool(pool)
        except ObjectNotFound as error:
            raise StageError(
                f"train.launch.pool is {pool!r}, but the Prefect server has no such work pool: create it with "
                "`starling deploy --config FILE`, then run `prefect worker start --pool NAME --work-queue nodes` on "
                "every machine"
            ) from error
        try:
            api.read_deployment_by_name(f"node/{name}")
        except ObjectNotFound as error:
            raise StageError(
                f"train.launch.kind is prefect, but there is no deployment node/{name}: create it with `starling "
                "deploy --config FILE`"
            ) from error
