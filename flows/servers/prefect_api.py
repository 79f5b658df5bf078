"""The Prefect server of a command: a configured one, that of `starling up`, or a supervised one of its own.

If the command's own server dies, it is restarted within seconds at the same address and on the same database. The
command holds its socket open, so requests wait during the restart and succeed. If it cannot be restarted, the command
ends, since flows cannot run without it.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from flows.servers.services import (
    Service,
    ServiceError,
    connect_mlflow,
    listening,
    running_services,
    set_prefect_defaults,
    start_prefect,
)
from flows.servers.shutdown import end_because, shutdown_signal
from flows.servers.supervisor import Supervisor
from storage.retries import ObjectStoreError, check_disk
from tasks.config.home import home

RESTARTS = 3
"""How often a command's own server may die within ten minutes."""
_QUEUES = (("prefect.events.worker", "EventsWorker"), ("prefect.logging.handlers", "APILogWorker"))
_TEMPORARY = "STARLING_TEMPORARY_PREFECT"
"""Environment variable with the URL of a command's own server, for its flows and their child processes."""
_OF_FLOWS = ("torch", "mlflow")
"""Libraries of all flows; they are imported, on another core, while the server starts. Prefect is not among them: it
reads its settings, such as the server's address, when it is imported."""
_LOOK_S = 0.5
_PATIENCE_S = 10.0
_HURRIED_S = 2.0
"""For each step of stopping an own server, if everything has to end within ten seconds."""


@contextmanager
def orchestration(on_wait: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """Provide a Prefect API: the configured one, that of `starling up`, or an own server that ends with the block.

    Args:
        on_wait: Called with messages about waiting, and about trouble with an own server.

    Yields:
        The server's URL, without /api.
    """
    set_prefect_defaults()
    if os.environ.get("PREFECT_API_URL"):
        from tasks.orchestration.reachable import (  # slow to import
            PATIENCE_S,
            check_prefect,
        )

        connect_mlflow()
        check_prefect(PATIENCE_S, say=on_wait)
        yield os.environ["PREFECT_API_URL"].removesuffix("/api")
        return
    running = running_services()
    connect_mlflow()  # also exports the passwords
    with ExitStack() as stack:
        stack.callback(os.environ.pop, "PREFECT_API_URL", None)
        url = running.get("prefect")
        if not url:
            url = stack.enter_context(private_server(on_wait))
            os.environ[_TEMPORARY] = url
            stack.callback(os.environ.pop, _TEMPORARY, None)
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        yield url


def lasting_url(url: str | None) -> str:
    """A flow run's URL, to be stored; empty if its server ends with the command.

    Args:
        url: URL of the flow run.
    """
    temporary = os.environ.get(_TEMPORARY)
    return "" if not url or (temporary and url.startswith(temporary)) else url


@contextmanager
def private_server(say: Callable[[str], None]) -> Iterator[str]:
    """Run a Prefect server for the block; it is restarted when it dies.

    Args:
        say: Called with messages about its start and its deaths.

    Yields:
        The server's URL, without /api.

    Raises:
        ServiceError: If the server does not start.
        DiskError: If the disk of the data folder is full.
    """
    with listening() as listener:
        supervisor = Supervisor(RESTARTS, say=say)

        def start() -> Service:
            check_disk(home())  # a server cannot log that its disk is full
            return start_prefect(listener=listener)

        try:
            url = supervisor.add(start).url
            say("starting the Prefect server (up to a minute; --no-prefect does without)")
            for library in _OF_FLOWS:
                import_module(library)
            supervisor.wait()
            with _looked_after(supervisor, partial(_give_up, listener, say)):
                yield url
        finally:
            supervisor.stop(patience_s=_HURRIED_S if shutdown_signal() else _PATIENCE_S)


@contextmanager
def _looked_after(supervisor: Supervisor, give_up: Callable[[Exception], None]) -> Iterator[None]:
    over = threading.Event()

    def look() -> None:
        try:
            while not over.wait(_LOOK_S):
                supervisor.check()
        except (ServiceError, ObjectStoreError, OSError) as error:
            give_up(error)

    watch = threading.Thread(target=look, name="Prefect server", daemon=True)
    watch.start()
    try:
        yield
    finally:
        send_the_rest(_HURRIED_S if shutdown_signal() else _PATIENCE_S)
        over.set()
        watch.join(_PATIENCE_S)  # it may be starting the server again


def _give_up(listener: socket.socket, say: Callable[[str], None], error: Exception) -> None:
    """End this process, since its server cannot be restarted."""
    listener.close()  # refuses waiting requests from now on
    end_because(lambda: say(f"stopping within ten seconds; run the same command again to continue. {error}"))


def send_the_rest(patience_s: float) -> None:
    """Flush Prefect's queues of events and log lines while the server runs; otherwise they are flushed at exit.

    Args:
        patience_s: Time limit for each queue.
    """
    for module, name in _QUEUES:
        queue: Any = getattr(sys.modules.get(module), name, None)
        if queue is not None:  # a module that was not imported has nothing to send
            queue.drain_all(timeout=patience_s)
