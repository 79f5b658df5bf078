"""Baseline of `benchmarks.exchange`: two processes, one TCP connection, as little Python as possible.

It has the same chunks, messages and arithmetic as an exchange: each side has one thread that sends and one that
receives and averages. It has no headers, no time-outs, and only the copies that a single exchange needs.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 18  # weights: 1 MiB

Floats = NDArray[np.float32]


class Side:
    """Weights and delta of one side."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weights = np.random.default_rng(0).normal(size=count).astype(np.float32)
        self.delta = np.zeros(count, np.float32)
        self._received = np.empty(CHUNK, np.float32)
        self._difference = np.empty(CHUNK, np.float32)

    def parts(self) -> list[slice]:
        """The chunks as slices."""
        return [slice(start, min(start + CHUNK, self.count)) for start in range(0, self.count, CHUNK)]

    def receive(self, connection: socket.socket, part: slice) -> Floats:
        """Receive a chunk of the other side."""
        chunk = self._received[: part.stop - part.start]
        view = memoryview(chunk).cast("B")
        while view:
            got = connection.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return chunk

    def average(self, part: slice, theirs: Floats) -> None:
        """Average by half-differences, as in `training.exchange.averaging`."""
        difference = self._difference[: len(theirs)]
        np.subtract(theirs, self.weights[part], out=difference)
        if np.isfinite(difference.dot(difference)):
            np.multiply(difference, np.float32(0.5), out=self.delta[part])
            self.weights[part] += self.delta[part]


class RawPair:
    """The initiating side, with the answering side in a child process."""

    def __init__(self, count: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-m", "benchmarks.exchange_raw", str(count), str(server.getsockname()[1])]
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            server.settimeout(60)
            self._connection, _ = server.accept()
        self._connection.setblocking(True)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._side = Side(count)

    def once(self) -> tuple[float, float]:
        """Run one exchange; returns its duration and CPU time in seconds."""
        cpu, started = time.process_time(), time.perf_counter()
        sender = threading.Thread(target=self._send)
        sender.start()
        for part in self._side.parts():
            self._side.average(part, self._side.receive(self._connection, part))
        seconds = time.perf_counter() - started
        sender.join()
        ours = time.process_time() - cpu
        assert self._child.stdout is not None
        return seconds, ours + float(self._child.stdout.readline())

    def close(self) -> None:
        """End the child."""
        self._connection.close()
        self._child.wait(10)

    def _send(self) -> None:
        # a chunk changes only after its answer has arrived, so it can be sent without a copy
        for part in self._side.parts():
            self._connection.sendall(memoryview(self._side.weights[part]).cast("B"))


def answer(count: int, port: int) -> None:
    """The answering side: answers and averages each chunk; prints its CPU time per exchange."""
    side, replies = Side(count), SimpleQueue[bytes]()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def reply() -> None:
            while chunk := replies.get():
                connection.sendall(chunk)

        sender = threading.Thread(target=reply, daemon=True)
        sender.start()
        while True:
            used = time.process_time()
            for part in side.parts():
                try:
                    theirs = side.receive(connection, part)
                except EOFError:
                    os._exit(0)
                replies.put(side.weights[part].tobytes())
                side.average(part, theirs)
            while not replies.empty():
                time.sleep(0.001)
            time.sleep(0.01)
            print(time.process_time() - used, flush=True)


if __name__ == "__main__":
    answer(int(sys.argv[1]), int(sys.argv[2]))
