"""Leases: locks between machines, stored in the Prefect server's database; they expire when their owner dies.

A lease is a Prefect variable: its name is the lock, its value the owner, so the UI's page of variables lists all locks.
The server rejects a second variable of the same name, which makes taking a lease atomic; a stale one is deleted by its
id, which only one of several takers can do. Staleness is determined by the server's clock alone. Prefect's own
concurrency limits do not fit: by default the server keeps their leases in memory, so a killed server leaves their slots
taken for good.
"""

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.failures import passes
from tasks.locking.lock_owner import LockOwner

LEASE_S = 100.0
"""Seconds after which a lease that was not renewed is stale."""
BEAT_S = 20.0
"""Seconds between renewals."""
_REQUEST_S = 4.0
_WAITS_S = (0.3, 1.0)
"""Pauses between attempts: a busy SQLite database answers 503 for a moment."""
_TAG = "starling-lock"
_log = logging.getLogger(__name__)


@contextmanager
def impatient_client() -> Iterator[SyncPrefectClient]:
    """A client whose requests end within seconds, without Prefect's retries."""
    # for the whole block: Prefect rebuilds all its settings, which takes longer than a request
    impatience: Any = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
    with impatience, get_client(httpx_settings={"timeout": _REQUEST_S}, sync_client=True) as client:
        yield client


class LeaseTable:
    """Leases at the configured Prefect server.

    Args:
        client: A client that only this thread uses, see `impatient_client`.
    """

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client

    def take(self, name: str, holder: LockOwner) -> str | LockOwner:
        """Take a lease.

        Returns:
            The lease's id, or its current owner.

        Raises:
            httpx.HTTPError: If the server is unreachable or refuses.
        """
        body = {"name": name, "value": asdict(holder), "tags": [_TAG]}
        other = LockOwner("another run")
        for _ in range(3):  # another run may take or free it in between
            reply = self._ask("POST", "/variables/", json=body)
            if reply is not None and reply.status_code != httpx.codes.CONFLICT:
                return str(reply.json()["id"])
            lease = self._ask("GET", f"/variables/name/{name}")
            if lease is None:
                continue
            other = LockOwner.read(lease.json()["value"])
            if other.token == holder.token:  # the answer to an earlier request was lost
                return str(lease.json()["id"])
            if not (other.gone() or _age_s(lease) > LEASE_S):
                return other
            self._ask("DELETE", f"/variables/{lease.json()['id']}")
        return other

    def renew(self, lease: str, holder: LockOwner) -> bool:
        """Renew a lease; False if it no longer exists."""
        return self._ask("PATCH", f"/variables/{lease}", json={"value": asdict(holder)}) is not None

    def drop(self, lease: str) -> None:
        """Free a lease; if another run has taken it meanwhile, that lease has another id and stays."""
        self._ask("DELETE", f"/variables/{lease}")

    def _ask(self, method: Any, path: Any, **content: Any) -> httpx.Response | None:
        """Send a request, with a few retries; None if the server answers 404."""
        for wait_s in _WAITS_S:
            try:
                return self._ask_once(method, path, content)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if not passes(error):
                    raise
            time.sleep(wait_s * random.uniform(0.5, 1.5))
        return self._ask_once(method, path, content)

    def _ask_once(self, method: Any, path: Any, content: dict[str, Any]) -> httpx.Response | None:
        try:
            return self._client.request(method, path, **content)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.CONFLICT:
                return error.response
            if error.response.status_code == httpx.codes.NOT_FOUND:
                return None
            raise


def _age_s(reply: httpx.Response) -> float:
    """Seconds since a variable was updated, by the server's clock."""
    now = parsedate_to_datetime(reply.headers["Date"])
    updated = datetime.fromisoformat(reply.json()["updated"].replace("Z", "+00:00"))
    return (now - updated).total_seconds()


_held: "weakref.WeakSet[LockLease]" = weakref.WeakSet()
"""The leases of this process that have not been given back."""


def give_back_all(patience_s: float) -> None:
    """Free the leases of this process, which is about to be killed: other runs need not wait until they expire.

    Args:
        patience_s: Seconds in which the server has to answer; leases that are left expire.
    """
    deadline = time.monotonic() + patience_s
    held = list(_held)
    for lease in held:
        lease.end()
    for lease in held:
        lease.join(max(0.0, deadline - time.monotonic()))


class LockLease:
    """A lease that a thread renews until it is given back.

    If the server is unreachable, the lease is renewed when it answers again. If another run has taken it in the
    meantime, the owner continues its work, and takes the lease again as soon as it is free.

    Args:
        name: Name of the lease.
        lease: Its id.
        holder: Its owner.
        log: Logger for warnings.
        on_beat: Called after each renewal with the thread's client; its exceptions are logged.
        beat_s: Seconds between renewals.
    """

    def __init__(
        self,
        name: str,
        lease: str,
        holder: LockOwner,
        log: Any = _log,
        on_beat: Callable[[SyncPrefectClient], None] | None = None,
        beat_s: float | None = None,
    ) -> None:
        self.name, self.holder = name, holder
        self.lost_to: LockOwner | None = None
        """The current owner, if another run has taken the lease."""
        self._lease, self._log, self._on_beat, self._beat_s = lease, log, on_beat, beat_s or BEAT_S
        self._away = False
        self._end = threading.Event()
        # with this thread's context, which has the server and the flow run of the log
        self._thread = threading.Thread(target=copy_context().run, args=(self._keep,), name=name, daemon=True)
        self._thread.start()
        _held.add(self)

    def give_back(self) -> None:
        """Stop renewing the lease, and free it; if the server is unreachable, it expires."""
        self.end()
        self.join(2 * _REQUEST_S)

    def end(self) -> None:
        """Have the lease freed in the background; `join` waits for it."""
        _held.discard(self)
        self._end.set()

    def join(self, patience_s: float) -> None:
        """Wait until the lease is free, for some seconds at most."""
        self._thread.join(patience_s)

    def _keep(self) -> None:
        with impatient_client() as client:
            table = LeaseTable(client)
            while not self._end.wait(self._beat_s):
                self._guarded(lambda: self._beat(table, client))
            if self._lease:
                self._guarded(lambda: table.drop(self._lease))

    def _guarded(self, action: Callable[[], None]) -> None:
        """Send requests; errors are logged once per outage, and not raised."""
        try:
            action()
        except Exception as error:  # the work continues after any error
            if not self._away:
                self._log.warning(
                    "the lock %s cannot be renewed (%s: %s): the work continues", self.name, type(error).__name__, error
                )
            self._away = True
            return
        if self._away:
            self._log.info("the Prefect server answers again")
        self._away = False

    def _beat(self, table: LeaseTable, client: SyncPrefectClient) -> None:
        if not (self._lease and table.renew(self._lease, self.holder)):
            self._retake(table)
        if self._on_beat is not None:
            self._on_beat(client)

    def _retake(self, table: LeaseTable) -> None:
        self._lease = ""
        taken = table.take(self.name, self.holder)
        if isinstance(taken, str):
            self._lease, self.lost_to = taken, None
            self._log.warning("the lock %s had expired and was taken again", self.name)
        elif self.lost_to is None or taken.token != self.lost_to.token:
            self.lost_to = taken
            self._log.warning("the lock %s had expired and is held by %s: the work continues", self.name, taken)
