"""Supervision of servers and workers: restarts them when they die, and stops them in order."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flows.servers import services
from flows.servers.services import LOOK_S, START_S, STARTS, Service, ServiceError
from flows.servers.shutdown import END_S
from training.processes.children import children

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_SAY_S = 10.0
"""Seconds between two messages about waiting."""


@dataclass
class _Kept:
    service: Service
    start: Callable[[], Service]
    died: list[float] = field(default_factory=list)
    """Times of its recent deaths."""
    due: float | None = None
    """Time of its next start; None while it runs."""

    def answers(self) -> bool:
        """Whether the service answers; a dead one is not asked, since its open socket would let the request wait."""
        return self.due is None and services.answers(self.service.health)


class Supervisor:
    """Restarts services that die, up to a limit.

    Args:
        restarts: How often a service may die within the window before `check` raises; 0 raises at the first death.
        window_s: Window in seconds; earlier deaths do not count.
        say: Called with messages about deaths, restarts and waiting.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        restarts: int = 0,
        window_s: float = 600.0,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept: list[_Kept] = []
        self._restarts, self._window_s, self._say, self._clock = restarts, window_s, say, clock

    def add(self, start: Callable[[], Service]) -> Service:
        """Start a service and supervise it; services are stopped in reverse order."""
        service = start()
        self._kept.append(_Kept(service, start))
        return service

    @property
    def services(self) -> list[Service]:
        """The supervised services, in the order they were added."""
        return [kept.service for kept in self._kept]

    def wait(self, patience_s: float = START_S, stop: threading.Event | None = None) -> None:
        """Wait until all servers answer; those that die meanwhile are restarted a few times.

        Every ten seconds a message says which are waited for.

        Args:
            patience_s: Time limit for all together.
            stop: Ends the waiting when it is set.

        Raises:
            ServiceError: If one dies too often, or does not answer in time; the message ends with its log.
        """
        began = self._clock()
        deadline, due = began + patience_s, began + _SAY_S
        while not (stop is not None and stop.is_set()):
            late = [one.service for one in self._kept if one.service.health and not one.answers()]
            if not late:
                return
            now = self._clock()
            if now > deadline:
                raise ServiceError(
                    f"{late[0].name} did not answer at {late[0].health} in {patience_s:.0f} s: {late[0].log_end()}"
                )
            if now >= due:
                self._say(f"waiting for {' and '.join(service.name for service in late)} ({now - began:.0f} s)")
                due = now + _SAY_S
            self.check(STARTS - 1)
            time.sleep(LOOK_S)

    def check(self, restarts: int | None = None) -> None:
        """Restart services that have died, after a pause; call it about every second.

        Args:
            restarts: How often a service may die; by default the supervisor's limit.

        Raises:
            ServiceError: If a service dies too often.
        """
        now, restarts = self._clock(), self._restarts if restarts is None else restarts
        for kept in self._kept:
            if kept.due is not None:
                if now >= kept.due:
                    kept.service, kept.due = kept.start(), None
            elif kept.service.process.poll() is not None:
                self._died(kept, now, restarts)

    def reap(self) -> None:
        """Reap other children that have ended, in a process that adopts orphans: zombies fill the process table."""
        for pid in set(children()) - {service.process.pid for service in self.services}:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def _died(self, kept: _Kept, now: float, restarts: int) -> None:
        service = kept.service
        kept.died = [when for when in kept.died if now - when < self._window_s] + [now]
        if len(kept.died) > restarts:
            often = f" {len(kept.died)} times in {self._window_s:.0f} s" if restarts else ""
            raise ServiceError(f"{service.name} ended by itself{often}; its log is {service.log}, {service.log_end()}")
        pause = min(_FIRST_PAUSE_S * 2 ** (len(kept.died) - 1), _LONGEST_PAUSE_S)
        kept.due = now + pause
        status = service.process.returncode
        self._say(f"{service.name} ended with status {status}; restarting it in {pause:.0f} s ({service.log})")

    def stop(self, first: int = 0, patience_s: float = END_S) -> None:
        """Stop the services from a position on, all at the same time.

        Args:
            first: Position of the first service to stop; earlier ones keep running.
            patience_s: Time limit for all together; what still runs then is killed.
        """
        ending = [self._kept.pop().service for _ in self._kept[first:]]
        for service in ending:
            service.ask_to_end()
        deadline = time.monotonic() + patience_s
        for service in ending:
            service.see_end(max(0.0, deadline - time.monotonic()))
