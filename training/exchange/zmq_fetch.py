"""Fetches weights or a replica for a newcomer, from the nearest member that provides them."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from training.exchange.mailbox import Floats
from training.exchange.messages import MEANING, OK, WAITING, Header, unpack
from training.exchange.zmq_sockets import WINDOW_BYTES, Address, Links, receive

_AGAIN_S = 0.05  # interval at which a neighbour that is writing its replica is asked


class Fetching:
    """One fetch; moves on to the next candidate if one is silent, refuses, or sends non-finite values.

    Args:
        candidates: Members to ask, nearest first.
        links: Opens connections.
        poller: The connection in use is registered here.
        header: Header of the requests; says what is fetched, and its size.
        target: Array for the fetched values.
        timeout_s: Time limit for the whole fetch.
        request: Payload of every request.

    Attributes:
        result: Message to the training process once the fetch is over; None before.
        socket: The connection in use.
    """

    def __init__(
        self,
        candidates: list[Address],
        links: Links,
        poller: zmq.Poller,
        header: Header,
        target: Floats,
        timeout_s: float,
        request: bytes = b"",
    ) -> None:
        self._candidates, self._links, self._poller, self._header = candidates, links, poller, header
        self._target, self._request = target, request
        self._deadline = time.monotonic() + timeout_s
        self._silence_s, self._patience_s = min(links.timeout_s, max(0.5, timeout_s / 3)), timeout_s / 3
        self._patient_until = self._again_at = 0.0
        self._window = max(2, WINDOW_BYTES // (4 * header.chunk))
        self._chunks = -(-header.size // header.chunk)
        self._why = "no other node is in the ring"
        self._sent, self._got, self._moved = 0, set[int](), 0.0
        self._node = -1
        self.result: dict[str, Any] | None = None
        self.socket: zmq.Socket[bytes] | None = None
        self._next("")

    def close(self) -> None:
        """Close the connection."""
        if self.socket is not None:
            self._poller.unregister(self.socket)
            self.socket.close(0)
            self.socket = None

    def go_on(self, now: float) -> None:
        """Request further chunks, or move on to the next candidate after a time-out."""
        if self.result is not None:
            return
        if now > self._deadline:
            self._end(False, "no time left; " + self._why)
        elif now - self._moved > self._silence_s:
            self._next(f"node {self._node} did not answer")
        else:
            self._send()

    def hear(self) -> None:
        """Process answers."""
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
            if header.status == WAITING:
                self._wait()
            elif (header.kind, header.status) != (self._header.kind, OK):
                self._next(f"node {self._node}: {MEANING.get(header.status, 'malformed')}")
            elif len(payload) == 4 * len(self._place(header.index)) > 0:
                self._store(header.index, np.frombuffer(payload.buffer, np.float32))

    def _wait(self) -> None:
        """Schedule the next request to a candidate that is still writing its replica, within a time limit."""
        now = time.monotonic()
        self._sent, self._again_at = 0, now + _AGAIN_S
        if now < self._patient_until:
            self._moved = now

    def _place(self, index: int) -> Floats:
        start = index * self._header.chunk
        return self._target[start : start + self._header.chunk]

    def _store(self, index: int, values: Floats) -> None:
        if not np.isfinite(values).all():
            self._next(f"node {self._node} sent non-finite values")
            return
        self._place(index)[:] = values
        self._got.add(index)
        self._moved = time.monotonic()
        self._send()
        if len(self._got) == self._chunks:
            self._end(True, "")

    def _send(self) -> None:
        if time.monotonic() < self._again_at:
            return
        window = self._window if self._got else 1  # so that a candidate that refuses gets only one request
        while self.socket is not None and self._sent < self._chunks and self._sent - len(self._got) < window:
            header = replace(self._header, index=self._sent)
            try:
                self.socket.send_multipart([header.pack(), self._request], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._sent += 1

    def _next(self, why: str) -> None:
        """Move on to the next candidate."""
        self.close()
        self._why = why or self._why
        if not self._candidates:
            self._end(False, self._why)
            return
        address = self._candidates.pop(0)
        self._node, self._sent, self._got, self._moved = address.node, 0, set(), time.monotonic()
        self._again_at, self._patient_until = 0.0, self._moved + self._patience_s
        self.socket = self._links.open(address.endpoint)
        self._poller.register(self.socket, zmq.POLLIN)
        self._send()

    def _end(self, ok: bool, why: str) -> None:
        self.result = {"fetched": self._header.token, "ok": ok, "node": self._node, "why": why}
