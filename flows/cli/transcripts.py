"""Output of `starling transcribe`, in any format: to standard output, one file, or one file per recording."""

import errno
import fcntl
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from configurable.files import publish_file, replace_file, temporary_file
from recognition.subtitles import ctm, srt, vtt
from recognition.transcriber import MAX_SECONDS, Transcript
from storage.corpora import Utterance
from storage.corpora.table import write_table

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

    def has(self, path: Path) -> bool:
        """Whether it has the transcript of a recording already, from a command that was interrupted."""
        return False

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


@dataclass(frozen=True)
class _Heard:
    """What is remembered of a recording: where in the journal, and which version of the file it was."""

    offset: int
    size: int
    mtime_ns: int


class UtteranceTable(Sink):
    """Writes a table with a row for each utterance of the recordings: a source of kind `table` for a configuration.

    What is said between two pauses is an utterance; a short recording with one piece of speech is one as a whole. Audio
    is named, not copied. Finished recordings are noted in a journal beside the table (`NAME.part`), so that a command
    that was interrupted goes on when it is given again; the table appears when it is complete.

    Args:
        model: Name of the model.
        path: The table.
        recordings: Paths and names of all recordings.
        speakers: Speaker of each recording.
        about: What the transcripts depend on; a journal of something else is not used.

    Attributes:
        utterances: Number of rows, and of those with a confidence of at least each of `LIMITS`; after `close`.

    Raises:
        ValueError: Another command is writing the table.
    """

    LIMITS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
    COLUMNS = ("least_confidence", "model", "model_digest")
    """Columns besides the utterances' own: confidence of the least certain word, where it is known, and the model."""
    _FIELDS = ("id", "audio", "start", "end", "text", "speaker", "confidence")

    def __init__(
        self,
        model: str,
        path: Path,
        recordings: Sequence[tuple[Path, Path]],
        speakers: Sequence[str],
        about: Mapping[str, Any],
    ) -> None:
        super().__init__("table", model)
        self.path, self.about, self.utterances = path, {"journal": 1, **about}, dict.fromkeys(self.LIMITS, 0)
        self._recordings, self._speakers = recordings, speakers
        path.parent.mkdir(parents=True, exist_ok=True)
        self.journal = path.with_name(f"{path.name}.part")
        self._file = self.journal.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another command is writing {path}: wait for its end, or give another --output") from None
        except OSError:  # some network disks do not support locks
            pass
        self._heard = self._read_journal()

    def _read_journal(self) -> dict[str, _Heard]:
        """The recordings that an interrupted command has finished; a line that it did not finish is removed."""
        heard: dict[str, _Heard] = {}
        valid = 0
        with self.journal.open("rb") as journal:
            for number, line in enumerate(journal):
                value = _journal_line(line)
                if value is None or (number == 0 and value != self.about):
                    break
                if number:
                    heard[value["audio"]] = _Heard(valid, value["size"], value["mtime_ns"])
                valid += len(line)
        self._file.truncate(valid)
        if not valid:
            self._write(self.about)
        return heard

    def _write(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.journal))

    @override
    def has(self, path: Path) -> bool:
        heard, about = self._heard.get(str(path.absolute())), _stat(path)
        return heard is not None and about == (heard.size, heard.mtime_ns)

    @override
    def add(self, path: Path, place: Path, transcript: Transcript) -> None:
        name, (size, mtime_ns) = str(path.absolute()), _stat(path)
        self._heard.pop(name, None)  # of the recording as it was before
        if transcript.error:
            return
        whole = len(transcript.pieces) == 1 and transcript.seconds <= MAX_SECONDS
        pieces = [
            {
                "start": 0.0 if whole else round(piece.start, 3),
                "end": None if whole else round(piece.start + piece.seconds, 3),
                "text": piece.text,
                "confidence": round(piece.confidence, 4),
                "least": None if piece.least is None else round(piece.least, 4),
            }
            for piece in transcript.pieces
            if piece.text
        ]
        self._heard[name] = _Heard(self._file.seek(0, os.SEEK_END), size, mtime_ns)
        self._write({"audio": name, "size": size, "mtime_ns": mtime_ns, "pieces": pieces})

    def _rows(self) -> Iterator[tuple[Utterance, dict[str, object]]]:
        about = {"model": self.model, "model_digest": str(self.about["model"])[:16]}
        with self.journal.open("rb") as journal:
            for (path, place), speaker in zip(self._recordings, self._speakers, strict=True):
                audio = str(path.absolute())
                if (heard := self._heard.get(audio)) is None:
                    continue
                journal.seek(heard.offset)
                for piece in json.loads(journal.readline())["pieces"]:
                    for limit in self.LIMITS:
                        self.utterances[limit] += piece["confidence"] >= limit
                    name = str(place) if piece["end"] is None else f"{place}-{round(piece['start'] * 1000):08d}"
                    timed = {field: piece[field] for field in ("start", "end", "confidence")}
                    utterance = Utterance(name, audio, piece["text"], speaker, "", **timed)
                    yield utterance, {"least_confidence": piece["least"], **about}

    @override
    def close(self) -> None:
        try:
            write_table(self.path, self._rows(), self._FIELDS, self.COLUMNS)
            self.journal.unlink(missing_ok=True)
        finally:
            self.abandon()

    @override
    def abandon(self) -> None:
        self._file.close()  # the journal stays: the same command goes on with it


def _journal_line(line: bytes) -> dict[str, Any] | None:
    """A line of a table's journal; None if it is incomplete."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(value, dict) and ("journal" in value or {"audio", "size", "mtime_ns", "pieces"} <= value.keys())
    return value if whole else None


def _stat(path: Path) -> tuple[int, int]:
    """Size and time of change of a file; zeros if there is none."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


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
