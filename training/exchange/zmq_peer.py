"""Connections to the neighbours that are asked."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zmq

from training.exchange.keys import RingKey, secure_client
from training.exchange.messages import Header, unpack
from training.exchange.protocol import Pending, Request

WINDOW_BYTES = 8 * 1024 * 1024
"""Chunks under way to a peer, in bytes: enough for sending, receiving and arithmetic to overlap."""
_LATE = 8
"""Connections at most on which answers may still come late."""
_LATE_MS = 60_000
"""How long a peer may stand still, beyond the time-outs, before its connection goes down with the answers under way."""


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

    def open(self, endpoint: str) -> "zmq.Socket[bytes]":
        """A connection that is made, and made again, in the background."""
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, self.longest)
        # much longer than our own time-out: a connection that goes down takes the answers under way with it
        beat = max(1000, int(1000 * self.timeout_s))
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * beat + _LATE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        secure_client(socket, self.key, endpoint)
        socket.connect(endpoint)
        return socket


class Peer:
    """A neighbour that is or was asked.

    Attributes:
        address: Who it is.
        socket: The connection to it.
        pending: Chunks that it has not answered.
        retry_at: Not to be asked before (monotonic seconds).
    """

    def __init__(self, address: Address, links: Links) -> None:
        self.address = address
        self._links = links
        self._silences = 0
        self.socket = links.open(address.endpoint)
        self.pending = Pending(lambda length: zmq.Frame(bytes(length)))
        self.retry_at = 0.0

    def send(self, request: Request) -> bool:
        """Send a chunk; False if the queue is full."""
        try:
            self.socket.send(request.header.pack(), zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(request.chunk, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def answered(self) -> None:
        """It is there."""
        self._silences, self.retry_at = 0, 0.0

    def silent(self, now: float) -> None:
        """It let a time-out pass."""
        self.retry_at = now + self._links.timeout_s * 2 ** min(self._silences, 4)
        self._silences += 1

    def close(self) -> None:
        """Forget everything."""
        self.socket.close(0)
        self.pending.clear()


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
            peer = self._open[address] = Peer(address, self._links)
            self._poller.register(peer.socket, zmq.POLLIN)
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
        self._close(self._open.pop(address))

    def keep(self, addresses: set[Address]) -> None:
        """Close all others."""
        for address in [address for address in self._open if address not in addresses]:
            self.drop(address)
        self._keep_late([late for late in self._late if late.address in addresses])

    def _keep_late(self, kept: list[Peer]) -> None:
        """Close the other connections on which answers may still come late."""
        for late in self._late:
            if late not in kept:
                self._close(late)
        self._late = kept

    def _close(self, peer: Peer) -> None:
        self._poller.unregister(peer.socket)
        peer.close()

    def close(self) -> None:
        """Close all."""
        self.keep(set())


def receive(socket: "zmq.Socket[bytes]", parts: int) -> tuple[list[zmq.Frame], Header] | None:
    """One message of so many parts, the last two of which are header and chunk.

    Returns:
        None if it is malformed.

    Raises:
        zmq.Again: If there is none.
    """
    frames: list[zmq.Frame] = socket.recv_multipart(zmq.NOBLOCK, copy=False)  # type: ignore[assignment]
    header = unpack(frames[-2].buffer) if len(frames) == parts else None
    return None if header is None else (frames, header)
