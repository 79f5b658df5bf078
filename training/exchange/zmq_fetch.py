"""Fetching a neighbour's weights for a newcomer, from the nearest member that gives them."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from training.exchange.averaging import Averager
from training.exchange.mailbox import Mailbox
from training.exchange.messages import FETCH, MEANING, OK, Header, unpack
from training.exchange.zmq_peer import WINDOW_BYTES, Address, Links, receive


class Fetching:
    """One fetch; a candidate that is silent, refuses, or has weights that are not finite is followed by the next.

    Attributes:
        result: What to tell the training process, when it is over.
        socket: The connection in use.
    """

    def __init__(
        self, candidates: list[Address], links: Links, poller: zmq.Poller, header: Header, timeout_s: float
    ) -> None:
        self._candidates, self._links, self._poller, self._header = candidates, links, poller, header
        self._deadline = time.monotonic() + timeout_s
        self._silence_s = min(links.timeout_s, max(0.5, timeout_s / 3))
        self._window = max(2, WINDOW_BYTES // (4 * header.chunk))
        self._chunks = -(-header.size // header.chunk)
        self._why = "nobody else is in the ring"
        self._sent, self._got, self._moved = 0, set[int](), 0.0
        self._node = -1
        self.result: dict[str, Any] | None = None
        self.socket: zmq.Socket[bytes] | None = None
        self._next("")

    def close(self) -> None:
        """Drop the connection."""
        if self.socket is not None:
            self._poller.unregister(self.socket)
            self.socket.close(0)
            self.socket = None

    def go_on(self, now: float) -> None:
        """Ask for more, or somebody else."""
        if self.result is not None:
            return
        if now > self._deadline:
            self._end(False, "no time left; " + self._why)
        elif now - self._moved > self._silence_s:
            self._next(f"node {self._node} did not answer")
        else:
            self._send()

    def hear(self, mailbox: Mailbox, averager: Averager) -> None:
        """Take answers."""
        while self.socket is not None and self.result is None:
            try:
                frames = receive(self.socket, 2)
            except zmq.Again:
                return
            header = unpack(frames[0].buffer) if frames else None
            if frames is None or header is None:
                continue
            payload = frames[1]
            if header.token != self._header.token:
                continue
            if (header.kind, header.status) != (FETCH, OK):
                self._next(f"node {self._node}: {MEANING.get(header.status, 'malformed')}")
            elif header.index < self._chunks and len(payload) == 4 * averager.count(header.index):
                self._store(mailbox, header.index, np.frombuffer(payload.buffer, np.float32))

    def _store(self, mailbox: Mailbox, index: int, values: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
        if not np.isfinite(values).all():
            self._next(f"node {self._node} has weights that are not finite")
            return
        start = index * self._header.chunk
        mailbox.fetched[start : start + len(values)] = values
        self._got.add(index)
        self._moved = time.monotonic()
        self._send()
        if len(self._got) == self._chunks:
            self._end(True, "")

    def _send(self) -> None:
        while self.socket is not None and self._sent < self._chunks and self._sent - len(self._got) < self._window:
            header = replace(self._header, index=self._sent)
            try:
                self.socket.send_multipart([header.pack(), b""], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._sent += 1

    def _next(self, why: str) -> None:
        """Turn to the next candidate."""
        self.close()
        self._why = why or self._why
        if not self._candidates:
            self._end(False, self._why)
            return
        address = self._candidates.pop(0)
        self._node, self._sent, self._got, self._moved = address.node, 0, set(), time.monotonic()
        self.socket = self._links.open(address.endpoint)
        self._poller.register(self.socket, zmq.POLLIN)
        self._send()

    def _end(self, ok: bool, why: str) -> None:
        self.result = {"fetched": self._header.token, "ok": ok, "node": self._node, "why": why}
