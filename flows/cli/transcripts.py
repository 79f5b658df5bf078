"""Output of `starling transcribe`, in any format: to standard output, one file, or one file per recording."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from configurable.files import publish_file, replace_file, temporary_file
from recognition.subtitles import ctm, srt, vtt
from recognition.transcriber import Transcript

TIMED: dict[str, Callable[[str, Transcript], str]] = {"ctm": ctm, "srt": srt, "vtt": vtt}
"""Formats with word times: functions of a recording's name and its transcript."""
_SUFFIXES = {"text": ".txt", "json": ".json", **{kind: f".{kind}" for kind in TIMED}}
_SINGLE = ("srt", "vtt")
"""Formats of which a file describes one recording."""
_ESCAPED = "backslashreplace"
"""How names that are not UTF-8 are written."""


def entry(path: Path, transcript: Transcript) -> dict[str, Any]:
    """A transcript as JSON."""
    value = {"file": str(path), **asdict(replace(transcript, pieces=()))}
    value["words"] = [asdict(word) for word in transcript.words]
    return {name: item for name, item in value.items() if item or name not in ("nbest", "language", "pieces")}


def numbered(name: str, transcript: Transcript) -> str:
    """The best hypotheses of a recording as text, a line each, which begins with NAME-1, NAME-2 and so on.

    Args:
        name: Name of the recording.
        transcript: Transcript with its best hypotheses.
    """
    return "".join(
        f"{name}-{number} {alternative.text}".rstrip() + "\n" for number, alternative in enumerate(transcript.nbest, 1)
    )


class Sink(ABC):
    """Writes transcripts, one after another; a context manager."""

    tells_errors = True
    """Whether the command prints errors on standard error, since the output does not contain them."""

    def __init__(self, kind: str, model: str) -> None:
        self.kind, self.model = kind, model
        self.words, self.timed = kind != "text", kind in TIMED

    @abstractmethod
    def add(self, path: Path, place: Path, transcript: Transcript) -> None:
        """Add a transcript.

        Args:
            path: The recording.
            place: Its name, which no other recording has: its path relative to the folder given on the command line,
                without its suffix.
            transcript: The transcript.
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

    def add(self, path: Path, place: Path, transcript: Transcript) -> None:
        """Write the transcript, or keep it for the JSON object."""
        if self.kind == "json":
            self.entries.append(entry(path, transcript))
        elif not transcript.error:
            self._write(self._text(path, place, transcript))

    def _text(self, path: Path, place: Path, transcript: Transcript) -> str:
        if self.kind in TIMED:
            return TIMED[self.kind](str(place), transcript)
        if transcript.nbest:
            return numbered(str(place), transcript)
        return f"{path}: {transcript.text}\n" if self.several else f"{transcript.text}\n"

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
        self._temporary = ExitStack()
        self.file, self.partial = self._temporary.enter_context(temporary_file(path.parent, subject=str(path)))

    def _write(self, text: str) -> None:
        self.file.write(text.encode("utf-8", _ESCAPED))

    def close(self) -> None:
        """Publish the file."""
        try:
            super().close()
            publish_file(self.partial, self.path, sync=False)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file, and remove it unless it was published."""
        self._temporary.close()


class Device(Stream):
    """Writes the same to a path that is not a regular file, such as a named pipe; it is never replaced."""

    def __init__(self, kind: str, model: str, several: bool, path: Path) -> None:
        super().__init__(kind, model, several)
        self.tells_errors = True
        self.file = path.open("w", encoding="utf-8", errors=_ESCAPED)

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

    def add(self, path: Path, place: Path, transcript: Transcript) -> None:
        """Write the recording's file."""
        if transcript.error:
            return
        target = self.folder / place.with_name(place.name + _SUFFIXES[self.kind])
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "json":
            text = json.dumps({"model": self.model, **entry(path, transcript)}) + "\n"
        else:
            plain = numbered(str(place), transcript) if transcript.nbest else f"{transcript.text}\n"
            text = TIMED[self.kind](str(place), transcript) if self.kind in TIMED else plain
        replace_file(target, text.encode("utf-8", _ESCAPED))

    def close(self) -> None:
        """Do nothing: each file is complete."""


def open_sink(kind: str, output: Path | None, model: str, several: bool, folder: bool = False) -> Sink:
    """Open the output for transcripts.

    Args:
        kind: `text`, `json`, or one of `TIMED`.
        output: A file or a folder; None is standard output.
        model: Name of the model, for JSON.
        several: Whether there are several recordings.
        folder: Whether the output is a folder even if it does not exist yet.

    Raises:
        ValueError: Subtitles of several recordings would go into one file.
    """
    if several and kind in _SINGLE and not (folder or (output and output.is_dir())):
        raise ValueError(f"--format {kind} makes one file per recording: give --output FOLDER/ for several of them")
    if output is None:
        return Stream(kind, model, several)
    if output.exists() and not output.is_file() and not output.is_dir():
        return Device(kind, model, several, output)
    if folder or output.is_dir():
        return Folder(kind, model, output)
    return OneFile(kind, model, several, output)
