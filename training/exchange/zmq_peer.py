"""Connections to the neighbours that are asked."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zmq

from training.exchange.messages import AGREE, OK, Header, unpack
from training.exchange.protocol import ChunkRequest, Pending
from training.exchange.sealing import TAG_BYTES, Session, draw
from training.exchange.wire import Buffer
from training.processes.keys import RingKey, call_by_name, secure_client

WINDOW_BYTES = 8 * 1024 * 1024
"""Chunks under way to a peer, in bytes: enough for sending, receiving and arithmetic to overlap."""
_LATE = 8
"""Connections at most on which answers may still come late."""
_LATE_MS = 60_000
"""How long a peer may stand still, beyond the time-outs, before its connection goes down with the answers under way."""

_AGREE = Header(AGREE, "fp32", OK, False, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Address:
    """Where and who a peer is."""

    node: int
    incarnation: str
    endpoint: str


@dataclass
class Links:
    """Makes connections.

    Attributes:
        context: ZeroMQ's.
        key: The ring's.
        timeout_s: After which a peer counts as silent.
        longest: Bytes of a message at most.
    """

    context: "zmq.Context[Any]"
    key: RingKey | None
    timeout_s: float
    longest: int

    def open(self, endpoint: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        """A connection that is made, and made again, in the background.

        Args:
            endpoint: Where to.
            name: Of a session, whose messages are sealed; else the connection is CurveZMQ's, or in the clear.
        """
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.MAXMSGSIZE, self.longest)
        # much longer than our own time-out: a connection that goes down takes the answers under way with it
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
    """A neighbour that is or was asked, in the clear.

    Attributes:
        address: Who it is.
        socket: The connection to it.
        pending: Chunks that it has not answered.
        retry_at: Not to be asked before (monotonic seconds).
    """

    def __init__(self, address: Address, links: Links, poller: zmq.Poller) -> None:
        self.address, self.pending, self.retry_at = address, self._expect(), 0.0
        self._links, self._poller = links, poller
        self._silences = 0
        self.socket = self._open(address.endpoint)

    def _expect(self) -> Pending:
        return Pending(lambda length: zmq.Frame(bytes(length)))

    def _open(self, endpoint: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        socket = self._links.open(endpoint, name)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def send(self, request: ChunkRequest) -> bool:
        """Send a chunk; False if that is not possible now."""
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

    def answered(self, header: Header) -> None:
        """It is there: this was one of its answers."""
        self._silences, self.retry_at = 0, 0.0

    def silent(self, now: float) -> None:
        """It let a time-out pass."""
        self.retry_at = now + self._links.timeout_s * 2 ** min(self._silences, 4)
        self._silences += 1

    def close(self) -> None:
        """Forget everything."""
        self._poller.unregister(self.socket)
        self.socket.close(0)
        self.pending.clear()


class SealedPeer(Peer):
    """A neighbour that is or was asked with sealed messages, once it has agreed on their keys over CurveZMQ."""

    def __init__(self, address: Address, links: Links, poller: zmq.Poller) -> None:
        super().__init__(address, links, poller)
        self._sealed: dict[tuple[int, int], zmq.Frame] = {}
        self._spare: list[zmq.Frame] = []
        self._opened = bytearray(links.longest)
        self._draw()

    def _draw(self) -> None:
        """Send keys to agree on."""
        self._agreed, self._has_agreed = draw(), False
        self._session = Session.from_bytes(self._agreed)
        self._send(_AGREE.pack(), self._agreed)

    def _expect(self) -> Pending:
        return Pending()

    def send(self, request: ChunkRequest) -> bool:
        """Send a chunk, sealed; False if that is not possible now, or not yet."""
        if not self._has_agreed:
            return False
        length = len(request.chunk) + TAG_BYTES
        frame = self._spare.pop() if self._spare and len(self._spare[-1]) == length else zmq.Frame(bytes(length))
        if not self._send(self._session.requests.seal(request.header.pack(), request.chunk, frame.buffer), frame):
            return False
        self._sealed[request.header.token, request.header.index] = frame
        return True

    def _read(self, head: Buffer, chunk: Buffer) -> tuple[Header, Buffer] | None:
        if not self._has_agreed:
            self._agree(unpack(head), bytes(chunk))
            return None
        opened = self._session.answers.open(head, chunk, self._opened)
        return None if opened is None else super()._read(*opened)

    def _agree(self, header: Header | None, port: bytes) -> None:
        """The other side knows the keys, and listens to sealed messages at this port."""
        if header is None or (header.kind, header.status) != (AGREE, OK) or not port.isdigit():
            return
        host = self.address.endpoint.rpartition(":")[0]
        self._reopen(f"{host}:{int(port)}", self._session.name)
        self._has_agreed = True

    def _reopen(self, endpoint: str, name: bytes = b"") -> None:
        self._poller.unregister(self.socket)
        self.socket.close(0)
        self.socket = self._open(endpoint, name)

    def answered(self, header: Header) -> None:
        """It is there: this was one of its answers."""
        super().answered(header)
        if (frame := self._sealed.pop((header.token, header.index), None)) is not None:
            self._spare.append(frame)

    def silent(self, now: float) -> None:
        """It let a time-out pass; the keys may have been lost on their way, or it has forgotten them."""
        super().silent(now)
        if not self._has_agreed:
            self._send(_AGREE.pack(), self._agreed)
        elif not self.pending:  # nothing could be sent: ZeroMQ may give a connection up for good if it is refused
            self._reopen(self.address.endpoint)
            self._draw()


class Peers:
    """The connections, the least recently used of which are closed when there are many.

    A peer that has not answered is asked again by another connection, as its own may be down. The old one stays until
    its answers have come: a peer that stood still answers everything when it wakes, and has added its half then.
    """

    def __init__(self, links: Links, poller: zmq.Poller, most: int = 32) -> None:
        self._links, self._poller, self._most = links, poller, most
        self._open: OrderedDict[Address, Peer] = OrderedDict()
        self._late: list[Peer] = []

    def __iter__(self) -> Any:
        return iter([*self._open.values(), *self._late])

    def get(self, address: Address) -> Peer:
        """The peer at an address, connected; by another connection if it has not answered on this one."""
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
        """Whether a peer is to be left alone for now."""
        peer = self._open.get(address)
        return peer is not None and now < peer.retry_at

    def drop(self, address: Address) -> None:
        """Close a connection."""
        self._open.pop(address).close()

    def keep(self, addresses: set[Address]) -> None:
        """Close all others."""
        for address in [address for address in self._open if address not in addresses]:
            self.drop(address)
        self._keep_late([late for late in self._late if late.address in addresses])

    def _keep_late(self, kept: list[Peer]) -> None:
        """Close the other connections on which answers may still come late."""
        for late in self._late:
            if late not in kept:
                late.close()
        self._late = kept

    def close(self) -> None:
        """Close all."""
        self.keep(set())


def receive(socket: "zmq.Socket[bytes]", parts: int) -> list[zmq.Frame] | None:
    """The next message; None if it has not so many parts.

    Raises:
        zmq.Again: If there is none.
    """
    frames: list[zmq.Frame] = socket.recv_multipart(zmq.NOBLOCK, copy=False)  # type: ignore[assignment]
    return frames if len(frames) == parts else None
