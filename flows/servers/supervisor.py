"""Supervision of servers and workers: restarts them when they die, and stops them in order."""

import os
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from flows.servers import services
from flows.servers.services import LOOK_S, START_S, STARTS, Service, ServiceError
from flows.servers.shutdown import END_S
from training.processes.children import Child, children
from training.processes.supervision import EndedError, LateError, Supervised, await_answers, end_together

_FIRST_PAUSE_S = 1.0


class _Kept(Supervised):
    """A service, and how it is started."""

    def __init__(
        self, start: Callable[[], Service], restarts: int, window_s: float, clock: Callable[[], float]
    ) -> None:
        self._make, self.service = start, start()
        super().__init__(self.service.name, restarts, window_s, _FIRST_PAUSE_S, clock)
        self.process = self.service.process

    @override
    def _launch(self) -> Child:
        self.service = self._make()
        return self.service.process

    @override
    def answers(self) -> bool:
        return not self.service.health or services.answers(self.service.health)


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
        kept = _Kept(start, self._restarts, self._window_s, self._clock)
        self._kept.append(kept)
        return kept.service

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
        try:
            await_answers(self._kept, patience_s, STARTS, LOOK_S, self._say, stop, self._clock)
        except EndedError as error:
            raise self._ended(error, STARTS - 1) from error
        except LateError as error:
            late = next(kept.service for kept in self._kept if kept is error.part)
            raise ServiceError(
                f"{late.name} did not answer at {late.health} in {patience_s:.0f} s: {late.log_end()}"
            ) from error

    def check(self) -> None:
        """Restart services that have died, after a pause; call it about every second.

        Raises:
            ServiceError: If a service dies too often.
        """
        for kept in self._kept:
            try:
                if message := kept.look():
                    self._say(message)
            except EndedError as error:
                raise self._ended(error, self._restarts) from error

    def _ended(self, error: EndedError, restarts: int) -> ServiceError:
        service = next(kept.service for kept in self._kept if kept is error.part)
        often = f" {len(error.part.deaths)} times in {self._window_s:.0f} s" if restarts else ""
        return ServiceError(f"{service.name} ended by itself{often}; its log is {service.log}, {service.log_end()}")

    def reap(self) -> None:
        """Reap other children that have ended, in a process that adopts orphans: zombies fill the process table."""
        for pid in set(children()) - {service.process.pid for service in self.services}:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def stop(self, first: int = 0, patience_s: float = END_S) -> None:
        """Stop the services from a position on, all at the same time.

        Args:
            first: Position of the first service to stop; earlier ones keep running.
            patience_s: Time limit for all together; what still runs then is killed.
        """
        end_together([self._kept.pop().service for _ in self._kept[first:]], patience_s)
