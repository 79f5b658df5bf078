"""What `starling transcribe` writes: text, JSON or CTM, to the terminal, into one file, or into a file each."""

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
    """A recording in NIST's CTM: file, channel, start, duration, word, confidence; times in seconds.

    Args:
        name: Of the recording; blanks in it become underscores, since CTM's columns are separated by them.
        found: Transcribed with words.
    """
    label = re.sub(r"\s", "_", name) or "_"
    return [f"{label} 1 {w.start:.3f} {w.duration:.3f} {w.word} {w.confidence:.4f}" for w in found.words]


def entry(path: Path, found: Transcript) -> dict[str, Any]:
    """A recording as JSON."""
    return {"file": str(path), **asdict(found), "words": [asdict(word) for word in found.words]}


class Sink(ABC):
    """Where transcripts go, one after another."""

    tells_errors = True
    """Whether the terminal has to be told what could not be read."""

    def __init__(self, kind: str, model: str) -> None:
        self.kind, self.model = kind, model
        self.words = kind != "text"

    @abstractmethod
    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Take a transcript.

        Args:
            path: The recording.
            place: Its path below the folder that was named, without its suffix.
            found: What was recognized.
        """

    @abstractmethod
    def close(self) -> None:
        """Everything has come."""

    def abandon(self) -> None:
        """Not everything has come: nothing half-written stays."""
        return

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class Stream(Sink):
    """Lines on standard output as they come; JSON is one object at the end."""

    def __init__(self, kind: str, model: str, several: bool) -> None:
        super().__init__(kind, model)
        self.several = several
        self.entries: list[dict[str, Any]] = []
        self.tells_errors = kind != "json"

    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Write it, or keep it for the end."""
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
        """The JSON object."""
        if self.kind == "json":
            self._write(json.dumps({"model": self.model, "files": self.entries}) + "\n")


class OneFile(Stream):
    """The same in a file, which appears when all is done."""

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
        """Publish it."""
        try:
            super().close()
            self.file.close()
            self.partial.replace(self.path)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove what has been written."""
        self.partial.unlink(missing_ok=True)  # first: closing writes what is left, which may fail
        with suppress(OSError):
            self.file.close()


class Device(Stream):
    """The same into what is no file, such as a pipe or a terminal: written to as it comes, never replaced."""

    def __init__(self, kind: str, model: str, several: bool, path: Path) -> None:
        super().__init__(kind, model, several)
        self.tells_errors = True
        self.file = path.open("w", encoding="utf-8")

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()

    def close(self) -> None:
        """The JSON object."""
        super().close()
        self.file.close()


class Folder(Sink):
    """A file for each recording, at the same place below a folder; nothing for those that could not be read."""

    def __init__(self, kind: str, model: str, folder: Path) -> None:
        super().__init__(kind, model)
        self.folder = folder
        self.written: dict[Path, Path] = {}

    def add(self, path: Path, place: Path, found: Transcript) -> None:
        """Write its file; a second recording of the same name keeps its suffix in it."""
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
        """Nothing is left to write."""

    def _target(self, path: Path, place: Path) -> Path:
        target = self.folder / place.with_name(place.name + _SUFFIXES[self.kind])
        if self.written.setdefault(target, path) != path:
            target = self.folder / place.with_name(place.name + path.suffix + _SUFFIXES[self.kind])
            self.written[target] = path
        return target


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def open_sink(kind: str, output: Path | None, model: str, several: bool, folder: bool = False) -> Sink:
    """Where transcripts go.

    Args:
        kind: `text`, `json` or `ctm`.
        output: A file or a folder; None is standard output.
        model: Named in JSON.
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
