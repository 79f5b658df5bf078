"""Multilingual LibriSpeech: LANGUAGE/{train,dev,test}/transcripts.txt beside audio/SPEAKER/BOOK/ID.flac (or .opus).

Source: Pratap et al. 2020, "MLS: A Large-Scale Multilingual Dataset for Speech Research", OpenSLR 94.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from storage.corpora.base import SET_OF_SPLIT, CorpusError, CorpusReader, Utterance, is_file, read_lines

_LANGUAGES = {
    "dutch": "nl",
    "english": "en",
    "french": "fr",
    "german": "de",
    "italian": "it",
    "polish": "pl",
    "portuguese": "pt",
    "spanish": "es",
}
_SUFFIXES = (".flac", ".opus", ".ogg", ".wav")


class MlsReader(CorpusReader):
    """Reads one part (`mls_german/dev`), a language (`mls_german`), or a folder of languages.

    The language is derived from the folder's name (`mls_german`, `mls_german_opus`); `dev` is the set `valid`.

    Options:
        handles: read only the utterances in a list in `limited_supervised`: `9hr`, `1hr/0` … `1hr/5`, or a path.
            Applies to `train` only.
    """

    LAYOUT = "Multilingual LibriSpeech: `mls_LANGUAGE/{train,dev,test}/transcripts.txt`, `audio/SPEAKER/BOOK/`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "mls_german/train/transcripts.txt": "1_10_000000\tguten morgen\n",
        "mls_german/test/transcripts.txt": "2_20_000000\tgute nacht\n",
        "mls_german/train/audio/1/10/1_10_000000.flac": "",
        "mls_german/test/audio/2/20/2_20_000000.flac": "",
    }
    HAS_SETS = True
    OPTIONS = frozenset({"handles"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a `transcripts.txt` beside `audio`."""
        return any((part / "audio").is_dir() for part in _parts(root))

    def _utterances(self) -> Iterator[Utterance]:
        parts = _parts(self.root)
        if not parts:
            raise CorpusError(f"{self.root} has no transcripts.txt: name a folder such as mls_german or mls_german/dev")
        for part in parts:
            chosen = self._handles(part)
            seen: set[str] = set()
            for number, line in self._lines(part / "transcripts.txt"):
                if line is None or (line.strip() and "\t" not in line):
                    place = f"{part.name}/transcripts.txt:{number}"
                    self._problem(place, "bad-line", "not UTF-8" if line is None else "no tab between id and text")
                elif line.strip():
                    utterance_id, _, text = line.partition("\t")
                    seen.add(utterance_id)
                    if chosen is None or utterance_id in chosen:
                        yield from self._entry(part, utterance_id, text.strip())
            self._check_audio(part, seen)
            for utterance_id in sorted((chosen or set()) - seen):
                self._problem(utterance_id, "missing-transcript", f"{part / 'transcripts.txt'} has no line for it")

    def _entry(self, part: Path, utterance_id: str, text: str) -> Iterator[Utterance]:
        speaker, _, rest = utterance_id.partition("_")
        if not re.fullmatch(r"[\w.-]+", utterance_id) or not rest:
            self._problem(utterance_id, "bad-id", "an id has the form SPEAKER_BOOK_NUMBER")
            return
        stem = part / "audio" / speaker / rest.partition("_")[0] / utterance_id
        audio = next((path for suffix in _SUFFIXES if is_file(path := stem.with_name(stem.name + suffix))), None)
        language = _language(part)
        split = SET_OF_SPLIT.get(part.name)
        utterance = self._make(
            utterance_id, audio or stem.with_name(stem.name + ".flac"), text, speaker, language=language, split=split
        )
        if utterance:
            yield utterance

    def _check_audio(self, part: Path, seen: set[str]) -> None:
        for path in _audio(part):
            if path.stem not in seen:
                self._problem(path.stem, "missing-transcript", f"{part / 'transcripts.txt'} has no line for {path}")

    def _handles(self, part: Path) -> set[str] | None:
        name = str(self.options.get("handles") or "")
        if not name or part.name != "train":
            return None
        base = part / "limited_supervised"
        for path in (base / name / "handles.txt", base / name, part / name, Path(name).expanduser()):
            if path.is_file():
                return {line.strip() for _, line in read_lines(path) if line}
        raise CorpusError(f"option handles: there is no {base / name / 'handles.txt'}; use 9hr, 1hr/0 … or a path")

    @override
    def scanned(self) -> list[Path]:
        return [part / "audio" for part in _parts(self.root)]

    def files(self) -> Iterator[Path]:
        """Yield transcripts, lists of handles and audio."""
        for part in _parts(self.root):
            yield part / "transcripts.txt"
            yield from sorted((part / "limited_supervised").rglob("handles.txt"))
            yield from _audio(part)


def _parts(root: Path) -> list[Path]:
    """Folders with a transcripts.txt, at most two levels below, sorted (so `dev`, `test`, `train`)."""
    for pattern in ("transcripts.txt", "*/transcripts.txt", "*/*/transcripts.txt"):
        folders = sorted(path.parent for path in root.glob(pattern) if path.is_file())
        if folders:
            return folders
    return []


def _audio(part: Path) -> Iterator[Path]:
    for path in sorted((part / "audio").glob("*/*/*")):
        if path.suffix in _SUFFIXES:
            yield path


def _language(part: Path) -> str | None:
    for name in (part.name, part.parent.name):
        if match := re.match(r"mls_([a-z]+)", name):
            return _LANGUAGES.get(match[1])
    return None
