"""Commands and answers between a training process and its daemon: JSON lines over a non-blocking socket pair."""

import json
import select
import socket
import threading
from typing import Any

_LONGEST = 64 * 1024 * 1024


class Control:
    """One end of the connection.

    Attributes:
        closed: Whether the connection is closed at either end.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._out = bytearray()
        self._sending = threading.Lock()  # threads of movers wake the daemon, too
        self._in = bytearray()
        self.closed = False

    def wait(self, timeout_s: float) -> None:
        """Wait for data, the end of the connection, or the time-out."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._socket.fileno()

    def wake(self) -> None:
        """Wake the other side; skipped if unsent data will wake it anyway."""
        with self._sending:
            if not self._out:
                self._write(b"\n")
            self._flush()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; what does not fit into the socket's buffer is kept for the next `flush`."""
        with self._sending:
            self._out += json.dumps(message).encode() + b"\n"
            self._flush()

    def flush(self) -> None:
        """Send kept data, as much as the socket accepts."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        while self._out and (sent := self._write(self._out)):
            del self._out[:sent]

    def receive(self) -> list[dict[str, Any]]:
        """Return all messages received since the last call."""
        while not self.closed:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data or len(self._in) > _LONGEST:
                self.closed = True
            self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in[:] = rest
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()

    def _write(self, data: bytes | bytearray) -> int:
        if self.closed:
            return 0
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.closed = True
            return 0
