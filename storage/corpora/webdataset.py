"""Existing WebDataset shards: uncompressed tars, in which members with the same key are one utterance.

As usual in WebDataset, a sample consists of adjacent members: audio (`KEY.flac`, …) and its text in `KEY.json`,
`KEY.txt` or `KEY.cls`. Audio is not copied: an utterance refers to a byte range of the tar.

WebDataset ends a key at the first dot of a name, and people name files "12 Track 2.0.wav" and "12 Track 2.1.wav". So
members whose names agree up to the first dot are one sample, unless names that agree up to the *last* dot are those of
an audio file and its text: then the last dot ends all these keys. `KEY.left.wav`, `KEY.right.wav` and `KEY.txt` stay
one sample.
"""

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from storage.corpora.base import (
    AUDIO_SUFFIXES,
    CorpusError,
    CorpusReader,
    Utterance,
    as_confidence,
    as_number,
    as_text,
    first_field,
)
from storage.corpora.tars import TarMember, read_member, tar_members
from storage.safety import UnsafeTarError

_TEXTS = ("text", "transcript", "transcription", "sentence", "normalized_text")
_SPEAKERS = ("speaker", "speaker_id", "client_id", "spk")
_PLAIN_TEXTS = ("txt", "cls")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000  # a petabyte in shards of a gigabyte; a larger range is a slip of the keyboard


class WebDatasetReader(CorpusReader):
    """Reads one tar, every `*.tar` in a folder, or a pattern such as `shards/train-{000000..000127}.tar`.

    The id of an utterance is the `id` in its JSON, or else its key. The JSON may also contain speaker, language,
    domain, split and duration. Keys are never used as paths.

    Options:
        text: the JSON field of the transcript, if it has an unusual name.
    """

    LAYOUT = "uncompressed tars of `KEY.flac` (or wav, mp3, …) with `KEY.json`, `KEY.txt` or `KEY.cls`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "train-000000.tar/a.flac": "",
        "train-000000.tar/a.json": '{"text": "good morning", "speaker": "ann", "confidence": 0.93}',
        "train-000001.tar/b.flac": "",
        "train-000001.tar/b.txt": "good night",
    }
    OPTIONS = frozenset({"text"})
    CONFIDENCE = "the key `confidence` in `KEY.json`"

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        folder, _, name = str(path).rpartition("/")
        self._pattern = name if set(name) & set("{*?[") else ""
        super().__init__(
            folder or "." if self._pattern else path, corpus=corpus, domain=domain, language=language, **options
        )

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether it is a tar, a folder with tars, or a pattern of tars."""
        if root.is_file():
            return root.suffix == ".tar"
        if set(root.name) & set("{*?[") and root.suffix == ".tar":
            return True
        return root.is_dir() and any(root.glob("*.tar"))

    def _utterances(self) -> Iterator[Utterance]:
        shards = list(self.files())
        if not shards:
            raise CorpusError(f"{self.root} has no .tar{' that fits ' + self._pattern if self._pattern else ''}")
        for shard in shards:
            key, members = "", list[TarMember]()
            try:
                for member in tar_members(shard):
                    member_key, _ = _split(member.name)
                    if member_key != key:
                        yield from self._samples(shard, members)
                        key, members = member_key, []
                    members.append(member)
            except (UnsafeTarError, OSError) as error:
                self._problem(shard.name, "bad-tar", str(error))
            yield from self._samples(shard, members)

    def _samples(self, shard: Path, members: list[TarMember]) -> Iterator[Utterance]:
        """Yield the samples of adjacent members whose names agree up to the first dot."""
        samples: dict[str, dict[str, TarMember]] = {}
        last = _end_at_last_dot(members)
        for member in members:
            key, suffix = _split(member.name, last)
            sample = samples.setdefault(key, {})
            if suffix in sample:
                self._problem(f"{shard.name}:{member.name}", "duplicate-member", "the name occurs twice")
            sample.setdefault(suffix, member)
        for key, sample in samples.items():
            yield from self._sample(shard, key, sample)

    def _sample(self, shard: Path, key: str, sample: dict[str, TarMember]) -> Iterator[Utterance]:
        audio = next((m for suffix, m in sample.items() if f".{suffix.rpartition('.')[2]}" in AUDIO_SUFFIXES), None)
        if audio is None:
            self._problem(key, "missing-audio", f"{shard.name} has only {', '.join(sample)} of it")
            return
        try:
            fields = self._fields(shard, sample)
            text = self._text(shard, sample, fields)
            duration = as_number("duration", fields.get("duration"))
        except (ValueError, RecursionError) as error:  # invalid UTF-8 and JSON raise ValueErrors
            self._problem(key, "bad-line", f"{shard.name}: {error}")
            return
        if text is None:
            self._problem(key, "missing-transcript", f"{shard.name} has no text for it")
            return
        utterance = self._make(
            first_field(fields, ("id", "utt_id")) or key,
            shard,
            text.strip(),
            first_field(fields, _SPEAKERS) or "",
            language=first_field(fields, ("language", "lang", "locale")),
            domain=first_field(fields, ("domain",)),
            split=first_field(fields, ("split",)),
            duration=duration,
            confidence=as_confidence(fields.get("confidence")),
            offset=audio.offset,
            length=audio.length,
        )
        if utterance:
            yield utterance

    def _fields(self, shard: Path, sample: dict[str, TarMember]) -> dict[str, Any]:
        try:
            fields = json.loads(read_member(shard, sample["json"])) if "json" in sample else {}
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        if not isinstance(fields, dict):
            raise ValueError("its JSON is not an object")
        return fields

    def _text(self, shard: Path, sample: dict[str, TarMember], fields: dict[str, Any]) -> str | None:
        named = str(self.options.get("text") or "")
        names = (named,) if named else _TEXTS
        text = next((value for name in names if (value := as_text(fields.get(name))) is not None), None)
        for suffix in _PLAIN_TEXTS:
            if text is None and suffix in sample:
                text = read_member(shard, sample[suffix]).decode()
        return text

    @override
    def scanned(self) -> list[Path]:
        return [] if self._pattern else [self.root]

    def files(self) -> Iterator[Path]:
        """Yield the shards in order; shards of a range may be missing."""
        if self.root.is_file():
            yield self.root
        elif match := _RANGE.search(self._pattern):
            first, last = int(match[1]), int(match[2])
            if not first <= last < first + _MAX_SHARDS:
                raise CorpusError(f"{self._pattern}: the range must ascend and name at most {_MAX_SHARDS} shards")
            for number in range(first, last + 1):
                name = f"{self._pattern[: match.start()]}{number:0{len(match[1])}d}{self._pattern[match.end() :]}"
                yield self.root / name
        else:
            pattern = self._pattern or "*.tar"
            yield from sorted(path for path in self.root.iterdir() if fnmatch.fnmatchcase(path.name, pattern))


def _split(name: str, last: bool = False) -> tuple[str, str]:
    """Key and suffix: split at the first dot of the base name, as WebDataset does, or at the last one."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, dot, suffix = base.rpartition(".") if last else base.partition(".")
    return f"{folder}{slash}{stem if dot else base}", suffix.lower() if dot else ""


def _end_at_last_dot(members: list[TarMember]) -> bool:
    """Whether keys contain dots: some members agree up to the last of several dots, and are audio and text."""
    kinds: dict[str, set[str]] = {}
    for member in members:
        if member.name.rpartition("/")[2].count(".") > 1:
            key, suffix = _split(member.name, last=True)
            kinds.setdefault(key, set()).add("audio" if f".{suffix}" in AUDIO_SUFFIXES else suffix)
    return any("audio" in kinds_of_key and kinds_of_key & {"json", *_PLAIN_TEXTS} for kinds_of_key in kinds.values())
