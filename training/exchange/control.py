"""Commands and answers between a training process and its daemon: JSON lines over a socket pair that never wait."""

import json
import select
import socket
import threading
from typing import Any

_LONGEST = 64 * 1024 * 1024


class Control:
    """One end.

    Attributes:
        closed: Whether the other end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._out = bytearray()
        self._sending = threading.Lock()  # those who wake the daemon are threads of movers, too
        self._in = bytearray()
        self.closed = False

    def wait(self, timeout_s: float) -> None:
        """Wait until something comes, or the other end is closed, or the time is over."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def wake(self) -> None:
        """Wake the other side up; an unread wake-up is as good as two."""
        with self._sending:
            if not self._out:
                self._write(b"\n")
            self._flush()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or keep it for the next `flush` if the other side is slow."""
        with self._sending:
            self._out += json.dumps(message).encode() + b"\n"
            self._flush()

    def flush(self) -> None:
        """Send what is kept, as far as it goes."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        while self._out and (sent := self._write(self._out)):
            del self._out[:sent]

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have come."""
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
