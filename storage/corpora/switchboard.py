"""Switchboard-1 (LDC97S62) and the Hub5 2000 evaluation (LDC2002S09, LDC2002T43) as the LDC distributes them.

Sources: Godfrey et al. 1992, "SWITCHBOARD: telephone speech corpus for research and development"; the corrected
transcripts of Mississippi State University (swb_ms98_transcriptions); NIST, "The 2000 NIST evaluation plan for
recognition of conversational speech over the telephone".
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from configurable.folders import files_below
from storage.corpora.base import CorpusError, CorpusReader, Utterance, checked_times
from storage.corpora.stm import NOT_SCORED, StmError, StmSegment, read_stm

_TRANSCRIPT = re.compile(r"sw(\d{4})([AB])-ms98-a-trans\.text")
_CHANNELS = {"A": 0, "B": 1, "1": 0, "2": 1}
_ALTERNATIVES = re.compile(r"\{([^{}/]*)/[^{}]*\}")
_OPTIONAL = re.compile(r"\([^()]*\)")


class SwitchboardReader(CorpusReader):
    """Reads a folder with the discs' `.sph` files and `swb_ms98_transcriptions`, in folders of any depth.

    A side of a call is a speaker. Marks of noise are removed and laughed words kept; a mispronounced word
    is transcribed as pronounced. Segments without words are reported as problems.

    Options:
        fragments: handling of words that break off ("th[at]-"): `keep` what was said ("th-", the default), or `remove`.
    """

    LAYOUT = (
        "Switchboard-1 (LDC97S62): `.sph` files of the discs and `swb_ms98_transcriptions/`; a side of a call is "
        "a speaker"
    )
    EXAMPLE: ClassVar[dict[str, str]] = {
        "swb_ms98_transcriptions/20/2001/sw2001A-ms98-a-trans.text": "sw2001A-ms98-a-0001 0.5 2.0 [laughter-yes]\n",
        "swb_ms98_transcriptions/20/2005/sw2005B-ms98-a-trans.text": "sw2005B-ms98-a-0001 1.0 3.0 good night\n",
        "swb1_d1/data/sw02001.sph": "",
        "swb1_d1/data/sw02005.sph": "",
    }
    OPTIONS = frozenset({"fragments"})

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        super().__init__(path, corpus=corpus, domain=domain or "switchboard", language=language, **options)

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a folder `swb_ms98_transcriptions`."""
        return (root / "swb_ms98_transcriptions").is_dir()

    def _utterances(self) -> Iterator[Utterance]:
        fragments = self.options.get("fragments", "keep")
        if fragments not in ("keep", "remove"):
            raise CorpusError(f"option fragments is {fragments!r}: use keep or remove")
        transcripts = self._transcripts()
        if not transcripts:
            raise CorpusError(
                f"{self.root} has no transcripts swNNNNX-ms98-a-trans.text: unpack swb_ms98_transcriptions there"
            )
        calls = {path.stem: path for path in files_below(self.root, "sw*.sph")}
        for path in transcripts:
            match = _TRANSCRIPT.fullmatch(path.name)
            assert match is not None
            call = f"sw0{match[1]}"
            audio = calls.get(call, self.root / f"{call}.sph")
            yield from self._side(path, audio, f"{call}-{match[2]}", fragments == "keep")

    def _side(self, transcript: Path, audio: Path, speaker: str, keep: bool) -> Iterator[Utterance]:
        for number, line in self._lines(transcript):
            fields = (line or "").split(maxsplit=3)
            try:
                if len(fields) < 4:
                    raise ValueError("not UTF-8" if line is None else "too few fields")
                start, end = checked_times(float(fields[1]), float(fields[2]))
            except ValueError as error:
                self._problem(f"{transcript.name}:{number}", "bad-line", f"line {number} of {transcript}: {error}")
                continue
            text = switchboard_words(fields[3], keep)
            if not text:
                self._problem(fields[0], "no-words", fields[3])
                continue
            duration = None if end is None else round(end - start, 6)
            channel = _CHANNELS[speaker[-1]]
            utterance = self._make(
                fields[0], audio, text, speaker, start=start, end=end, channel=channel, duration=duration, split="train"
            )
            if utterance:
                yield utterance

    def _transcripts(self) -> list[Path]:
        return [path for path in files_below(self.root, "sw*.text") if _TRANSCRIPT.fullmatch(path.name)]

    @override
    def scanned(self) -> list[Path]:
        return [self.root]

    def files(self) -> Iterator[Path]:
        """Yield calls and transcripts."""
        yield from files_below(self.root, "sw*.sph")
        yield from self._transcripts()


def switchboard_words(text: str, keep_fragments: bool = True) -> str:
    """The words of a transcript.

    Args:
        text: With the marks of the corpus: "[laughter-yeah] uh th[at]- {smushy} [it's/its] them_1 [noise]".
        keep_fragments: Whether words that break off stay, as what was said of them ("th-").
    """
    words = []
    for marked in text.split():
        word = re.sub(r"^\[laughter-(.+)\]", r"\1", marked)  # [laughter-yeah]
        word = re.sub(r"^(-?)\[([^/]+)/.+\](-?)$", r"\1\2\3", word)  # [said/meant]
        if re.fullmatch(r"\[.*\]|<.*>", word):  # [noise], <b_aside>
            continue
        word = re.sub(r"\[[^\[\]]*\]-$|^-\[[^\[\]]*\]", "-", word)  # th[at]- and -[th]at
        word = re.sub(r"[{}\[\]]|_\d+$", "", word)
        if word.strip("-") and (keep_fragments or not (word.startswith("-") or word.endswith("-"))):
            words.append(word)
    return " ".join(words)


class Hub5Reader(CorpusReader):
    """Reads the Hub5 2000 evaluation: its reference `*.stm` and `.sph` files, in folders of any depth.

    All utterances are `test`; their domain is `switchboard` or `callhome`, so that the scores of both are reported.
    Of alternatives in the reference the first counts, and words that may be left out are removed; scores as NIST
    counts them come from `starling score` with the stm and glm files themselves.
    """

    LAYOUT = (
        "Hub5 2000 (LDC2002S09, LDC2002T43): `hub5e00.*.stm` and `.sph` files; the domains are `switchboard` and "
        "`callhome`"
    )
    EXAMPLE: ClassVar[dict[str, str]] = {
        "hub5e00.english.000405.stm": "en_4156 A en_4156_A 0.5 2.0 <O,en,F,en-F> (%hesitation) good morning\n"
        "sw_4390 B sw_4390_B 1.0 3.0 <O,sw,M,sw-M> { i am / i'm } fine\n",
        "hub5e_00/english/en_4156.sph": "",
        "hub5e_00/english/sw_4390.sph": "",
    }

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a table `hub5e*.stm`, or a folder of that name."""
        return any(root.glob("hub5e*.stm")) or any(root.glob("*/hub5e*.stm")) or (root / "hub5e_00").is_dir()

    def _utterances(self) -> Iterator[Utterance]:
        tables = self._tables()
        if not tables:
            raise CorpusError(f"{self.root} has no reference such as hub5e00.english.000405.stm: copy it there")
        calls = {path.stem: path for path in files_below(self.root, "*.sph")}
        for table in tables:
            for segment in read_stm(table):
                if isinstance(segment, StmError):
                    self._problem(segment.place, "bad-line", str(segment))
                else:
                    yield from self._segment(segment, calls)

    def _segment(self, segment: StmSegment, calls: dict[str, Path]) -> Iterator[Utterance]:
        utterance_id = (
            f"{segment.file}-{segment.channel}_{round(segment.start * 100):06d}-{round(segment.end * 100):06d}"
        )
        text = reference_words(segment.text)
        if NOT_SCORED in segment.text.lower():
            self._problem(utterance_id, "not-scored", "the reference excludes it from scoring")
            return
        if not text or segment.channel not in _CHANNELS:
            reason = "no-words" if not text else "bad-channel"
            self._problem(utterance_id, reason, f"{segment.place}: {segment.channel} {segment.text}")
            return
        utterance = self._make(
            utterance_id,
            calls.get(segment.file, self.root / f"{segment.file}.sph"),
            text,
            segment.speaker,
            start=segment.start,
            end=segment.end,
            channel=_CHANNELS[segment.channel],
            duration=round(segment.end - segment.start, 6),
            domain="callhome" if segment.file.startswith("en_") else "switchboard",
            split="test",
        )
        if utterance:
            yield utterance

    def _tables(self) -> list[Path]:
        return files_below(self.root, "hub5e*.stm")

    @override
    def scanned(self) -> list[Path]:
        return [self.root]

    def files(self) -> Iterator[Path]:
        """Yield calls and references."""
        yield from files_below(self.root, "*.sph")
        yield from self._tables()


def reference_words(text: str) -> str:
    """The words of a NIST reference: "{ i am / i'm } (%hesitation) he- there" is "i am he- there"."""
    text = _ALTERNATIVES.sub(r" \1 ", text)
    return " ".join(word for word in _OPTIONAL.sub(" ", text).split() if word not in ("@", "{", "}"))
