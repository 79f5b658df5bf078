"""TED-LIUM, releases 1 to 3: segments in stm/TALK.stm, whole talks in sph/TALK.sph (or wav, flac).

Sources: Rousseau et al. 2014, "Enhancing the TED-LIUM Corpus …"; Hernandez et al. 2018, "TED-LIUM 3 …".
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from storage.corpora.base import SET_OF_SPLIT, CorpusError, CorpusReader, Utterance, is_file
from storage.corpora.stm import NOT_SCORED, StmError, StmSegment, read_stm

_SUFFIXES = (".sph", ".wav", ".flac")
_CLITIC = re.compile(r" '(?=(?:s|re|ve|ll|d|m|t)\b)")


class TedliumReader(CorpusReader):
    """Reads the corpus' folder, or one part of it (a folder with `stm`).

    `dev` is the set `valid`. For release 3, as usual, `dev` and `test` are those of `legacy`, and the rest of `data` is
    `train`. Split clitics ("it 's") are joined. Segments that the corpus excludes from scoring are reported as
    problems.

    Options:
        unknown: handling of `<unk>` (untranscribed speech): `remove` it like other tags (default) or `refuse` the
            segment.
    """

    LAYOUT = "TED-LIUM 1 to 3: `stm/*.stm`, `sph/*.sph` (or `wav`, `flac`)"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "train/stm/AnnLee_2010.stm": "AnnLee_2010 1 AnnLee 0.5 2.0 <o,f0,female> good morning <unk>\n",
        "test/stm/BobRay_2010.stm": "BobRay_2010 1 BobRay 1.0 3.0 <o,f0,male> good night\n",
        "train/sph/AnnLee_2010.sph": "",
        "test/sph/BobRay_2010.sph": "",
    }
    HAS_SETS = True
    OPTIONS = frozenset({"unknown"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a folder `stm` with `.stm` files."""
        return any(any(stm.glob("*.stm")) for _, stm in _parts(root))

    def _utterances(self) -> Iterator[Utterance]:
        unknown = self.options.get("unknown", "remove")
        if unknown not in ("remove", "refuse"):
            raise CorpusError(f"option unknown is {unknown!r}: use remove or refuse")
        talks: set[str] = set()
        for split, stm in self._parts():
            for path in sorted(stm.glob("*.stm")):
                if path.stem in talks:
                    continue  # release 3's data contains the talks of dev and test, too
                if split not in (None, "train"):
                    talks.add(path.stem)
                yield from self._talk(path, split, refuse_unknown=unknown == "refuse")

    def _talk(self, stm: Path, split: str | None, refuse_unknown: bool) -> Iterator[Utterance]:
        for segment in read_stm(stm):
            if isinstance(segment, StmError):
                self._problem(segment.place, "bad-line", str(segment))
                continue
            utterance_id = f"{segment.file}-{round(segment.start * 100):07d}-{round(segment.end * 100):07d}"
            if NOT_SCORED in segment.text:
                self._problem(utterance_id, "not-scored", "the corpus excludes it from scoring")
            elif refuse_unknown and "<unk>" in segment.text:
                self._problem(utterance_id, "unknown-words", segment.text)
            else:
                yield from self._segment(stm, utterance_id, segment, split)

    def _segment(self, stm: Path, utterance_id: str, segment: StmSegment, split: str | None) -> Iterator[Utterance]:
        utterance = self._make(
            utterance_id,
            _audio(stm, segment.file),
            segment.text,
            segment.speaker,
            start=segment.start,
            end=segment.end,
            duration=round(segment.end - segment.start, 6),
            split=split,
        )
        if utterance:
            yield utterance

    @override
    def _words(self, text: str) -> str:
        return _CLITIC.sub("'", super()._words(text))

    def _parts(self) -> list[tuple[str | None, Path]]:
        parts = _parts(self.root)
        if not parts:
            raise CorpusError(f"{self.root} has no folder stm: name TEDLIUM_release2, TEDLIUM_release-3, or a part")
        return parts

    @override
    def scanned(self) -> list[Path]:
        return [stm.parent / name for _, stm in self._parts() for name in ("stm", "sph", "wav", "flac")]

    def files(self) -> Iterator[Path]:
        """Yield segment tables and talks."""
        for _, stm in self._parts():
            yield from sorted(stm.glob("*.stm"))
            for folder in ("sph", "wav", "flac"):
                yield from sorted(p for p in (stm.parent / folder).glob("*") if p.suffix in _SUFFIXES)


def _parts(root: Path) -> list[tuple[str | None, Path]]:
    """Sets and their folders of segment tables."""
    if (root / "stm").is_dir():
        return [(SET_OF_SPLIT.get(root.name), root / "stm")]
    legacy = root / "legacy" if (root / "legacy").is_dir() else root
    parts = [(SET_OF_SPLIT[name], legacy / name / "stm") for name in ("dev", "test", "train")]
    if (root / "data" / "stm").is_dir():
        parts[2] = ("train", root / "data" / "stm")
    return [(split, stm) for split, stm in parts if stm.is_dir()]


def _audio(stm: Path, talk: str) -> Path:
    name = talk.replace("/", "_")
    candidates = [stm.parents[1] / folder / f"{name}.{folder}" for folder in ("sph", "wav", "flac")]
    return next((path for path in candidates if is_file(path)), candidates[0])
