"""The identity of a process, for files that name one: its id alone may belong to another process by now."""

import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, and no later one that has been given its id.

    Attributes:
        pid: Process id.
        place: Scope in which ids are unique at a time: host, boot and process namespace.
        started: Start time of the process; empty if it did not exist, or had ended.
    """

    pid: int = 0
    place: str = ""
    started: str = ""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The process that has an id now."""
        return cls(pid, _place(), _started(pid))

    @classmethod
    def read(cls, value: Any) -> "ProcessIdentity":
        """Parse a JSON object with the fields above, and maybe others; without them, it is no known process."""
        known = value if isinstance(value, dict) else {}
        pid = known.get("pid", 0)
        return cls(pid if isinstance(pid, int) else 0, str(known.get("place", "")), str(known.get("started", "")))

    def alive(self) -> bool:
        """Whether the process is known to run; only its own machine knows."""
        return bool(self.started) and self == ProcessIdentity.of(self.pid)

    def gone(self) -> bool:
        """Whether the process is known to have ended; only its own machine knows."""
        return bool(self.pid) and self.place == _place() and _started(self.pid) != self.started

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this process, and never to another one with its id; returns whether it was sent."""
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(self.pid)  # before the check: psutil signals only the process that it found here
            if self.alive():
                process.send_signal(number)
                return True
        return False


def _place() -> str:
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # not Linux
        parts.append(f"{psutil.boot_time():.0f}")
    return "/".join(parts)


def _started(pid: int) -> str:
    """Start time of a process; empty if it does not exist or is a zombie."""
    if not Path("/proc/self/stat").exists():
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(pid)
            return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
        return ""
    try:
        # in clock ticks since the boot: psutil's seconds since the epoch change when the clock is set
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
