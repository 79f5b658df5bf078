"""Doubtful utterances of a server, kept for people who transcribe them, and for trainings after that.

A folder has the audio, and the table `collected.csv`, to which the server adds a row for each utterance after its audio
is there. `offer_rows` copies new rows to `metadata.csv`, the table that people correct: the server never touches that
one, and nothing that is in it is changed. The folder is then a corpus of kind `table`.
"""

from __future__ import annotations

import csv
import io
import os
import re
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from configurable.files import create_private_file, replace_file
from recognition.transcriber import SpokenPiece
from speech.audio import decode_audio, encode_flac
from storage.corpora.table import first_rows, table_shape
from storage.disks import free_bytes

if TYPE_CHECKING:
    from recognition.serving.metrics import ServeMetrics  # whose package is not needed to offer rows

COLLECTED, TABLE = "collected.csv", "metadata.csv"
CHECKED, MARK = "checked", "x"
"""The column that says that a person has corrected the text of a row, and its value then."""
COLUMNS = ("id", "audio", "text", CHECKED, "hypothesis", "confidence", "seconds", "model", "version", "time")
REASONS = ("busy", "full", "length", "many", "failed")
"""Why a doubtful utterance is not collected: others wait for the disk, the folder or its disk is full, it is too short
or too long, the recording has many of them, or something has failed."""
_SHORTEST_S, _LONGEST_S = 0.3, 60.0
"""Of an utterance that is worth a person's time, and that can be trained on."""
_OF_A_RECORDING = 20
"""Most utterances of one recording: a single long one must not fill the folder."""
_WAITING_BYTES = 128_000_000
"""Audio that waits for being written; more is not collected."""
_SPARE_BYTES = 500_000_000
"""Room that is left on the disk for others."""
_MOST_ROWS = 1_000_000
"""Of a table that are read."""
_ID = re.compile(rb"\d{8}-\d{6}-[0-9a-f]{8}")
_LOOK_S = 60.0
"""Seconds between two measurements of the folder, from which people may have removed something."""

Audio = bytes | NDArray[np.floating[Any]]


@dataclass(frozen=True)
class _Offer:
    pieces: list[SpokenPiece]
    audio: Audio
    rate: int | None
    version: str

    @property
    def size(self) -> int:
        return len(self.audio) if isinstance(self.audio, bytes) else self.audio.nbytes


class Collector:
    """Writes utterances whose confidence is low to a folder, in a thread of its own.

    Nothing that goes wrong with it reaches a request: it is counted, and told once.

    Args:
        folder: The folder; made if missing, closed to other users.
        model: Name of the model.
        metrics: Figures that count what is collected, and what is not.
        below: Utterances with a lower confidence are collected; with 1, all are.
        most_mb: Most that the folder may have, in 10⁶ bytes.

    Attributes:
        on_problem: Called with a sentence when something begins to go wrong.

    Raises:
        OSError: The folder cannot be made.
        ValueError: A number has no meaning.
    """

    def __init__(
        self, folder: Path, model: str, metrics: ServeMetrics, below: float = 0.8, most_mb: float = 1000.0
    ) -> None:
        if not 0 < below <= 1:
            raise ValueError(f"utterances are collected below a confidence of {below}: give a number from 0 to 1")
        if not 0 < most_mb < 1e9:
            raise ValueError(f"the folder may have {most_mb} MB: give a positive number")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.model, self.below, self._most = folder, model, below, most_mb * 1e6
        self._figures, self._used = metrics, 0
        for reason in REASONS:
            metrics.not_collected.labels(reason)
        self.on_problem: Callable[[str], object] = lambda text: None
        self._problem, self._measured = "", -_LOOK_S
        self._offers: deque[_Offer] = deque()
        self._waiting = 0
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="collect", daemon=True)
        self._thread.start()

    def offer(self, pieces: Sequence[SpokenPiece], audio: Audio, rate: int | None, version: str) -> None:
        """Collect what is doubtful of a recording, later; returns at once.

        Args:
            pieces: The utterances in it.
            audio: An encoded file, or samples [num_samples] in ±1.
            rate: Of samples, in Hz.
            version: The model's.
        """
        unsure = (piece for piece in pieces if piece.confidence < self.below or self.below == 1)
        doubtful = sorted(unsure, key=lambda piece: piece.confidence)
        fitting = [piece for piece in doubtful if _SHORTEST_S <= piece.seconds <= _LONGEST_S]
        self._skip("length", len(doubtful) - len(fitting))
        self._skip("many", len(fitting[_OF_A_RECORDING:]))
        offer = _Offer(fitting[:_OF_A_RECORDING], audio, rate, version)
        if not offer.pieces:
            return
        with self._changed:
            if self._closed or (self._waiting and self._waiting + offer.size > _WAITING_BYTES):
                self._skip("busy", len(offer.pieces))
                return
            self._offers.append(offer)
            self._waiting += offer.size
            self._changed.notify()

    def close(self, patience_s: float = 5.0) -> None:
        """Write what waits, and end.

        Args:
            patience_s: Most time for that.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _skip(self, reason: str, count: int = 1) -> None:
        if count:
            self._figures.not_collected.labels(reason).inc(count)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offers or self._closed)
                if not self._offers:
                    return
                offer = self._offers.popleft()
            for piece in offer.pieces:
                try:
                    self._store(offer, piece)
                except Exception as error:  # a full disk, a folder that has gone, audio that cannot be cut
                    self._skip("failed")
                    self._tell(f"doubtful utterances are not collected: {error or type(error).__name__}")
            with self._changed:
                self._waiting -= offer.size

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem:
            self.on_problem(problem)
        self._problem = problem

    def _store(self, offer: _Offer, piece: SpokenPiece) -> None:
        """Write the audio of an utterance, then its row."""
        data = _encoded(offer, piece)
        if not self._has_room(len(data)):
            self._skip("full")
            self._tell(f"doubtful utterances are not collected: {self.folder} or its disk is full")
            return
        now = datetime.now(UTC)
        name = f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"
        audio = Path("audio") / f"{now:%Y-%m-%d}" / f"{name}.flac"
        for place in (self.folder / "audio", self.folder / audio.parent):
            place.mkdir(exist_ok=True, mode=0o700)
        create_private_file(self.folder / audio, data)
        text = " ".join(piece.text.split())
        row = [name, audio.as_posix(), text, "", text, f"{piece.confidence:.4f}", f"{piece.seconds:.2f}"]
        try:
            _append(self.folder / COLLECTED, [*row, self.model, offer.version, now.isoformat(timespec="seconds")])
        except OSError:
            (self.folder / audio).unlink(missing_ok=True)  # without its row nobody would ever find it
            raise
        self._used += len(data)
        self._figures.collected.inc()
        self._figures.collected_bytes.set(self._used)
        self._tell("")

    def _has_room(self, size: int) -> bool:
        now = time.monotonic()
        if now - self._measured > _LOOK_S:
            self._used, self._measured = _folder_bytes(self.folder), now
        return self._used + size <= self._most and free_bytes(self.folder) - size >= _SPARE_BYTES


def _encoded(offer: _Offer, piece: SpokenPiece) -> bytes:
    """The audio of a piece as FLAC."""
    end = piece.start + piece.seconds
    if isinstance(offer.audio, bytes):
        wave, rate = decode_audio(offer.audio, start=piece.start, end=end)
    else:
        assert offer.rate is not None
        rate = offer.rate
        wave = torch.as_tensor(offer.audio[round(piece.start * rate) : round(end * rate)])
    return encode_flac(wave, rate)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).stat().st_size
            except OSError:  # just removed
                continue
    return total


def _line(cells: Iterable[object], separator: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _append(path: Path, row: Sequence[str]) -> None:
    """Add a row to a table with one write, which other servers on the folder do not interrupt; makes the table."""
    if not path.exists():
        with suppress(FileExistsError):  # another server has just made it
            create_private_file(path, _line(COLUMNS).encode())
    with path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = size > 0 and file.read(1) != b"\n"  # by a disk that was full
    data = ("\n" * torn + _line(row)).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{path} could not be extended: the disk is full")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Offered:
    """The table that people correct."""

    path: Path
    rows: int
    """All of its rows."""
    new: int
    """Rows that were added now."""
    checked: int
    """Rows that a training reads."""
    other_marks: tuple[str, ...] = ()
    """What is in the column `checked` besides the mark: these rows are not read."""


def offer_rows(folder: Path) -> Offered:
    """Copy the rows of new utterances to the table that people correct; what is there stays as it is.

    Rows whose audio has been removed are not copied.

    Args:
        folder: A server's folder of doubtful utterances.

    Raises:
        ValueError: The folder has none, or the table lacks the columns that tell its rows apart.
    """
    source, target = folder / COLLECTED, folder / TABLE
    if not source.is_file():
        raise ValueError(
            f"{folder} has no {COLLECTED}: give the folder that a server collects doubtful utterances in "
            f"(starling serve MODEL --collect {folder})"
        )
    before, separator, header = _line(COLUMNS).encode(), ",", list(COLUMNS)
    if known := target.exists():
        before, (separator, header) = target.read_bytes(), table_shape(target)
        _check_table(target, before, header)
    ids = set(_ID.findall(before))
    new = [row for row in _unique(first_rows(source, _MOST_ROWS)) if row["id"].encode() not in ids]
    new = [row for row in new if (folder / row.get("audio", "")).is_file()]
    if new or not known:
        lines = [_line((row.get(name, "") for name in header), separator) for row in new]
        end = b"" if before.endswith(b"\n") else b"\n"
        replace_file(target, before + end + "".join(lines).encode(), sync=True)
    marks = Counter(str(row[CHECKED]).strip() for row in first_rows(target, _MOST_ROWS))
    others = tuple(sorted(mark for mark in marks if mark not in ("", MARK)))
    return Offered(target, marks.total(), len(new), marks[MARK], others)


def _check_table(path: Path, content: bytes, header: list[str]) -> None:
    """Check that rows can be added to a table that people have edited.

    Raises:
        ValueError: It is not UTF-8, or it lacks a column.
    """
    if b"\0" in content:
        raise ValueError(f"{path} is not UTF-8: save it as CSV in UTF-8")
    if lacking := [name for name in ("id", "audio", "text", CHECKED) if name not in header]:
        raise ValueError(f"{path} has no column {lacking[0]!r} any more: give it back its name, or remove the table")


def _unique(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a server's table, which a crash of the machine may have damaged."""
    seen: set[str] = set()
    for row in rows:
        if _ID.fullmatch(row.get("id", "").encode()) and row["id"] not in seen:
            seen.add(row["id"])
            yield row
