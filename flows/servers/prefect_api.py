"""The Prefect server of a command: the configured one, that of `starling up`, or one of its own, which is looked after.

A server of the command's own that dies is started again within seconds, at the same address and on the same database.
Its socket is the command's, so that requests wait meanwhile and succeed. Where it cannot be started again the command
ends: nothing that a flow does would get anywhere.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
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
from flows.servers.shutdown import end_because, told
from flows.servers.supervisor import Supervisor
from storage.retries import ObjectStoreError, check_disk
from tasks.config.home import home

RESTARTS = 3
"""How often a command's own server may die within ten minutes."""
_QUEUES = (("prefect.events.worker", "EventsWorker"), ("prefect.logging.handlers", "APILogWorker"))
_LOOK_S = 0.5
_PATIENCE_S = 10.0
_HURRIED_S = 2.0
"""For each step of ending a server of our own, where ten seconds are for everything."""


@contextmanager
def orchestration(on_wait: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """A Prefect API for the block: the configured one, that of `starling up`, or one of our own that ends with it.

    Args:
        on_wait: Told what is waited for, and of trouble with a server of our own.

    Yields:
        The server's URL, without /api.
    """
    set_prefect_defaults()
    if os.environ.get("PREFECT_API_URL"):
        from tasks.orchestration.reachable import (  # with what it imports, it would delay every command
            PATIENCE_S,
            check_prefect,
        )

        connect_mlflow()
        check_prefect(PATIENCE_S, say=on_wait)
        yield os.environ["PREFECT_API_URL"].removesuffix("/api")
        return
    running = running_services()
    connect_mlflow()  # and the passwords
    with ExitStack() as stack:
        stack.callback(os.environ.pop, "PREFECT_API_URL", None)
        url = running.get("prefect") or stack.enter_context(private_server(on_wait))
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        yield url


@contextmanager
def private_server(say: Callable[[str], None]) -> Iterator[str]:
    """A Prefect server for the block; one that dies is started again.

    Args:
        say: Told that it is started, and of its deaths.

    Yields:
        Its URL, without /api.

    Raises:
        ServiceError: If it does not start.
        DiskError: If the disk of the data folder is full.
    """
    with listening() as listener:
        supervisor = Supervisor(RESTARTS, say=say)

        def start() -> Service:
            check_disk(home())  # a server cannot log that its disk is full
            return start_prefect(listener=listener)

        try:
            url = supervisor.add(start).url
            say("starting the Prefect server")
            supervisor.wait()
            with _looked_after(supervisor, partial(_give_up, listener, say)):
                yield url
        finally:
            supervisor.stop(patience_s=_HURRIED_S if told() else _PATIENCE_S)


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
        send_the_rest(_HURRIED_S if told() else _PATIENCE_S)
        over.set()
        watch.join()


def _give_up(listener: socket.socket, say: Callable[[str], None], error: Exception) -> None:
    """End this process, whose server cannot be started again."""
    listener.close()  # what waits for the server is refused from now on
    end_because(lambda: say(f"ending within ten seconds; the same command then finishes the work. {error}"))


def send_the_rest(patience_s: float) -> None:
    """Let Prefect send its last events and log lines while the server is there: it would try so when this process ends.

    Args:
        patience_s: For each.
    """
    for module, name in _QUEUES:
        queue: Any = getattr(sys.modules.get(module), name, None)
        if queue is not None:  # what has not been imported has nothing to send, and takes seconds to import
            queue.drain_all(timeout=patience_s)
