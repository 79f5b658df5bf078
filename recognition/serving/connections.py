"""Connections that are slow, idle, too many or no HTTP at all, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket
import threading
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from recognition.serving.limits import error_content
from recognition.serving.service import SpeechService

_LONGEST_FRAME = 1 << 20
"""Largest message of a stream, in bytes: half a minute of audio."""
_INTERRUPTED_S = 5.0
"""For requests in progress after Ctrl-C."""
_REST_S = 3.0
"""For ending after requests have ended; then the process is killed."""
_KEPT_S = 5
"""How long a connection stays open for another request."""
_QUEUED = 1024
"""Connections that wait in the kernel until they are accepted."""
_AT_ONCE = 64
"""Connections that are accepted at most before others, whose requests may have arrived meanwhile, are looked at."""
_LONGEST_USER_TIMEOUT = 2**31 - 1
"""In milliseconds: the largest value of the system."""
_OTHER_FILES = 256
"""Open files that are no connections or uploads: the model, the log, pipes, what libraries open."""


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with bounds: of connections, and of the time until a request has arrived."""

    service: ClassVar[SpeechService]
    waiting: ClassVar[dict[str, dict[GuardedProtocol, asyncio.TimerHandle]]]
    """Connections without a request in progress, by the address of the client, the oldest first. If there are too many
    connections, the client with most of these loses one."""

    @classmethod
    def of(cls, service: SpeechService) -> type[GuardedProtocol]:
        """The protocol of one server.

        Args:
            service: The server's parts.
        """
        return type("_Guarded", (cls,), {"service": service, "waiting": {}})

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.service.metrics.connections.set(len(self.connections))
        most = self.service.limits.connections
        if len(self.connections) > most:
            if not self.waiting:
                self.answer(503, f"{most} connections are open: try again later", "too_many_connections")
                return
            crowd = max(self.waiting.values(), key=len)
            next(iter(crowd)).drop("too_many")
        self.expect_request()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.expect_request()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.forget()
        self.expect_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)
        self.service.metrics.connections.set(len(self.connections))

    @override
    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.forget()
        super().handle_websocket_upgrade(event)
        stream = self.transport.get_protocol()
        assert isinstance(stream, GuardedStream)
        if not stream.handshake_initiated:  # websockets has stopped reading, and uvicorn would wait for more
            self.answer(
                400,
                f"a stream is opened by GET without a body, with at most {MAX_NUM_HEADERS} headers and "
                f"{MAX_LINE_LENGTH} bytes in a line",
                "malformed_request",
            )

    @override
    def send_400_response(self, msg: str) -> None:
        self.answer(400, msg, "malformed_request")

    def expect_request(self) -> None:
        """Close the connection unless a request, or the rest of one that has been answered, arrives in time."""
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.transport.is_closing() or self.transport.get_protocol() is not self:
            self.forget()
        elif self not in (own := self.waiting.setdefault(self.address, {})):
            own[self] = self.loop.call_later(self.service.limits.idle_s, self.drop, "slow")

    @property
    def address(self) -> str:
        """Of the client."""
        return self.client[0] if self.client else ""

    def forget(self) -> None:
        """Do not wait for a request any more."""
        own = self.waiting.get(self.address, {})
        timer = own.pop(self, None)
        if timer is not None:
            timer.cancel()
            if not own:
                del self.waiting[self.address]

    def drop(self, reason: str) -> None:
        """Close the connection.

        Args:
            reason: For the figures.
        """
        self.forget()
        self.service.metrics.dropped.labels(reason).inc()
        self.transport.abort()

    def answer(self, status: int, text: str, code: str) -> None:
        """Answer before there is a request, and close.

        Args:
            status: Of HTTP.
            text: Why.
            code: The reason for programs.
        """
        self.service.metrics.rejected.labels(code).inc()
        content = json.dumps({"error": error_content(status, text, code)}).encode()
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + content)
        self.transport.close()


class GuardedStream(WebSocketsSansIOProtocol):
    """uvicorn's protocol of streams, but it does not read from a client that reads nothing.

    Otherwise the answers to such a client's pings would fill the memory.
    """

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    @override
    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()  # which resumes reading
        self._wait_for_reader()
        return message

    def _wait_for_reader(self) -> None:
        if not (self.writable.is_set() or self.transport.is_closing()):
            self.transport.pause_reading()


class DrainingServer(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C.

    SIGTERM lets requests and streams in progress end, within the limit `drain_s`; Ctrl-C within five seconds. A second
    signal ends them at once.

    Args:
        app: The application.
        service: The server's parts.

    Raises:
        ValueError: The system does not allow this process as many open files as the limits need.
    """

    def __init__(self, app: ASGIApp, service: SpeechService) -> None:
        most = service.limits.connections
        needed = 2 * most + _AT_ONCE + _OTHER_FILES  # each may upload to a temporary file
        allow_files(needed, "accept fewer connections with --limit connections=NUMBER")
        self.service = service
        self._left_s = service.limits.drain_s
        for name in ("uvicorn.error", "python_multipart"):
            # what clients send wrongly is counted, not printed; the gate reports what fails
            logging.getLogger(name).setLevel(logging.CRITICAL)
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedProtocol.of(service),
                ws=GuardedStream,
                ws_max_size=_LONGEST_FRAME,
                ws_per_message_deflate=False,
                ws_ping_interval=service.limits.idle_s,
                ws_ping_timeout=None,  # the answer lies behind audio that waits; silent clients are noticed without it
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEPT_S,
                backlog=max(1, min(_AT_ONCE, most // 4)),  # a new one is not dropped before its request can be read
            )
        )

    def run_on(self, listener: socket.socket) -> None:
        """Serve on a socket that listens, until a signal.

        Args:
            listener: The socket.
        """
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:  # uvloop, where it is installed
            runner.run(self.serve(sockets=[listener]))

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        most_ms = min(math.ceil(1000 * self.service.limits.idle_s), _LONGEST_USER_TIMEOUT)
        for listener in sockets or ():
            # asyncio's backlog is both: what waits in the kernel, and what is accepted at once
            listener.listen(_QUEUED)
            # connections have it from their listener; asyncio closes one only when its client has read everything
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self._left_s = _INTERRUPTED_S if sig == signal.SIGINT else self.service.limits.drain_s
        killer = threading.Timer(self._left_s + _REST_S, os._exit, [1])  # a thread may hang in a library
        killer.daemon = True
        killer.start()
        self.should_exit = True

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._left_s
        for server in self.servers:
            server.close()
        self.service.stopping.set()
        while self.service.admission.streams and loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        self.config.timeout_graceful_shutdown = max(0.1, deadline - loop.time())  # type: ignore[assignment]
        await super().shutdown(sockets)


def allow_files(needed: int, instead: str) -> None:
    """Have the system allow this process a number of open files.

    Args:
        needed: How many.
        instead: What helps if that is too many for the system, for the message.

    Raises:
        ValueError: They are not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        if resource.RLIM_INFINITY != hard < needed:
            raise ValueError(
                f"{needed} open files are needed, and the system allows {hard}: raise that with `ulimit -Hn {needed}` "
                f"as root, or {instead}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def listen(host: str, port: int, backlog: int = _QUEUED) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: The address is not this machine's, or the port is taken.
    """
    try:
        info: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = info[0]
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): stop the program that does, or give "
            "another --host or --port"
        ) from error
    # uvicorn takes an inherited socket for a Unix socket and does not set it
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
