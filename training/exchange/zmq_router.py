"""Listening sockets for requests of other nodes: unencrypted, CurveZMQ, or sealed with keys agreed on over CurveZMQ."""

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zmq

from training.exchange.messages import Buffer, Header, unpack
from training.exchange.sealing import TAG_BYTES, Session
from training.exchange.zmq_peer import receive
from training.processes.keys import RingKey, admit, dismiss, secure_by_name, secure_server

_SESSIONS = 1024


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
