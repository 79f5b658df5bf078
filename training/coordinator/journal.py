"""The journal: metrics appended to a local JSON-lines file, so that no tracking server can cost a training step.

The coordinator writes it from what the learners report; each learner counts its own steps. A resumed run appends a
`resume` line with the steps that its learners start from, or `start` if there is no checkpoint; readers drop what was
written beyond those steps.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.coordinator.line_file import LineFile

Entry = dict[str, Any]
PORTION = 1 << 18
"""Bytes that are read at a time."""
_LONGEST = 1 << 22
_MOST_JOINED = 8
"""Places in a damaged line at which an entry is looked for: objects within objects are no entries."""


class Journal:
    """Appends entries, one JSON object a line, each written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LineFile(path)

    @property
    def size(self) -> int:
        """Bytes of whole lines."""
        return self._file.size

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry.

        Args:
            kind: `start`, `resume`, `step`, `valid`, `epoch`, `view`, `system`, `bad` or `end`.
            values: JSON values.

        Raises:
            OSError: The disk does not take it.
        """
        self.append([json.dumps({"kind": kind, **values}, sort_keys=True)])

    def append(self, lines: Iterable[str]) -> None:
        """Append entries as JSON texts, in their order.

        Raises:
            OSError: The disk does not take all of them.
        """
        self._file.append("".join(f"{line}\n" for line in lines).encode())
        if self._file.trouble is not None:
            raise self._file.trouble

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_lines(lines: Iterable[str]) -> Iterator[Entry]:
    """Entries of complete, valid lines; a torn line is passed over, but not the whole one that joined it."""
    for line in lines:
        entry = _parsed(line)
        start = 0
        for _ in range(_MOST_JOINED):
            if isinstance(entry, dict) or (start := line.find('{"', start + 1)) < 0:
                break
            entry = _parsed(line[start:])
        if isinstance(entry, dict) and "kind" in entry:
            yield entry


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter for brackets without end
        return None


def read_journal(path: Path) -> list[Entry]:
    """All entries that count: those that a resume made void are left out."""
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
    """Whether what an entry tells of is done again after a later `start` or `resume`."""
    if restart["kind"] == "start" or entry["kind"] == "end":
        return True
    if entry["kind"] in ("valid", "epoch"):
        # an epoch may have ended, and no checkpoint followed, though none of its steps is lost
        return _number(entry, "epoch") > _number(restart, "epoch", math.inf)
    if "learner" in entry:
        # steps are each learner's own; one that the checkpoint does not know starts from its first step again
        steps = restart.get("steps")
        return _number(entry, "step") > (_number(steps, str(entry["learner"])) if isinstance(steps, dict) else 0)
    return _number(entry, "step") > _number(restart, "step")


def _number(entry: Entry, name: str, default: float = 0) -> float:
    """A number of an entry; the default where it is missing or is none, as in a line of another version."""
    value = entry.get(name, default)
    return value if isinstance(value, int | float) else default


@dataclass(frozen=True)
class Position:
    """How far a reader of a journal is."""

    offset: int = 0
    """Bytes read; below 0 stands for a place near the end."""
    file: int = 0
    """The file's number (inode); 0 if it is not known. Another file of the same name is read from its beginning."""


def read_on(path: Path, position: Position, limit: int = PORTION) -> tuple[Position, bytes]:
    """Complete lines that follow a position, some `limit` bytes of them at most.

    A journal that was begun anew, as a shorter or another file, is read from its beginning; half a line waits for its
    other half.

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
    """Reads what was appended since the last call; for whoever follows a training.

    Args:
        path: The journal; it may come later, be cut or be begun anew.
        whole: Whether to begin with its first line; else with the last ones.
    """

    def __init__(self, path: Path, whole: bool = True) -> None:
        self.path = path
        self._position = Position(0 if whole else -1)

    def new_entries(self) -> list[Entry]:
        """Entries of the complete lines that have come since the last call."""
        entries: list[Entry] = []
        while True:
            self._position, lines = read_on(self.path, self._position)
            if not lines:
                return entries
            entries += parse_lines(lines.decode("utf-8", errors="replace").splitlines())
