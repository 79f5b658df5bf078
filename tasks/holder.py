"""Who holds a lock: what others are told of it, and whether it is known to be dead."""

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    run: str
    """Name of the run."""
    link: str = ""
    """Where the Prefect UI shows it."""
    place: str = ""
    """Host, and what tells its containers and boots apart."""
    pid: int = 0
    """Process number there."""
    started: str = ""
    """When that process started, in the system's ticks; process numbers come again."""
    since: str = ""
    """When it asked for the lock."""
    token: str = ""
    """Tells this asking from all others."""

    @classmethod
    def here(cls, run: str, link: str = "") -> "Holder":
        """This process, for a run."""
        pid, now = os.getpid(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        return cls(run, link, _place(), pid, _started(pid), now, uuid4().hex)

    @classmethod
    def read(cls, value: Any) -> "Holder":
        """The holder that a variable's value names; unknown if the value is something else."""
        known = value if isinstance(value, dict) else {}
        texts = {name: str(known.get(name, "")) for name in ("link", "place", "started", "since", "token")}
        pid = known.get("pid", 0)
        return cls(run=str(known.get("run", "an unknown run")), pid=pid if isinstance(pid, int) else 0, **texts)

    def gone(self) -> bool:
        """Whether the process is known to be dead, which only its own machine can tell."""
        return bool(self.pid) and self.place == _place() and _started(self.pid) != self.started

    def __str__(self) -> str:
        link = f" ({self.link})" if self.link else ""
        host = self.place.partition("/")[0]
        return f"run {self.run}{link}, process {self.pid} on {host}, since {self.since}"


def _place() -> str:
    """Where this process's number means something: host, boot and process namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # not Linux: unknown, and stale leases end by time alone
        parts.append(uuid4().hex)
    return "/".join(parts)


def _started(pid: int) -> str:
    """Start of a process in ticks; empty if there is none of that number, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
