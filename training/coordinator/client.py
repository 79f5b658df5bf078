"""Requests to the coordinator; each has a number and is repeated until it is answered or times out."""

import threading
import time
from typing import Any

import zmq

from training.coordinator.messages import CoordinatorUnreachableError, Reply, Request, encode_request, read_reply
from training.coordinator.packing import MAX_MESSAGE
from training.processes.keys import RingKey
from training.processes.sockets import Connection, end_context

REPEAT_S = 0.5
"""An unanswered request is sent again after this time: the coordinator may have been killed while processing it."""


class CoordinatorClient:
    """Client of the coordinator. Sends one request at a time; thread-safe.

        with CoordinatorClient("127.0.0.1:5555", key) as client:
            status = client.request(StatusRequest())

    Args:
        address: HOST:PORT.
        key: The ring's key; None only for a coordinator on this machine that runs without a key.

    Raises:
        ValueError: If there is no key and the coordinator is on another machine, or the address is malformed.
    """

    def __init__(self, address: str, key: RingKey | None) -> None:
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._lock = threading.Lock()
        self._number = 0
        try:
            self._connection = Connection(self._context, address, key, MAX_MESSAGE)
        except ValueError:
            end_context(self._context)
            raise
        self._socket = self._connection.socket

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, request: Request[Reply], patience_s: float = 10.0) -> Reply:
        """Send a request and wait for the reply.

        Args:
            request: The request.
            patience_s: Longest time to wait.

        Raises:
            CoordinatorUnreachableError: No reply in time.
            CoordinatorError: The coordinator refused; the message says why.
            CoordinatorFailedError: The coordinator has a fault.
        """
        return read_reply(request, self._exchange(encode_request(request), patience_s))

    def _exchange(self, data: bytes, patience_s: float) -> bytes:
        with self._lock:
            self._number += 1
            number = str(self._number).encode()
            deadline = time.monotonic() + patience_s
            while (left := deadline - time.monotonic()) > 0:
                if not self._send(number, data, left):
                    continue
                answer = self._receive(number, min(REPEAT_S, deadline - time.monotonic()))
                if answer is not None:
                    return answer
            raise CoordinatorUnreachableError(self._reason(patience_s))

    def _send(self, number: bytes, data: bytes, left_s: float) -> bool:
        """Send as soon as there is a connection; returns whether the request was sent."""
        if not self._socket.poll(int(min(left_s, REPEAT_S) * 1000) + 1, zmq.POLLOUT):
            return False
        try:
            self._socket.send_multipart([number, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, number: bytes, patience_s: float) -> bytes | None:
        """The answer to a request, or None; answers to earlier requests are discarded."""
        deadline = time.monotonic() + patience_s
        # poll once even after the deadline: if this process was suspended, the answer may already be here
        while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000)) + 1):
            frames = self._socket.recv_multipart()
            if len(frames) == 2 and frames[0] == number:
                return frames[1]
        return None

    def _reason(self, patience_s: float) -> str:
        self._connection.look()
        if self._connection.refused:
            return f"the coordinator at {self.address} refused the key: use the key file that it was started with"
        return (
            f"the coordinator at {self.address} has not answered for {patience_s:g} s: check that it is running and "
            "that the key file is the one that it was started with"
        )

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()
            end_context(self._context)
