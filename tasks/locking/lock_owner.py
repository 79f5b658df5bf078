"""The owner of a lock: its description for others, and whether it is known to be dead."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from training.processes.identity import ProcessIdentity


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
    """Start time of the process, since process ids are reused."""
    since: str = ""
    """Time of the request for the lock."""
    token: str = ""
    """Unique token of the request."""

    @classmethod
    def here(cls, run: str, link: str = "") -> "LockOwner":
        """This process, for a run."""
        process, now = ProcessIdentity.of(os.getpid()), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        return cls(run, link, process.place, process.pid, process.started, now, uuid4().hex)

    @classmethod
    def read(cls, value: Any) -> "LockOwner":
        """Parse the value of a variable; an unknown owner if the value is something else."""
        known = value if isinstance(value, dict) else {}
        texts = {name: str(known.get(name, "")) for name in ("link", "since", "token")}
        process = ProcessIdentity.read(value)
        words: dict[str, Any] = {**vars(process), **texts}
        return cls(run=str(known.get("run", "an unknown run")), **words)

    def gone(self) -> bool:
        """Whether the process is known to be dead; only its own machine knows."""
        return ProcessIdentity(self.pid, self.place, self.started).gone()

    def __str__(self) -> str:
        link = f" ({self.link})" if self.link else ""
        host = self.place.partition("/")[0]
        return f"run {self.run}{link}, process {self.pid} on {host}, since {self.since}"
