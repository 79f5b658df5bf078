"""Output of `starling transcribe`: text, JSON or CTM, to standard output, one file, or one file per recording."""

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speech.transcriber import Transcript

_SUFFIXES = {"text": ".txt", "json": ".json", "ctm": ".ctm"}


def ctm_lines(name: str, found: Transcript) -> list[str]:
    """A transcript in NIST's CTM format: file, channel, start, duration, word, confidence; times in seconds.

    Args:
        name: Name of the recording; white space becomes underscores, since it separates CTM's columns.
        found: Transcript with words.
    """
    label = re.sub(r"\s", "_", name) or "_"
    return [f"{label} 1 {w.start:.3f} {w.duration:.3f} {w.word} {w.confidence:.4f}" for w in found.words]


def entry(path: Path, found: Transcript) -> dict[str, Any]:
    """A transcript as JSON."""
    return {"file": str(path), **asdict(found), "words": [asdict(word) for word in found.words]}


class Sink(ABC):
    """Writes transcripts, one after another; a context manager."""

    tells_errors = True
    """Whether the command prints errors on standard error, since the output does not contain them."""

    def __init__(self, kind: str, model: str) -> None:
        self.kind, self.model = kind, model
        self.words = kind != "text"

    @abstractmethod
    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Add a transcript.

        Args:
            path: The recording.
            place: Its path relative to the folder given on the command line, without its suffix.
            found: The transcript.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the output after the last transcript."""

    def abandon(self) -> None:
        """Remove partial output after an error."""
        return

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class Stream(Sink):
    """Writes lines to standard output at once; JSON as one object at the end."""

    def __init__(self, kind: str, model: str, several: bool) -> None:
        super().__init__(kind, model)
        self.several = several
        self.entries: list[dict[str, Any]] = []
        self.tells_errors = kind != "json"

    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Write the transcript, or keep it for the JSON object."""
        if self.kind == "json":
            self.entries.append(entry(path, found))
        elif not found.error:
            for line in self._lines(path, place, found):
                self._write(line + "\n")

    def _lines(self, path: Path, place: Path, found: Transcript) -> list[str]:
        if self.kind == "ctm":
            return ctm_lines(str(place), found)
        return [f"{path}: {found.text}" if self.several else found.text]

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Write the JSON object."""
        if self.kind == "json":
            self._write(json.dumps({"model": self.model, "files": self.entries}) + "\n")


class OneFile(Stream):
    """Writes the same to a file, which appears when it is complete."""

    def __init__(self, kind: str, model: str, several: bool, path: Path) -> None:
        super().__init__(kind, model, several)
        self.tells_errors = True
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.partial = _partial(path)
        self.file = self.partial.open("w", encoding="utf-8")

    def _write(self, text: str) -> None:
        self.file.write(text)

    def close(self) -> None:
        """Publish the file."""
        try:
            super().close()
            self.file.close()
            self.partial.replace(self.path)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the partial file."""
        self.partial.unlink(missing_ok=True)  # before closing, which writes the buffer and may fail
        with suppress(OSError):
            self.file.close()


class Device(Stream):
    """Writes the same to a path that is not a regular file, such as a named pipe; it is never replaced."""

    def __init__(self, kind: str, model: str, several: bool, path: Path) -> None:
        super().__init__(kind, model, several)
        self.tells_errors = True
        self.file = path.open("w", encoding="utf-8")

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()

    def close(self) -> None:
        """Write the JSON object and close the output."""
        super().close()
        self.file.close()


class Folder(Sink):
    """Writes a file for each recording, at the same relative path in a folder; none for unreadable recordings."""

    def __init__(self, kind: str, model: str, folder: Path) -> None:
        super().__init__(kind, model)
        self.folder = folder
        self.written: dict[Path, Path] = {}

    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Write the recording's file; if its name is taken by another recording, the name includes the suffix."""
        if found.error:
            return
        target = self._target(path, place)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "json":
            text = json.dumps({"model": self.model, **entry(path, found)}) + "\n"
        else:
            lines = ctm_lines(str(place), found) if self.kind == "ctm" else [found.text]
            text = "".join(f"{line}\n" for line in lines)
        partial = _partial(target)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: each file is complete."""

    def _target(self, path: Path, place: Path) -> Path:
        target = self.folder / place.with_name(place.name + _SUFFIXES[self.kind])
        if self.written.setdefault(target, path) != path:
            target = self.folder / place.with_name(place.name + path.suffix + _SUFFIXES[self.kind])
            self.written[target] = path
        return target


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def open_sink(kind: str, output: Path | None, model: str, several: bool, folder: bool = False) -> Sink:
    """Open the output for transcripts.

    Args:
        kind: `text`, `json` or `ctm`.
        output: A file or a folder; None is standard output.
        model: Name of the model, for JSON.
        several: Whether there are several recordings.
        folder: Whether the output is a folder even if it does not exist yet.
    """
    if output is None:
        return Stream(kind, model, several)
    if output.exists() and not output.is_file() and not output.is_dir():
        return Device(kind, model, several, output)
    if folder or output.is_dir():
        return Folder(kind, model, output)
    return OneFile(kind, model, several, output)
