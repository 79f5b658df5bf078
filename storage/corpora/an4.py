"""AN4 of Carnegie Mellon University, and other corpora in SphinxTrain's layout: etc/*.{fileids,transcription}."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from configurable.folders import files_below
from storage.corpora.base import SET_OF_SPLIT, CorpusError, CorpusReader, Utterance, is_file, read_lines

_SUFFIXES = (".sph", ".wav", ".flac", ".raw")
_LINE = re.compile(r"(?P<text>.*?)\s*\((?P<id>[^()\s]+)\)\s*")
_RAW_RATE = 16000  # of AN4's `.raw` files, which have no header


class An4Reader(CorpusReader):
    """Reads the folder that contains `etc` and `wav` (or `raw`, assumed to be 16-bit little-endian at 16 kHz).

    The set is taken from the name of the list (`an4_test.fileids` is `test`), the speaker from a file's folder.
    """

    LAYOUT = "AN4 and SphinxTrain's layout: `etc/*.fileids`, `etc/*.transcription`, `wav/` or `raw/`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "etc/an4_train.fileids": "an4_clstk/fash/an251-fash-b\n",
        "etc/an4_train.transcription": "<s> YES </s> (an251-fash-b)\n",
        "etc/an4_test.fileids": "an4test_clstk/fjlp/cen1-fjlp-b\n",
        "etc/an4_test.transcription": "GOOD NIGHT (cen1-fjlp-b)\n",
        "wav/an4_clstk/fash/an251-fash-b.sph": "",
        "wav/an4test_clstk/fjlp/cen1-fjlp-b.sph": "",
    }
    HAS_SETS = True

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether `etc` contains file lists."""
        return any((root / "etc").glob("*.fileids"))

    def _utterances(self) -> Iterator[Utterance]:
        for fileids in self._lists():
            texts = self._texts(fileids.with_suffix(".transcription"))
            split = SET_OF_SPLIT.get(fileids.stem.rpartition("_")[2])
            for number, line in read_lines(fileids):
                if line is None:
                    self._problem(f"{fileids.name}:{number}", "bad-line", f"line {number} of {fileids} is not UTF-8")
                elif name := line.strip():
                    yield from self._entry(name, texts, split)
            for utterance_id in texts:
                self._problem(utterance_id, "missing-audio", f"{fileids} has no line for it")

    def _entry(self, name: str, texts: dict[str, str], split: str | None) -> Iterator[Utterance]:
        place = Path(name)
        if name.startswith("/") or ".." in place.parts:
            self._problem(name, "bad-line", "the name leaves the corpus")
            return
        text = texts.pop(place.name, None)
        if text is None:
            self._problem(place.name, "missing-transcript", f"no transcript has a line for {name}")
            return
        audio = self._audio(name)
        rate = _RAW_RATE if audio.suffix == ".raw" else None
        utterance = self._make(place.name, audio, text, place.parent.name, split=split, sample_rate=rate)
        if utterance:
            yield utterance

    def _audio(self, name: str) -> Path:
        candidates = [
            self.root / folder / f"{name}{suffix}"
            for folder, suffixes in (("wav", _SUFFIXES[:3]), ("raw", _SUFFIXES[3:]))
            for suffix in suffixes
        ]
        return next((path for path in candidates if is_file(path)), candidates[0])

    def _texts(self, path: Path) -> dict[str, str]:
        """Transcripts by id."""
        texts: dict[str, str] = {}
        if not path.is_file():
            raise CorpusError(f"{path} is missing: each list of files needs a transcription of its name")
        for number, line in read_lines(path):
            if line == "":
                continue
            match = _LINE.fullmatch(line) if line is not None else None
            if match is None:
                wrong = "is not UTF-8" if line is None else "does not end with (ID)"
                self._problem(f"{path.name}:{number}", "bad-line", f"line {number} of {path} {wrong}")
            elif match["id"] in texts:
                self._problem(match["id"], "duplicate-id", f"a second line of {path} has this id")
            else:
                texts[match["id"]] = match["text"]
        return texts

    def _lists(self) -> list[Path]:
        lists = sorted((self.root / "etc").glob("*.fileids"), key=lambda path: ("train" not in path.stem, path.name))
        if not lists:
            raise CorpusError(f"{self.root} has no etc/*.fileids: name the folder that contains etc and wav")
        return lists

    @override
    def scanned(self) -> list[Path]:
        return [self.root / "wav", self.root / "raw"]

    def files(self) -> Iterator[Path]:
        """Lists, transcriptions and audio."""
        for fileids in self._lists():
            yield fileids
            yield fileids.with_suffix(".transcription")
        for folder in ("wav", "raw"):
            yield from (path for path in files_below(self.root / folder) if path.suffix in _SUFFIXES)
