"""The journal: metrics appended to a local JSON-lines file, so that a tracking outage never delays a training step.

The coordinator writes it from the learners' reports; each learner counts its own steps. A resumed run appends a
`resume` line with the steps from which its learners continue, or `start` if there is no checkpoint; readers drop what
was written beyond those steps.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
PORTION = 1 << 18
"""Bytes read at a time."""
_LONGEST = 1 << 22


class Journal:
    """Appends entries, one JSON object a line, each written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LineFile(path)

    @property
    def size(self) -> int:
        """Bytes of complete lines."""
        return self._file.size

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry.

        Args:
            kind: `start`, `resume`, `step`, `valid`, `epoch`, `view`, `system`, `bad` or `end`.
            values: JSON values.

        Raises:
            OSError: The entry cannot be written.
        """
        self.append([json.dumps({"kind": kind, **values}, sort_keys=True)])

    def append(self, lines: Iterable[str]) -> None:
        """Append entries, given as JSON texts, in order.

        Raises:
            OSError: Not all of them can be written.
        """
        self._file.append("".join(f"{line}\n" for line in lines).encode())
        if self._file.trouble is not None:
            raise self._file.trouble

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_lines(lines: Iterable[str]) -> Iterator[Entry]:
    """Entries of complete, valid lines; skips others, such as a line that is being written."""
    for line in lines:
        entry = _parsed(line)
        if isinstance(entry, dict) and "kind" in entry:
            yield entry


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        return None


def read_journal(path: Path) -> list[Entry]:
    """All valid entries, without those that a later `resume` or `start` made void."""
    if not path.exists():
        return []
    kept: list[Entry] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for entry in parse_lines(file):
            if entry["kind"] in ("start", "resume"):
                kept = [old for old in kept if not _is_void(old, entry)]
            kept.append(entry)
    return kept


def _is_void(entry: Entry, restart: Entry) -> bool:
    """Whether the steps or epoch of an entry are repeated after a later `start` or `resume`."""
    if restart["kind"] == "start" or entry["kind"] == "end":
        return True
    if entry["kind"] in ("valid", "epoch"):
        # the last checkpoint may be older than an epoch's end although it contains all of the epoch's steps
        return _number(entry, "epoch") > _number(restart, "epoch", math.inf)
    if "learner" in entry:
        # steps are counted per learner; one that the checkpoint does not know starts from its first step
        steps = restart.get("steps")
        return _number(entry, "step") > (_number(steps, str(entry["learner"])) if isinstance(steps, dict) else 0)
    return _number(entry, "step") > _number(restart, "step")


def _number(entry: Entry, name: str, default: float = 0) -> float:
    """A number of an entry; the default if it is missing or not a number, as in a line of another version."""
    value = entry.get(name, default)
    return value if isinstance(value, int | float) else default


@dataclass(frozen=True)
class Position:
    """A reader's position in a journal."""

    offset: int = 0
    """Bytes read; negative means near the end."""
    file: int = 0
    """The file's inode; 0 if it is unknown. Another file of the same name is read from its start."""


def read_on(path: Path, position: Position, limit: int = PORTION) -> tuple[Position, bytes]:
    """Read complete lines that follow a position, up to about `limit` bytes.

    A journal that was replaced or truncated is read from its start; an incomplete line is left for the next call.

    Returns:
        The position after these lines, and the lines.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            offset = position.offset
            if offset > about.st_size or position.file not in (0, about.st_ino):
                offset = 0
            elif offset < 0:
                offset = max(0, about.st_size - limit)
                file.seek(offset)
                offset += len(file.readline(_LONGEST)) if offset else 0
            file.seek(offset)
            data = file.read(limit)
            if len(data) == limit and b"\n" not in data:
                data += file.readline(_LONGEST)
    except FileNotFoundError:
        return position, b""
    lines = data[: data.rfind(b"\n") + 1]
    return Position(offset + len(lines), about.st_ino), lines


class JournalTail:
    """Follows a journal: reads what was appended since the last call.

    Args:
        path: The journal; it may be created later, truncated or replaced.
        whole: Whether to start with its first line; else with the last ones.
    """

    def __init__(self, path: Path, whole: bool = True) -> None:
        self.path = path
        self._position = Position(0 if whole else -1)

    def new_entries(self) -> list[Entry]:
        """Entries of the complete lines that were appended since the last call."""
        entries: list[Entry] = []
        while True:
            self._position, lines = read_on(self.path, self._position)
            if not lines:
                return entries
            entries += parse_lines(lines.decode("utf-8", errors="replace").splitlines())


# --- files of whole lines


_SEARCHED = 1 << 16
"""Bytes searched at a time for the last line feed."""


class LineFile:
    """Appends lines to a file that has no other writer, whole or not at all, even if the disk is full.

    A write to a full disk may write only a part, without an error. The incomplete line is truncated, so that the next
    one does not continue it.

    Args:
        path: The file; an incomplete line that a killed writer left is truncated.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.trouble: OSError | None = None
        """Why the last append was incomplete; None if it was complete."""
        self._torn: int | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if (whole := _whole_bytes(self._fd)) < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, whole)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file, without an incomplete line that could not be truncated yet."""
        return os.fstat(self._fd).st_size if self._torn is None else self._torn

    def append(self, lines: bytes) -> int:
        """Append as many whole lines as the disk accepts.

        Args:
            lines: The lines, each with its line feed.

        Returns:
            Bytes appended; if these are not all, `trouble` says why.
        """
        self.trouble = None
        done = 0
        try:
            self._cut()
            before = self._torn = self.size
            while done < len(lines):
                # after a short write, the next write succeeds or raises the reason
                done += os.write(self._fd, lines[done:])
                self._torn = before + lines.rfind(b"\n", 0, done) + 1
            self._torn = None
        except OSError as error:
            self.trouble = error
        done = lines.rfind(b"\n", 0, done) + 1
        with suppress(OSError):  # the next append tries again
            self._cut()
        return done

    def _cut(self) -> None:
        """Truncate an incomplete line that a failed append left."""
        if self._torn is not None:
            os.ftruncate(self._fd, self._torn)
            self._torn = None

    def read(self, offset: int, limit: int) -> bytes:
        """Read up to `limit` bytes from an offset."""
        return os.pread(self._fd, max(0, min(limit, self.size - offset)), offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _whole_bytes(fd: int) -> int:
    """Number of bytes up to and including the last line feed."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _SEARCHED)
        place = os.pread(fd, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0
