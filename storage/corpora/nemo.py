"""NeMo's manifests: JSON lines with `audio_filepath`, `duration`, `text` and optionally `offset`; audio may be in tars.

Source: NVIDIA NeMo's documentation of ASR datasets. A tarred set has `shard_id` in each line and one tar per shard
(`audio_0.tar`, …), whose members are named by `audio_filepath`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from storage.corpora.base import (
    CorpusError,
    CorpusReader,
    Utterance,
    as_confidence,
    as_number,
    as_text,
    checked_times,
    first_field,
    first_object,
    named_file,
    read_json_lines,
)
from storage.corpora.file_ids import FileIds
from storage.corpora.tars import TarMember, tar_members
from storage.safety import UnsafeTarError


class NemoReader(CorpusReader):
    """Reads one manifest; relative paths are relative to its folder.

    The default id of a line is its file's stem, with the folders where several files have that stem. A line with an
    offset is a segment of its file; the start in milliseconds is added to its default id.

    Options:
        tars: file name of the shards beside the manifest, with `{}` for the number; `audio_{}.tar` by default.
    """

    LAYOUT = "a NeMo manifest: JSON lines with `audio_filepath`, `offset`, `duration`, `text`; tarred or not"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "manifest.json": '{"audio_filepath": "wav/a.wav", "duration": 6.0, "text": "good morning", "speaker": "ann", '
        '"confidence": 0.93}\n'
        '{"audio_filepath": "wav/b.wav", "offset": 1.0, "duration": 2.0, "text": "good night", "speaker": "bob", '
        '"confidence": 0.41}\n',
        "wav/a.wav": "",
        "wav/b.wav": "",
    }
    OPTIONS = frozenset({"tars"})
    CONFIDENCE = "the key `confidence` of a line"

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether it is a JSON lines file whose first line has `audio_filepath`."""
        return root.is_file() and root.suffix in (".json", ".jsonl") and "audio_filepath" in first_object(root)

    def _utterances(self) -> Iterator[Utterance]:
        if not self.root.is_file():
            raise CorpusError(f"{self.root} is a folder: name the manifest itself")
        shards: dict[str, dict[str, TarMember]] = {}
        file_id = FileIds(self._unnamed_audio)
        for number, row in read_json_lines(self.root):
            place = f"{self.root.name}:{number}"
            if isinstance(row, str):
                self._problem(place, "bad-line", f"line {number}: {row}")
            elif not isinstance(row.get("audio_filepath"), str) or not row["audio_filepath"]:
                self._problem(place, "missing-audio", f"line {number} has no audio_filepath")
            else:
                yield from self._entry(number, _own_id(row) or file_id(_place(row)), row, shards)

    def _entry(
        self, number: int, label: str, row: dict[str, Any], shards: dict[str, dict[str, TarMember]]
    ) -> Iterator[Utterance]:
        name, text = row["audio_filepath"], as_text(row.get("text"))
        if text is None:
            self._problem(label, "missing-transcript", f"line {number} has no text")
            return
        try:
            offset, duration = as_number("offset", row.get("offset")), as_number("duration", row.get("duration"))
            piece = offset is not None and duration is not None
            start, end = checked_times(offset or 0.0, (offset or 0.0) + (duration or 0.0) if piece else None)
        except ValueError as error:
            self._problem(label, "bad-line", f"line {number}: {error}")
            return
        fields: dict[str, Any] = {"duration": duration, "start": start, "end": end}
        fields["language"] = first_field(row, ("lang", "language"))
        fields["domain"] = first_field(row, ("domain",))
        fields["confidence"] = as_confidence(row.get("confidence"))
        if "shard_id" in row:
            member = self._member(str(row["shard_id"]), name, shards)
            if member is None:
                self._problem(label, "missing-audio", f"line {number}: shard {row['shard_id']} has no member {name!r}")
                return
            fields |= {"offset": member.offset, "length": member.length}
        audio = self._tar(str(row["shard_id"])) if "shard_id" in row else self._file(name)
        utterance_id = label if _own_id(row) or not start else f"{label}-{round(start * 1000):08d}"
        utterance = self._make(utterance_id, audio, text, first_field(row, ("speaker",)) or "", **fields)
        if utterance:
            yield utterance

    def _member(self, shard: str, name: str, shards: dict[str, dict[str, TarMember]]) -> TarMember | None:
        if shard not in shards:
            shards[shard] = {}
            try:
                for member in tar_members(self._tar(shard)):
                    shards[shard].setdefault(member.name.removeprefix("./"), member)
            except (OSError, UnsafeTarError) as error:
                self._problem(self._tar(shard).name, "bad-tar", str(error))
        return shards[shard].get(name.removeprefix("./"))

    def _tar(self, shard: str) -> Path:
        return self.root.parent / str(self.options.get("tars") or "audio_{}.tar").replace("{}", Path(shard).name)

    def _file(self, name: str) -> Path | str:
        return name if "://" in name else named_file(self.root.parent, name)

    def _unnamed_audio(self) -> Iterator[str]:
        """Audio of the lines without an id."""
        for _, row in read_json_lines(self.root):
            if not isinstance(row, str) and isinstance(row.get("audio_filepath"), str) and not _own_id(row):
                yield _place(row)

    def files(self) -> Iterator[Path]:
        """Yield the manifest and all its audio files or tars."""
        yield self.root
        shards: set[str] = set()
        for _, row in read_json_lines(self.root):
            if isinstance(row, str) or not isinstance(row.get("audio_filepath"), str):
                continue
            if "shard_id" in row:
                shards.add(str(row["shard_id"]))
            elif isinstance(path := self._file(row["audio_filepath"]), Path):
                yield path
        for shard in sorted(shards):
            yield self._tar(shard)


def _own_id(row: dict[str, Any]) -> str | None:
    return first_field(row, ("id", "utt_id"))


def _place(row: dict[str, Any]) -> str:
    """The name of a line's audio file; for a member of a tar, with the number of the shard."""
    return f"{row['shard_id']}/{row['audio_filepath']}" if "shard_id" in row else row["audio_filepath"]
