"""Recordings to draw noises and impulse responses from: audio files, folders of them, or tables (rows of a corpus).

Only the part that is needed is read, so a bank of any size costs no memory. A file that cannot be read is left out
with its reason and the next one taken: one bad recording stops no training.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import soundfile

from configurable.folders import files_below
from configurable.lazy import torch
from speech.audio import AudioError, load_audio

if TYPE_CHECKING:
    from torch import Tensor


_LOG = logging.getLogger(__name__)
_AUDIO = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff"}
_COLUMNS = ("audio", "audio_filepath", "path", "file", "wav")
_TRIES = 8


class BankError(ValueError):
    """Files of noises or impulse responses that are missing, empty or unreadable."""


@dataclass(frozen=True)
class Recording:
    """A file, or a segment of it."""

    path: Path
    start: float = 0.0
    seconds: float | None = None


class Bank:
    """Recordings at one sample rate.

    Args:
        files: audio files, folders (searched through, in order of their names), or tables: `.csv`, `.tsv`, `.jsonl`
            with a column `audio`, `audio_filepath` or `path` (relative to the table) and, if they are segments,
            `offset` and `duration` in seconds; `.txt` with a path in each line.
        sample_rate: that recordings are brought to, in Hz.
        what: what they are, for messages.

    Attributes:
        recordings: all of them, in order.
        bad: recordings that turned out to be unreadable, and why.

    Raises:
        BankError: there is no such file, or no recording in it.
    """

    def __init__(self, files: Sequence[str], sample_rate: int, what: str = "noise") -> None:
        self.sample_rate = sample_rate
        self.what = what
        self.recordings = [recording for name in files for recording in _recordings(Path(name), what)]
        self.bad: dict[Recording, str] = {}
        if not self.recordings:
            raise BankError(f"there is no {what} recording in {', '.join(files)}: name audio files, folders or tables")

    def __len__(self) -> int:
        return len(self.recordings)

    def whole(self, draw: float, longest: float) -> Tensor:
        """The recording that a draw in [0, 1) chooses, at most `longest` seconds of it: `[num_samples]`."""
        return self._read(draw, lambda item, seconds: (item.start, min(seconds, longest)))

    def segment(self, draw: float, place: float, num_samples: int) -> Tensor:
        """A part of the recording that a draw in [0, 1) chooses: `[num_samples]`.

        From a longer recording it is cut at `place` in [0, 1) of the possible places; a shorter one is repeated,
        beginning there.
        """
        wanted = (num_samples + 2) / self.sample_rate  # resampling may round a sample away

        def cut(item: Recording, seconds: float) -> tuple[float, float]:
            return (item.start + place * (seconds - wanted), wanted) if seconds > wanted else (item.start, seconds)

        wave = self._read(draw, cut)
        if len(wave) >= num_samples:
            return wave[:num_samples]
        return wave[(int(place * len(wave)) + torch.arange(num_samples)) % len(wave)]

    def _read(self, draw: float, cut: Any) -> Tensor:
        first, reason = min(int(draw * len(self)), len(self) - 1), ""
        for number in range(first, first + min(_TRIES, len(self))):
            item = self.recordings[number % len(self)]
            try:
                start, seconds = cut(item, _duration(item))
                return load_audio(item.path, self.sample_rate, start=start, end=start + seconds)
            except (AudioError, OSError, soundfile.SoundFileError) as error:
                if item not in self.bad:
                    _LOG.warning("%s recording %s is left out: %s", self.what, item.path, error)
                self.bad[item] = reason = str(error)
        raise BankError(
            f"{min(_TRIES, len(self))} {self.what} recordings in a row cannot be read, the last because "
            f"{reason}: mend or remove them"
        )


def _duration(item: Recording) -> float:
    if item.seconds is not None:
        return item.seconds
    info = soundfile.info(str(item.path))
    return max(0.0, float(info.frames / info.samplerate) - item.start)


def _recordings(path: Path, what: str) -> Iterator[Recording]:
    path = path.expanduser()
    if path.is_dir():
        yield from (Recording(file) for file in files_below(path) if file.suffix.lower() in _AUDIO)
    elif not path.is_file():
        raise BankError(f"there is no {what} file or folder {path}: correct the path")
    elif path.suffix.lower() in _AUDIO:
        yield Recording(path)
    else:
        yield from _table(path, what)


def _table(path: Path, what: str) -> Iterator[Recording]:
    """Recordings of a table's rows."""
    try:
        for number, row in enumerate(_rows(path), start=1):
            try:
                yield _recording_of(row, path.parent)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise BankError(
                    f"{path}, row {number}: no {what} recording ({error}): it needs a column "
                    f"{', '.join(_COLUMNS)}, and numbers in offset and duration"
                ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise BankError(
            f"{path} is no table of {what} recordings ({error}): use CSV, TSV, JSON lines or text"
        ) from error


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix in (".csv", ".tsv"):
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            for row in reader:
                # a stray quotation mark makes one cell of many lines
                if None in row or any(cell is None or "\n" in cell for cell in row.values()):
                    raise csv.Error(f"line {reader.line_num}: a row has as many cells as the header, on one line")
                yield row
        elif path.suffix in (".jsonl", ".json"):
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from ({"path": line.strip()} for line in file if line.strip())


def _recording_of(row: Mapping[str, Any], folder: Path) -> Recording:
    column = next((name for name in _COLUMNS if row.get(name)), None)
    if column is None:
        raise KeyError("audio")
    start, seconds = float(row.get("offset") or 0.0), row.get("duration")
    length = float(seconds) if seconds not in (None, "") else None
    if not math.isfinite(start) or start < 0 or (length is not None and not 0 < length < math.inf):
        raise ValueError(f"offset {start}, duration {seconds}")
    return Recording(folder / str(row[column]), start, length)
