"""Manifests of lhotse and icefall: recordings and supervisions, or cuts, as JSON lines (possibly gzipped).

Source: Żelasko et al. 2021, "Lhotse: a speech data representation library for the modern deep learning ecosystem".
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from storage.corpora.base import (
    OVERSHOOT_S,
    CorpusError,
    CorpusReader,
    Utterance,
    as_confidence,
    as_number,
    as_text,
    checked_times,
    first_field,
    first_object,
    is_file,
    read_json_lines,
)

_SUFFIXES = (".jsonl", ".jsonl.gz")
_TAG = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*")
_LANGUAGES = {"english": "en", "german": "de", "french": "fr", "spanish": "es", "chinese": "zh", "mandarin": "zh"}


class _Source(NamedTuple):
    """A file of a recording, or the problem with it."""

    path: str
    channels: tuple[int, ...]
    problem: tuple[str, str] | None = None


class _Recording(NamedTuple):
    sources: tuple[_Source, ...]
    duration: float | None


class LhotseReader(CorpusReader):
    """Reads a folder of manifests, or a single manifest of cuts, supervisions or recordings.

    Each `…recordings…jsonl(.gz)` is read together with the file with "supervisions" in its place; in folders without
    such pairs, `…cuts…jsonl(.gz)` are read. Each supervision is one utterance. Recordings that are commands, in memory
    or transformed, and mixed cuts, are reported as problems; commands are never run.
    """

    LAYOUT = "lhotse's and icefall's recordings and supervisions, or cuts (`.jsonl`, `.jsonl.gz`)"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "recordings.jsonl": '{"id": "r1", "sources": [{"type": "file", "channels": [0], "source": "a.wav"}], '
        '"sampling_rate": 8000, "num_samples": 48000, "duration": 6.0}\n'
        '{"id": "r2", "sources": [{"type": "file", "channels": [0], "source": "b.wav"}], '
        '"sampling_rate": 8000, "num_samples": 48000, "duration": 6.0}\n',
        "supervisions.jsonl": '{"id": "ann-1", "recording_id": "r1", "start": 0.0, "duration": 1.5, "channel": 0, '
        '"text": "good morning", "speaker": "ann", "custom": {"confidence": 0.93}}\n'
        '{"id": "bob-1", "recording_id": "r2", "start": 1.0, "duration": 2.0, "channel": 0, '
        '"text": "good night", "speaker": "bob", "custom": {"confidence": 0.41}}\n',
        "a.wav": "",
        "b.wav": "",
    }

    CONFIDENCE = "the key `confidence` of a supervision, or of its `custom` fields"

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there are pairs of manifests, or cuts with supervisions."""
        pairs, cuts = _manifests(root)
        return bool(pairs) or any({"supervisions", "start"} <= first_object(path).keys() for path in cuts[:1])

    def _utterances(self) -> Iterator[Utterance]:
        pairs, cuts = _manifests(self.root)
        if not pairs and not cuts:
            raise CorpusError(f"{self.root} has neither recordings.jsonl and supervisions.jsonl nor cuts.jsonl")
        for recordings, supervisions in pairs:
            yield from self._pair(recordings, supervisions)
        for path in () if pairs else cuts:
            for place, cut in self._rows(path):
                yield from self._cut(place, cut)

    def _pair(self, recordings: Path, supervisions: Path) -> Iterator[Utterance]:
        known: dict[str, _Recording] = {}
        for place, row in self._rows(recordings):
            recording = self._recording(row)
            if known.setdefault(str(row.get("id")), recording) != recording:
                self._problem(
                    f"{place}:{row.get('id')}", "duplicate-id", "another recording of this id is in the manifest"
                )
        used: set[str] = set()
        for place, row in self._rows(supervisions):
            recording_id = str(row.get("recording_id"))
            used.add(recording_id)
            yield from self._supervision(place, row, known.get(recording_id), 0.0)
        for recording_id in known:
            if recording_id not in used:
                self._problem(recording_id, "missing-transcript", f"{supervisions.name} has nothing for it")

    def _cut(self, place: str, cut: dict[str, Any]) -> Iterator[Utterance]:
        cut_id = first_field(cut, ("id",)) or place
        if cut.get("type", "MonoCut") not in ("MonoCut", "MultiCut", "Cut"):
            self._problem(cut_id, "mixed-cut", f"a {cut['type']} is made of several recordings")
            return
        supervisions = [s for s in cut.get("supervisions") or () if isinstance(s, dict)]
        if not supervisions:
            self._problem(cut_id, "missing-transcript", "the cut has no supervision")
        recording = cut.get("recording")
        parsed = self._recording(recording) if isinstance(recording, dict) else None
        try:
            start = as_number("start", cut.get("start")) or 0.0
        except ValueError as error:
            self._problem(cut_id, "bad-segment", str(error))
            return
        for supervision in supervisions:
            row = {"channel": cut.get("channel"), **supervision}
            row["id"] = cut_id if len(supervisions) == 1 else supervision.get("id")
            yield from self._supervision(place, row, parsed, start)

    def _supervision(
        self, place: str, row: dict[str, Any], recording: _Recording | None, shift: float
    ) -> Iterator[Utterance]:
        utterance_id, text = first_field(row, ("id",)) or place, as_text(row.get("text"))
        if text is None:
            self._problem(utterance_id, "missing-transcript", "the supervision has no text")
            return
        channels = row.get("channel")
        channel = channels[0] if isinstance(channels, list) and channels else channels
        source = _source(recording, channel if isinstance(channel, int) else None)
        if recording is None or source is None:
            self._problem(utterance_id, "missing-audio", "no recording has this id and channel")
            return
        if source.problem:
            self._problem(utterance_id, *source.problem)
            return
        try:
            begin = shift + _signed("start", row.get("start"))
            if begin < -OVERSHOOT_S:
                raise ValueError(f"it starts {-begin:g} s before the recording")
            duration = as_number("duration", row.get("duration"))
            start, end = checked_times(max(0.0, round(begin, 6)), None if duration is None else begin + duration)
        except ValueError as error:
            self._problem(utterance_id, "bad-segment", str(error))
            return
        whole = start == 0 and end is not None and recording.duration is not None and end >= recording.duration - 1e-3
        several = len(source.channels) > 1 and isinstance(channel, int)
        utterance = self._make(
            utterance_id,
            source.path,
            text,
            first_field(row, ("speaker",)) or "",
            duration=duration,
            start=start,
            end=None if whole or end is None else round(end, 6),
            channel=source.channels.index(channel) if several and channel in source.channels else None,
            language=_language(row.get("language")),
            confidence=_confidence(row),
        )
        if utterance:
            yield utterance

    def _recording(self, row: dict[str, Any]) -> _Recording:
        sources = []
        for source in row.get("sources") or ():
            kind, place = source.get("type"), str(source.get("source", ""))
            problem = None
            if kind not in ("file", "url"):
                problem = ("pipe-command" if kind == "command" else "missing-audio", f"a source of type {kind!r}")
            elif row.get("transforms"):
                problem = (
                    "transformed",
                    "the recording is transformed on the fly: save the result, or remove the transform",
                )
            path = place if "://" in place else str(self._find(place))
            sources.append(_Source(path, tuple(c for c in source.get("channels") or (0,)), problem))
        duration = row.get("duration")
        return _Recording(tuple(sources), float(duration) if isinstance(duration, int | float) else None)

    def _find(self, place: str) -> Path:
        """Resolve a path relative to where lhotse was run: the folder of the manifests, or one of its parents."""
        folder = self.root if self.root.is_dir() else self.root.parent
        return next((p for base in (folder, *folder.parents) if is_file(p := base / place)), folder / place)

    def _rows(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in read_json_lines(path):
            place = f"{path.name}:{number}"
            if isinstance(row, str):
                self._problem(place, "bad-line", f"line {number} of {path}: {row}")
            else:
                yield place, row

    def files(self) -> Iterator[Path]:
        """Yield the manifests and their audio files."""
        pairs, cuts = _manifests(self.root)
        for path in [manifest for pair in pairs for manifest in pair] if pairs else cuts:
            yield path
            for _, row in read_json_lines(path):
                recording = None if isinstance(row, str) else row if "sources" in row else row.get("recording")
                for source in self._recording(recording).sources if isinstance(recording, dict) else ():
                    if "://" not in source.path and not source.problem:
                        yield Path(source.path)


def _manifests(root: Path) -> tuple[list[tuple[Path, Path]], list[Path]]:
    """Pairs of manifests of recordings and supervisions, and manifests of cuts."""
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    files = [path for path in files if path.name.endswith(_SUFFIXES) and path.is_file()]
    pairs = []
    for path in files:
        name = path.name.replace("supervisions", "recordings")
        partner = path.with_name(name.replace("recordings", "supervisions"))
        pair = (path.with_name(name), partner)
        if "recordings" in name and pair not in pairs and all(manifest.is_file() for manifest in pair):
            pairs.append(pair)
    return pairs, [path for path in files if "cuts" in path.name]


def _source(recording: _Recording | None, channel: int | None) -> _Source | None:
    for source in recording.sources if recording else ():
        if channel is None or channel in source.channels:
            return source
    return None


def _signed(name: str, value: object) -> float:
    """Parse a number that may be negative: a supervision may begin slightly before its cut."""
    if isinstance(value, int | float) and value < 0:
        return -(as_number(name, -value) or 0.0)
    return as_number(name, value) or 0.0


def _confidence(row: dict[str, Any]) -> float | str | None:
    custom = row.get("custom")
    return as_confidence(row.get("confidence", custom.get("confidence") if isinstance(custom, dict) else None))


def _language(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return _LANGUAGES.get(value.lower()) or (value if _TAG.fullmatch(value) else None)
