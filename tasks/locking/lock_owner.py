"""The owner of a lock: its description for others, and whether it is known to be dead."""

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock."""

    run: str
    """Name of the run."""
    link: str = ""
    """URL of the run in the Prefect UI."""
    place: str = ""
    """Host, boot and process namespace."""
    pid: int = 0
    """Process id there."""
    started: str = ""
    """Start time of the process in clock ticks, since process ids are reused."""
    since: str = ""
    """Time of the request for the lock."""
    token: str = ""
    """Unique token of the request."""

    @classmethod
    def here(cls, run: str, link: str = "") -> "LockOwner":
        """This process, for a run."""
        pid, now = os.getpid(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        return cls(run, link, _place(), pid, _started(pid), now, uuid4().hex)

    @classmethod
    def read(cls, value: Any) -> "LockOwner":
        """Parse the value of a variable; an unknown owner if the value is something else."""
        known = value if isinstance(value, dict) else {}
        texts = {name: str(known.get(name, "")) for name in ("link", "place", "started", "since", "token")}
        pid = known.get("pid", 0)
        return cls(run=str(known.get("run", "an unknown run")), pid=pid if isinstance(pid, int) else 0, **texts)

    def gone(self) -> bool:
        """Whether the process is known to be dead; only its own machine knows."""
        return bool(self.pid) and self.place == _place() and _started(self.pid) != self.started

    def __str__(self) -> str:
        link = f" ({self.link})" if self.link else ""
        host = self.place.partition("/")[0]
        return f"run {self.run}{link}, process {self.pid} on {host}, since {self.since}"


def _place() -> str:
    """Scope in which a process id is unique: host, boot and process namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # not Linux: a unique value, so leases only end by expiry
        parts.append(uuid4().hex)
    return "/".join(parts)


def _started(pid: int) -> str:
    """Start time of a process in clock ticks; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
