"""A node's spool of journal lines, so that each reaches the coordinator exactly once, also after an outage."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.coordinator.line_file import LineFile
from training.coordinator.messages import JsonObject
from training.coordinator.requests import SpoolPortion

PORTION = 65536
"""Maximum bytes of journal lines per message."""
MOST_WAITING = 1 << 24
"""Maximum bytes kept in memory while the disk is full: hours of lines."""
_log = logging.getLogger(__name__)


class JournalSpool:
    """Files of journal lines, and how much of each the coordinator has received.

    Args:
        folder: The node's folder.
        session: Name of the session; lines of other sessions are void and are deleted.
        incarnation: Part of the name of the file that is written.
    """

    def __init__(self, folder: Path, session: str, incarnation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("lines-*.jsonl"):
            if not path.name.startswith(f"lines-{session}-"):
                path.unlink(missing_ok=True)
        # an earlier incarnation that was killed may have left lines that the coordinator does not have
        self._sent = {path.name: 0 for path in folder.glob(f"lines-{session}-*.jsonl")}
        self._name = f"lines-{session}-{incarnation}.jsonl"
        self._sent[self._name] = 0
        self._file = LineFile(folder / self._name)
        self._waiting = bytearray()
        """Lines that could not be written to the file yet."""
        self._failure_logged, self._dropped = False, 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; if the disk is full, it waits in memory and is sent from there."""
        data = (json.dumps(dict(line)) + "\n").encode()
        if len(self._waiting) + len(data) > MOST_WAITING:
            self._dropped += 1
            return
        self._waiting += data
        self._write_out()

    def _write_out(self) -> None:
        del self._waiting[: self._file.append(bytes(self._waiting))]
        if self._waiting:
            if not self._failure_logged:
                path, why = self._file.path, self._file.trouble
                _log.error("%s cannot be written, journal lines wait in memory: %s", path, why)
            self._failure_logged = True
            return
        if self._failure_logged:
            _log.warning("%s can be written again; %d journal lines are lost", self._file.path, self._dropped)
        self._failure_logged, self._dropped = False, 0

    def portions(self) -> tuple[SpoolPortion, ...]:
        """What to send next: lines of one file that the coordinator does not have."""
        if self._waiting:
            self._write_out()
        for name, offset in self._sent.items():
            data = self._read(name, offset)
            end = data.rfind(b"\n") + 1
            if end:
                lines = [line for text in data[:end].splitlines() if (line := _parse(text)) is not None]
                return (SpoolPortion(name=name, offset=offset, end=offset + end, lines=tuple(lines)),)
        return ()

    def _read(self, name: str, offset: int) -> bytes:
        """Bytes of a file from an offset; lines that wait in memory count as its end."""
        if name == self._name:
            written = self._file.read(offset, PORTION)
            start = offset + len(written) - self._file.size
            return written + bytes(self._waiting[max(0, start) : max(0, start) + PORTION - len(written)])
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(PORTION)
        except FileNotFoundError:
            return b""

    def arrived(self, offsets: Mapping[str, int]) -> None:
        """Record how much of each file the coordinator has received."""
        for name, offset in offsets.items():
            if name in self._sent:
                self._sent[name] = offset

    def close(self) -> None:
        """Close the file; it is kept until the session ends."""
        if self._waiting or self._dropped:
            _log.error("journal lines of this node are lost: %s cannot be written", self._file.path)
        self._file.close()


def _parse(text: bytes) -> JsonObject | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
