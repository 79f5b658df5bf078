"""The thread that sends a node's heartbeats."""

import threading
from collections.abc import Callable


class HeartbeatThread:
    """Calls a function again and again, after a pause or when it is woken.

    Args:
        beat: Exchanges one heartbeat.
        pause_s: Returns the seconds until the next one.

    Attributes:
        lock: Held during a heartbeat: joining and leaving wait for it.
    """

    def __init__(self, beat: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self._beat, self._pause_s = beat, pause_s
        self._wake, self._stopping = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Send the next heartbeat at once."""
        self._wake.set()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stopping.set()
        self._wake.set()

    def join(self, patience_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._pause_s())
            self._wake.clear()
            with self.lock:
                if not self._stopping.is_set():
                    self._beat()
