"""A node's own copy of its journal lines: they reach the store late when it is away, but they reach it, each once."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.store.messages import Message

PORTION = 65536
"""Bytes that one message carries at most."""


class Spool:
    """Files of journal lines, and how much of each the store has.

    Args:
        folder: The node's.
        session: Lines of other sessions are void, and are deleted.
        incarnation: Names the file that is written.
    """

    def __init__(self, folder: Path, session: str, incarnation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("lines-*.jsonl"):
            if not path.name.startswith(f"lines-{session}-"):
                path.unlink(missing_ok=True)
        # a predecessor that was killed may have left lines that the store does not have
        self._sent = {path.name: 0 for path in folder.glob(f"lines-{session}-*.jsonl")}
        self._name = f"lines-{session}-{incarnation}.jsonl"
        self._sent[self._name] = 0
        self._fd = os.open(folder / self._name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        os.write(self._fd, (json.dumps(dict(line)) + "\n").encode())

    def portions(self) -> list[Message]:
        """What to send next: for one file, lines that the store does not have."""
        for name, offset in self._sent.items():
            try:
                with (self._folder / name).open("rb") as file:
                    file.seek(offset)
                    data = file.read(PORTION)
            except FileNotFoundError:
                continue
            end = data.rfind(b"\n") + 1
            if end:
                lines = [line for text in data[:end].splitlines() if (line := _parse(text)) is not None]
                return [{"name": name, "offset": offset, "end": offset + end, "lines": lines}]
        return []

    def arrived(self, offsets: Mapping[str, Any]) -> None:
        """The store has told how much of a file it has."""
        for name, offset in offsets.items():
            if name in self._sent:
                self._sent[name] = int(offset)

    def close(self) -> None:
        """Close the file; it stays until the session ends."""
        os.close(self._fd)


def _parse(text: bytes) -> Message | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
