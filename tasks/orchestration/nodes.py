"""Nodes as Prefect runs: the train stage starts one run of the `node` deployment for each node, and watches them.

A crashed run is replaced by a new run for the same node, which rejoins the ring while the others keep training.
Parameters contain the coordinator's address and the path of the key file, never the key. If Prefect is unreachable,
nodes keep training; their runs are updated when it answers again.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID, uuid4

from tasks.stages.base import Run, StageError
from training.job import TrainJob
from training.processes.sockets import own_address

QUEUE = "nodes"
"""Work queue of node runs: its workers take nothing else, so waiting pipelines cannot block nodes."""
_EVERY_S = 2.0
_END_S = 8.0
_LOOK_S = 0.25
_CANCEL_S = 5.0
_MISSING_S = 30.0
_EVERYWHERE = ("0.0.0.0", "[::]", "*")  # noqa: S104 - compared, not bound
_ELSEWHERE = "192.0.2.1:9"  # an unused address (RFC 5737), behind the default route
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_log = logging.getLogger(__name__)


class NodeApi(Protocol):
    """Requests to Prefect about the node runs of one training."""

    def start(self, rank: int, parameters: dict[str, Any], idempotency_key: str) -> UUID:
        """Start a run of one node."""

    def states(self, runs: list[UUID]) -> dict[UUID, tuple[str, str]]:
        """State type and message of runs."""

    def left(self) -> dict[UUID, dict[str, Any]]:
        """Parameters of runs of this training that an earlier process started and that have not ended."""

    def cancel(self, run: UUID) -> None:
        """Cancel a run."""


@dataclass
class _Slot:
    """One machine of a node; most nodes have one machine."""

    run: UUID | None = None
    attempts: int = 0
    state: str = ""
    message: str = ""
    joined: bool = False
    missing_since: float | None = None

    @property
    def ended(self) -> bool:
        return self.run is None or self.state in _ENDED


class NodeRuns:
    """The node runs of one training.

    Args:
        job: The training; the coordinator writes `coordinator.json` to its folder.
        api: Requests to Prefect.
        clock: Monotonic clock, in seconds.
        credentials: Name of the Prefect block with the object store's credentials for node runs, if any.
    """

    def __init__(
        self, job: TrainJob, api: NodeApi, clock: Callable[[], float] = time.monotonic, credentials: str = ""
    ) -> None:
        self.alive: set[int] | None = None
        """Nodes in the ring according to the journal; None before it lists any."""
        self._job, self._api, self._clock = job, api, clock
        self._credentials = {"credentials": credentials} if credentials else {}
        self._folder = job.journal.parent
        self._session = uuid4().hex[:8]
        self._slots = {rank: _Slot() for rank in range(job.train.places)}
        self._began = False
        self._last = -_EVERY_S
        self._patience_s = _MISSING_S + job.train.membership.dead_after_s

    @property
    def key_file(self) -> str:
        """Path of the ring's key on the nodes; empty without encryption."""
        cfg = self._job.train
        return cfg.launch.key_file or (str(self._folder / "ring.key") if cfg.exchange.encrypt else "")

    def poll(self) -> None:
        """Start, replace and update runs; call it often, it acts every two seconds.

        Raises:
            StageError: If every node's runs have failed too often.
        """
        now = self._clock()
        address = self._store()
        if now - self._last < _EVERY_S or not address:
            return
        self._last = now
        try:
            self._look_after(address, now)
        except StageError:
            raise
        except Exception as error:  # nodes keep training without Prefect
            _log.warning("Prefect does not answer about node runs, retrying: %s", error)

    def _store(self) -> str:
        """The coordinator's address for nodes; empty while there is none."""
        try:
            note = json.loads((self._folder / "coordinator.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        address = str(note["address"])
        if self._job.train.launch.listen.rpartition(":")[0] not in _EVERYWHERE:
            return address
        return f"{own_address(_ELSEWHERE)}:{address.rpartition(':')[2]}"

    def _look_after(self, address: str, now: float) -> None:
        if not self._began:
            self._take_over(address)
            self._began = True
        self._update()
        for rank, slot in self._slots.items():
            self._watch_ring(rank, slot, now)
            if slot.run is None or slot.state in ("FAILED", "CRASHED"):
                self._start(rank, slot, address)
        if all(slot.state in ("FAILED", "CRASHED") for slot in self._slots.values()):
            reasons = "; ".join(f"node {rank}: {slot.message}" for rank, slot in list(self._slots.items())[:3])
            raise StageError(
                f"every node run failed, {self._job.train.membership.max_restarts} replacements included: {reasons}"
            )

    def _take_over(self, address: str) -> None:
        """Keep runs of an earlier process that can reach this coordinator, and cancel the others."""
        for run, parameters in self._api.left().items():
            rank = parameters.get("node_rank")
            slot = self._slots.get(rank) if isinstance(rank, int) else None
            mine = bool(self._job.train.launch.key_file) and parameters.get("coordinator") == address
            if slot is not None and slot.run is None and mine:
                slot.run, slot.attempts, slot.state = run, 1, "RUNNING"
            else:
                self._api.cancel(run)

    def _update(self) -> None:
        states = self._api.states([slot.run for slot in self._slots.values() if slot.run is not None])
        for slot in self._slots.values():
            if slot.run in states:
                slot.state, slot.message = states[slot.run]

    def _watch_ring(self, rank: int, slot: _Slot, now: float) -> None:
        """Give up a run whose node left the ring and stays away: a dead machine cannot report it."""
        if self.alive is None or slot.ended:
            return
        if rank // self._job.train.machines_per_node in self.alive:
            slot.joined, slot.missing_since = True, None
        elif slot.joined and slot.missing_since is None:
            slot.missing_since = now
        elif slot.run is not None and now - (slot.missing_since or now) > self._patience_s:
            self._api.cancel(slot.run)
            slot.state, slot.message = "CRASHED", "it left the ring and did not rejoin"

    def _start(self, rank: int, slot: _Slot, address: str) -> None:
        restarts = self._job.train.membership.max_restarts
        if slot.attempts > restarts:
            return
        if slot.attempts:
            _log.warning("node %d: %s; replacing it (%d of %d)", rank, slot.message, slot.attempts, restarts)
        parameters = {"node_rank": rank, "coordinator": address, "key_file": self.key_file, "max_restarts": restarts}
        parameters |= self._credentials
        # repeating the request after a lost answer returns the same run
        key = f"{self._job.run}-{self._session}-{rank}-{slot.attempts}"
        run = self._api.start(rank, parameters, key)
        self._slots[rank] = _Slot(run, slot.attempts + 1, "SCHEDULED")

    def close(self, patience_s: float) -> None:
        """Wait for the runs to end, and cancel those that do not.

        Args:
            patience_s: Time for them to end by themselves, as they do after training.
        """
        try:
            if not self._wait(patience_s):
                for slot in self._slots.values():
                    if slot.run is not None and not slot.ended:
                        self._api.cancel(slot.run)
                if not self._wait(_CANCEL_S):
                    _log.warning("some node runs are still ending")
        except Exception as error:  # they end by themselves some time after the coordinator
            _log.warning("node runs could not be cancelled: %s", error)

    def _wait(self, patience_s: float) -> bool:
        deadline = self._clock() + patience_s
        while True:
            self._update()
            if all(slot.ended for slot in self._slots.values()):
                return True
            if self._clock() >= deadline:
                return False
            time.sleep(_LOOK_S)


@contextmanager
def node_runs(run: Run, job: TrainJob) -> Iterator[NodeRuns]:
    """Provide the node runs of a training; they are ended with the block."""
    from tasks.orchestration.nodes_api import PrefectApi

    with PrefectApi(run.config.name, job.run) as api:
        runs = NodeRuns(job, api, credentials=run.config.storage.credentials)
        try:
            yield runs
        except BaseException:
            runs.close(0.0)
            raise
        runs.close(_END_S)
