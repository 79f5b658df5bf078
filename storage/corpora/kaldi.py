"""Kaldi data folders: `wav.scp`, `text`, `utt2spk`, and optionally `segments` and `reco2file_and_channel`.

    wav.scp                 sw2001-A sph2pipe -f wav -p -c 1 disk1/sw02001.sph |
    text                    sw2001-A-1 good morning
    utt2spk                 sw2001-A-1 sw2001-A
    segments                sw2001-A-1 sw2001-A 0.50 2.00       utterance, recording, start and end in seconds
    reco2file_and_channel   sw2001-A sw02001 A                  recording, file, channel

Commands in `wav.scp` are never run. `sph2pipe -f wav -p -c 1 FILE |` and `flac -c -d -s FILE |` are interpreted as a
file, and a channel of it. Entries with other commands are reported as problems.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from storage.corpora.base import NOT_UTF8, CorpusError, CorpusReader, Utterance, is_file, read_lines

_FILES = ("wav.scp", "text", "utt2spk", "segments", "reco2file_and_channel")
_CHANNELS = {"A": 0, "B": 1, "1": 0, "2": 1}


@dataclass(frozen=True)
class _Segment:
    recording: str
    start: float = 0.0
    end: float | None = None


class KaldiReader(CorpusReader):
    """Reads a Kaldi data folder, in the order of its `text`.

    A relative path in `wav.scp` is resolved against the option `root`, then the folder itself, then its parents; the
    first existing file is used. As usual in Kaldi, an utterance without a line in `utt2spk` is its own speaker. If a
    key has two different lines, the first is used, and the other one is reported as a problem. The channel in
    `reco2file_and_channel` is used if one file contains all channels of the recording.
    """

    LAYOUT = "any Kaldi data folder: `wav.scp`, `text`, `utt2spk`, optionally `segments`, `reco2file_and_channel`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "wav.scp": "ann-1 wav/ann-1.wav\nbob-1 wav/bob-1.wav\n",
        "text": "ann-1 good morning\nbob-1 good night\n",
        "utt2spk": "ann-1 ann\nbob-1 bob\n",
        "wav/ann-1.wav": "",
        "wav/bob-1.wav": "",
    }
    OPTIONS = frozenset({"root", "encoding"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a `wav.scp`."""
        return (root / "wav.scp").is_file()

    def _utterances(self) -> Iterator[Utterance]:
        if not self.root.is_dir():
            raise CorpusError(f"{self.root} is a file: name the Kaldi data folder that contains wav.scp and text")
        recordings = self._read("wav.scp", required=True, report=True)
        segments = self._segments(recordings)
        speakers = self._read("utt2spk", report=True)
        pending = dict.fromkeys(segments)
        for utterance_id, text in self._pairs("text", required=True, report=True):
            pending.pop(utterance_id, None)
            utterance = self._utterance(utterance_id, text, segments, recordings, speakers)
            if utterance is not None:
                yield utterance
        for utterance_id in pending:
            self._problem(utterance_id, "missing-transcript", f"{self.root / 'text'} has no line for it")

    def _utterance(
        self,
        utterance_id: str,
        text: str,
        segments: dict[str, _Segment | None],
        recordings: dict[str, str],
        speakers: dict[str, str],
    ) -> Utterance | None:
        if utterance_id not in segments:
            table = "segments" if (self.root / "segments").is_file() else "wav.scp"
            self._problem(utterance_id, "missing-audio", f"{self.root / table} has no line for it")
            return None
        segment = segments[utterance_id]
        if segment is None:
            return None  # already reported when the segments were read
        entry, side = _understand(self._entry(segment.recording, recordings))
        audio, problem = self._locate(entry)
        if problem:
            self._problem(utterance_id, *problem)
            return None
        return Utterance(
            id=utterance_id,
            audio=str(audio),
            text=text,
            speaker=speakers.get(utterance_id, utterance_id),
            corpus=self.corpus,
            domain=self.domain,
            language=self.language,
            duration=None if segment.end is None else segment.end - segment.start,
            start=segment.start,
            end=segment.end,
            channel=self._channel(segment.recording, recordings) if side is None else side,
        )

    def _segments(self, recordings: dict[str, str]) -> dict[str, _Segment | None]:
        """Segment of each utterance; None for an invalid line, which is recorded as a problem."""
        if not (self.root / "segments").is_file():
            return {recording: _Segment(recording) for recording in recordings}
        segments: dict[str, _Segment | None] = {}
        for utterance_id, rest in self._read("segments", report=True).items():
            segments[utterance_id] = self._segment(utterance_id, rest)
        return segments

    def _segment(self, utterance_id: str, rest: str) -> _Segment | None:
        fields = rest.split()
        try:
            if len(fields) < 3:
                raise ValueError("write: utterance recording start end")
            recording, start, end = fields[0], _seconds(fields[1]), _seconds(fields[2])
            if not 0 <= start < float("inf") or not (end == -1 or start < end < float("inf")):
                raise ValueError("its times do not ascend from 0")
        except ValueError as error:
            self._problem(utterance_id, "bad-segment", f"{self.root / 'segments'}: {rest!r}: {error}")
            return None
        return _Segment(recording, start, None if end == -1 else end)  # in Kaldi, -1 means the end of the file

    def _entry(self, recording: str, recordings: dict[str, str]) -> str | None:
        file_id = self._reco2file.get(recording, ("", None))[0]
        return recordings.get(recording, recordings.get(file_id))

    def _channel(self, recording: str, recordings: dict[str, str]) -> int | None:
        file_id, channel = self._reco2file.get(recording, ("", None))
        entries = {self._entry(other, recordings) for other in self._by_file[file_id]}
        # Two entries for one recording mean that its channels are in separate files.
        return channel if len(entries) == 1 else None

    @cached_property
    def _reco2file(self) -> dict[str, tuple[str, int | None]]:
        table = {}
        for recording, rest in self._pairs("reco2file_and_channel"):
            fields = rest.split()
            if len(fields) == 2:
                table[recording] = (fields[0], _CHANNELS.get(fields[1].upper()))
        return table

    @cached_property
    def _by_file(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = defaultdict(list)
        for recording, (file_id, _) in self._reco2file.items():
            groups[file_id].append(recording)
        return groups

    def _locate(self, entry: str | None) -> tuple[Path | str, tuple[str, str] | None]:
        """The audio file of an entry of wav.scp, or the problem with it."""
        if entry is None:
            return "", ("missing-audio", f"{self.root / 'wav.scp'} has no line for its recording")
        if entry.endswith("|") or entry.startswith("|"):
            return "", ("pipe-command", f"a command is not run: {entry!r}. Convert the audio to files first.")
        if "://" in entry:
            return entry, None
        for base in self._bases:
            if is_file(base / entry):
                return base / entry, None
        if entry.rpartition(":")[2].isdigit():
            return "", ("archive-entry", f"{entry!r} refers to a Kaldi archive. Convert the audio to files first.")
        return "", (
            "missing-audio",
            f"{entry!r} is neither under {self._bases[0]} nor under a folder above. Set `root`.",
        )

    @cached_property
    def _bases(self) -> list[Path]:
        named = self.options.get("root")
        first = [Path(str(named)).expanduser().absolute()] if named else []
        return [*first, self.root, *self.root.parents]

    def files(self) -> Iterator[Path]:
        """Yield the tables of the folder and all existing audio files in wav.scp."""
        for name in _FILES:
            if (self.root / name).is_file():
                yield self.root / name
        for entry in self._read("wav.scp", required=True).values():
            audio, problem = self._locate(_understand(entry)[0])
            if not problem and isinstance(audio, Path):
                yield audio

    def _read(self, name: str, required: bool = False, report: bool = False) -> dict[str, str]:
        """Rest of the line by key; the first line of a key counts, others that differ are recorded if `report`."""
        table: dict[str, str] = {}
        for key, rest in self._pairs(name, required, report):
            if table.setdefault(key, rest) != rest and report:
                self._problem(
                    f"{name}:{key}", "duplicate-id", f"{self.root / name} has another line for {key}: {rest!r}"
                )
        return table

    def _pairs(self, name: str, required: bool = False, report: bool = False) -> Iterator[tuple[str, str]]:
        """Yield first field and rest of each line of a file; skips bad lines, and records them if `report`."""
        path = self.root / name
        if not path.is_file():
            if required:
                raise CorpusError(f"{path} is missing: a Kaldi data folder needs wav.scp and text")
            return
        for number, line in read_lines(path, self.encoding):
            if line is None:
                if report:
                    self._problem(f"{name}:{number}", "bad-line", f"line {number} of {path}: {NOT_UTF8}")
                continue
            fields = line.split(maxsplit=1)
            if fields:
                yield fields[0], fields[1].strip() if len(fields) > 1 else ""


def _understand(entry: str | None) -> tuple[str | None, int | None]:
    """Resolve an entry of wav.scp whose command only decodes a file to that file and the selected channel."""
    if entry is None or not entry.endswith("|"):
        return entry, None
    try:
        program, *words = shlex.split(entry.removesuffix("|"))
    except ValueError:
        return entry, None
    name, channel, files = program.rpartition("/")[2], None, list[str]()
    remaining = iter(words)
    for word in remaining:
        if name == "sph2pipe" and word in ("-f", "-c"):
            value = next(remaining, "")
            channel = int(value) - 1 if word == "-c" and value in ("1", "2") else channel
        elif not word.startswith("-"):
            files.append(word)
        elif word not in (("-p", "-u") if name == "sph2pipe" else ("-c", "-d", "-s", "-dc", "-cd", "-cds")):
            return entry, None  # options such as -t (a time range) would change the audio
    return (files[0], channel) if name in ("sph2pipe", "flac") and len(files) == 1 else (entry, None)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no number of seconds, such as 1.25") from error
