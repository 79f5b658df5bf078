"""Servers and workers that are started again when they die, and ended in order."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flows import services
from flows.ending import END_S
from flows.services import START_S, STARTS, Service, ServiceError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass
class _Kept:
    service: Service
    start: Callable[[], Service]
    died: list[float] = field(default_factory=list)
    """When it died, lately."""
    due: float | None = None
    """When it is to be started again."""

    def answers(self) -> bool:
        """Whether it does; one that has died would only let the question wait where its socket is kept open."""
        return self.due is None and services.answers(self.service.health)


class Supervisor:
    """Looks after processes that ought to run until they are told to end.

    Args:
        restarts: How often one may die within the window before all is given up; 0 gives up at once.
        window_s: Deaths longer ago are forgotten.
        say: Told what happens.
        clock: Seconds, from any beginning.
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
        """Start one and keep it; the last one added is the first one ended."""
        service = start()
        self._kept.append(_Kept(service, start))
        return service

    @property
    def services(self) -> list[Service]:
        """Those that are kept, in the order of their start."""
        return [kept.service for kept in self._kept]

    def wait(self, patience_s: float = START_S, stop: threading.Event | None = None) -> None:
        """Wait until all servers answer; those that die meanwhile are started again, a few times.

        Args:
            patience_s: How long, for all together.
            stop: Ends the waiting when it is set.

        Raises:
            ServiceError: If one dies too often, or does not answer in time; the message ends with its log.
        """
        deadline = self._clock() + patience_s
        while not (stop is not None and stop.is_set()):
            late = [one.service for one in self._kept if one.service.health and not one.answers()]
            if not late:
                return
            if self._clock() > deadline:
                raise ServiceError(
                    f"{late[0].name} did not answer at {late[0].health} in {patience_s:.0f} s: {late[0].log_end()}"
                )
            self.check(STARTS - 1)
            time.sleep(0.25)

    def check(self, restarts: int | None = None) -> None:
        """Start again what has died; call it about every second.

        Args:
            restarts: How often one may die; by default as the supervisor was told.

        Raises:
            ServiceError: One dies too often.
        """
        now, restarts = self._clock(), self._restarts if restarts is None else restarts
        for kept in self._kept:
            if kept.due is not None:
                if now >= kept.due:
                    kept.service, kept.due = kept.start(), None
            elif kept.service.process.poll() is not None:
                self._died(kept, now, restarts)

    def reap(self) -> None:
        """Let other children that have ended go, in a process that adopts and waits for none: a table fills up."""
        for pid in services.children() - {service.process.pid for service in self.services}:
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
        self._say(f"{service.name} ended with status {status}; starting it again in {pause:.0f} s ({service.log})")

    def stop(self, first: int = 0, patience_s: float = END_S) -> None:
        """End those from a position on: all are asked at once, so that together they take no longer than one.

        Args:
            first: Position of the first; what others still need is ended later.
            patience_s: How long they may take.
        """
        ending = [self._kept.pop().service for _ in self._kept[first:]]
        for service in ending:
            service.ask_to_end()
        deadline = time.monotonic() + patience_s
        for service in ending:
            service.see_end(max(0.0, deadline - time.monotonic()))
