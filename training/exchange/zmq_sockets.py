"""Sockets of an exchange: connections to neighbours for requests, and listening sockets for those of other nodes.

They are unencrypted, encrypted by CurveZMQ, or sealed with keys agreed on over CurveZMQ.
"""

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zmq

from training.exchange.messages import AGREE, OK, Buffer, Header, MemoryPool, unpack
from training.exchange.protocol import ChunkRequest, Pending
from training.exchange.sealing import TAG_BYTES, Session, draw
from training.processes.keys import RingKey, admit, call_by_name, dismiss, secure_by_name, secure_client, secure_server

WINDOW_BYTES = 8 * 1024 * 1024
"""Bytes in flight to a peer: enough for sending, receiving and arithmetic to overlap."""
_LATE = 8
"""Maximum number of old connections that are kept for late answers."""
_LATE_MS = 60_000
"""How long a peer may stall, beyond the time-outs, before its connection is closed and its pending answers are lost."""
_SESSIONS = 1024
"""Maximum number of sessions with other nodes that a listening socket keeps."""

_AGREE = Header(AGREE, "fp32", OK, False, 0, 0, 0, 0, 0, 0)


# --- connections to neighbours


@dataclass(frozen=True)
class Address:
    """A peer's node, incarnation and endpoint."""

    node: int
    incarnation: str
    endpoint: str


@dataclass
class Links:
    """Opens connections.

    Attributes:
        context: ZeroMQ context.
        key: The ring's key.
        timeout_s: Time after which a peer counts as silent.
        longest: Maximum size of a message in bytes.
    """

    context: "zmq.Context[Any]"
    key: RingKey | None
    timeout_s: float
    longest: int

    def open(self, endpoint: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        """Open a connection; ZeroMQ connects and reconnects in the background.

        Args:
            endpoint: Endpoint to connect to.
            name: Name of a session with sealed messages; without it the connection uses CurveZMQ, or no encryption if
                there is no key.
        """
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.MAXMSGSIZE, self.longest)
        # much longer than our own time-out, because closing a connection loses its pending answers
        beat = max(1000, int(1000 * self.timeout_s))
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * beat + _LATE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if name:
            call_by_name(socket, name)
        else:
            secure_client(socket, self.key, endpoint)
        socket.connect(endpoint)
        return socket


class Peer:
    """A neighbour that is or was asked, with unencrypted messages.

    Attributes:
        address: The neighbour's address.
        socket: The connection to it.
        pending: Chunks that it has not answered.
        retry_at: Monotonic time, in seconds, before which it must not be asked.
    """

    def __init__(self, address: Address, links: Links, poller: zmq.Poller) -> None:
        self.address, self.pending, self.retry_at = address, self._expect(), 0.0
        self._links, self._poller = links, poller
        self._silences = 0
        self.socket = self._open(address.endpoint)

    def _expect(self) -> Pending:
        return Pending(_frame)

    def _open(self, endpoint: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        socket = self._links.open(endpoint, name)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def send(self, request: ChunkRequest) -> bool:
        """Send a chunk; False if the connection cannot take it now."""
        return self._send(request.header.pack(), request.chunk)

    def _send(self, head: bytes, chunk: Any) -> bool:
        try:
            self.socket.send(head, zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(chunk, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> tuple[Header, Buffer] | None:
        """Header and chunk of the next answer; None if it is malformed.

        Raises:
            zmq.Again: If there is none.
        """
        frames = receive(self.socket, 2)
        return None if frames is None else self._read(frames[0].buffer, frames[1].buffer)

    def _read(self, head: Buffer, chunk: Buffer) -> tuple[Header, Buffer] | None:
        header = unpack(head)
        return None if header is None else (header, chunk)

    def answered(self) -> None:
        """Record an answer, which shows that the peer is alive."""
        self._silences, self.retry_at = 0, 0.0

    def silent(self, now: float) -> None:
        """Record a time-out; the peer is asked again after an exponentially growing delay."""
        self.retry_at = now + self._links.timeout_s * 2 ** min(self._silences, 4)
        self._silences += 1

    def close(self) -> None:
        """Close the connection and forget the unanswered chunks."""
        self._poller.unregister(self.socket)
        self.socket.close(0)
        self.pending.clear()


class SealedPeer(Peer):
    """A neighbour with sealed messages, whose keys are first agreed on over CurveZMQ."""

    def __init__(self, address: Address, links: Links, poller: zmq.Poller) -> None:
        super().__init__(address, links, poller)
        self._sealed: dict[tuple[int, int], zmq.Frame] = {}
        self._frames = MemoryPool(_frame)
        self._opened = bytearray(links.longest)
        self._draw()

    def _draw(self) -> None:
        """Draw session keys and send them."""
        self._agreed, self._has_agreed = draw(), False
        self._session = Session.from_bytes(self._agreed)
        self._send(_AGREE.pack(), self._agreed)

    def _expect(self) -> Pending:
        return Pending()

    def send(self, request: ChunkRequest) -> bool:
        """Send a sealed chunk; False if the connection cannot take it now, or the keys are not agreed on yet."""
        if not self._has_agreed:
            return False
        if not self.pending:  # a new exchange: the last one's unanswered messages are given up
            self._sealed.clear()
        frame = self._frames.take(len(request.chunk) + TAG_BYTES)
        if not self._send(self._session.requests.seal(request.header.pack(), request.chunk, frame.buffer), frame):
            return False
        self._sealed[request.header.token, request.header.index] = frame
        return True

    def _read(self, head: Buffer, chunk: Buffer) -> tuple[Header, Buffer] | None:
        if not self._has_agreed:
            self._agree(unpack(head), bytes(chunk))
            return None
        opened = self._session.answers.open(head, chunk, self._opened)
        answer = None if opened is None else super()._read(*opened)
        if answer and (frame := self._sealed.pop((answer[0].token, answer[0].index), None)) is not None:
            self._frames.give_back(frame)
        return answer

    def _agree(self, header: Header | None, port: bytes) -> None:
        """Process the peer's agreement: it has the keys, and listens for sealed messages on this port."""
        if header is None or (header.kind, header.status) != (AGREE, OK) or not port.isdigit():
            return
        host = self.address.endpoint.rpartition(":")[0]
        self._reopen(f"{host}:{int(port)}", self._session.name)
        self._has_agreed = True

    def _reopen(self, endpoint: str, name: bytes = b"") -> None:
        self._poller.unregister(self.socket)
        self.socket.close(0)
        self.socket = self._open(endpoint, name)

    def silent(self, now: float) -> None:
        """Record a time-out; agree on keys again, as they may have been lost in transit or by the peer."""
        super().silent(now)
        if not self._has_agreed:
            self._send(_AGREE.pack(), self._agreed)
        elif not self.pending:  # nothing could be sent: ZeroMQ may give up a refused connection for good
            self._reopen(self.address.endpoint)
            self._draw()


class Peers:
    """The pool of connections; if there are many, the least recently used are closed.

    A peer that has not answered is asked over a new connection, because the old one may be down. The old one is kept
    until its answers have arrived: a peer that was suspended answers everything when it resumes, and has then added its
    half.
    """

    def __init__(self, links: Links, poller: zmq.Poller, most: int = 32) -> None:
        self._links, self._poller, self._most = links, poller, most
        self._open: OrderedDict[Address, Peer] = OrderedDict()
        self._late: list[Peer] = []

    def __iter__(self) -> Any:
        return iter([*self._open.values(), *self._late])

    def get(self, address: Address) -> Peer:
        """The peer at an address, connected; over a new connection if it has unanswered chunks on the last one."""
        peer = self._open.get(address)
        if peer is not None and peer.pending:
            self._late.append(self._open.pop(address))
            peer = None
        self._keep_late([late for late in self._late if late.pending][-_LATE:])
        if peer is None:
            kind = SealedPeer if self._links.key else Peer
            peer = self._open[address] = kind(address, self._links, self._poller)
        self._open.move_to_end(address)
        for other in [a for a, p in self._open.items() if not p.pending][: max(0, len(self._open) - self._most)]:
            if other != address:
                self.drop(other)
        return peer

    def waits(self, address: Address, now: float) -> bool:
        """Whether a peer must not be asked yet."""
        peer = self._open.get(address)
        return peer is not None and now < peer.retry_at

    def drop(self, address: Address) -> None:
        """Close the connection to an address."""
        self._open.pop(address).close()

    def keep(self, addresses: set[Address]) -> None:
        """Close all connections except those to these addresses."""
        for address in [address for address in self._open if address not in addresses]:
            self.drop(address)
        self._keep_late([late for late in self._late if late.address in addresses])

    def _keep_late(self, kept: list[Peer]) -> None:
        """Close those old connections that are not kept for late answers."""
        for late in self._late:
            if late not in kept:
                late.close()
        self._late = kept

    def close(self) -> None:
        """Close all connections."""
        self.keep(set())


def _frame(length: int) -> zmq.Frame:
    return zmq.Frame(bytes(length))


def receive(socket: "zmq.Socket[bytes]", parts: int) -> list[zmq.Frame] | None:
    """Receive the next message; None if its number of parts is wrong.

    Raises:
        zmq.Again: If there is none.
    """
    frames: list[zmq.Frame] = socket.recv_multipart(zmq.NOBLOCK, copy=False)  # type: ignore[assignment]
    return frames if len(frames) == parts else None


# --- listening sockets


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request.

    Attributes:
        sender: Id of its connection.
        header: The request's header.
        chunk: The request's weights, in writable memory.
        frame: The frame that contains the chunk.
    """

    sender: bytes
    header: Header
    chunk: Buffer
    frame: zmq.Frame


class Router:
    """A listening socket for holders of the ring's key, or, without a key, for processes on this machine.

    Args:
        context: ZeroMQ context.
        key: The ring's key.
        longest: Maximum size of a message in bytes.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.

    Raises:
        zmq.ZMQError: If the address cannot be bound.
        ValueError: If there is no key and other machines can reach the address.
    """

    def __init__(self, context: "zmq.Context[Any]", key: RingKey | None, longest: int, host: str, port: int) -> None:
        self._context, self._key = context, key
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.MAXMSGSIZE, longest)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        place = f"[{host}]" if ":" in host else host
        self._secure(f"tcp://{place}:{port or 1}")
        self.socket.bind(f"tcp://{place}:{port or '*'}")
        last: Any = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        self.port = int(last.decode().rpartition(":")[2].rstrip("\0"))

    def _secure(self, endpoint: str) -> None:
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        secure_server(self._context, self.socket, self._key, endpoint)

    def receive(self) -> Incoming | None:
        """The next request; None if it is malformed.

        Raises:
            zmq.Again: If there is none.
        """
        frames = receive(self.socket, 3)
        return None if frames is None else self._read(frames[0].bytes, frames[1], frames[2])

    def _read(self, sender: bytes, head: zmq.Frame, frame: zmq.Frame) -> Incoming | None:
        header = unpack(head.buffer)
        return None if header is None else Incoming(sender, header, frame.buffer, frame)

    def reply(self, request: Incoming, header: Header, chunk: Buffer) -> None:
        """Send an answer; dropped if the connection is closed or its queue is full (the asker counts a failure).

        Args:
            request: The request to answer.
            header: The answer's header.
            chunk: The answer's chunk; the request's own memory is sent without a copy.
        """
        self._send(request.sender, header.pack(), request.frame if chunk is request.chunk else chunk)

    def _send(self, sender: bytes, head: bytes, chunk: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([sender, head, chunk], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)


class SealedRouter(Router):
    """A listening socket for sealed messages; accepts only peers that have agreed on keys over a CurveZMQ socket.

    Args:
        context: ZeroMQ context, shared with the CurveZMQ socket.
        longest: Maximum size of a message in bytes.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
    """

    def __init__(self, context: "zmq.Context[Any]", longest: int, host: str, port: int) -> None:
        super().__init__(context, None, longest, host, port)
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._opened = bytearray(longest)

    def _secure(self, endpoint: str) -> None:
        # no hand-over: a connection that uses the session's name, which is not secret, must not replace this one
        secure_by_name(self.socket)

    def agree(self, agreed: Buffer) -> bool:
        """Admit the sender of these keys, received over CurveZMQ; returns whether they are valid keys."""
        try:
            session = Session.from_bytes(bytes(agreed))
        except ValueError:
            return False
        if session.name in self._sessions:
            return True  # sent twice: message numbers must continue, because reusing a nonce would reveal the weights
        self._sessions[session.name] = session
        admit(self._context, session.name)
        if len(self._sessions) > _SESSIONS:
            dismiss(self._context, self._sessions.popitem(last=False)[0])
        return True

    def _read(self, sender: bytes, head: zmq.Frame, frame: zmq.Frame) -> Incoming | None:
        session = self._sessions.get(sender)
        opened = session.requests.open(head.buffer, frame.buffer, self._opened) if session else None
        if opened is None or (header := unpack(opened[0])) is None:
            return None
        self._sessions.move_to_end(sender)
        return Incoming(sender, header, opened[1], frame)

    def reply(self, request: Incoming, header: Header, chunk: Buffer) -> None:
        """Send a sealed answer."""
        own = chunk is request.chunk
        out = request.frame.buffer if own else bytearray(len(chunk) + TAG_BYTES)
        head = self._sessions[request.sender].answers.seal(header.pack(), chunk, out)
        self._send(request.sender, head, request.frame if own else out)
