"""Lexicons from files. Missing words are pronounced by eSpeak NG if its phonemes can be mapped to the file's phones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal
from unicodedata import normalize

from pydantic import Field
from typing_extensions import override

from configurable.wording import counted
from speech.lexicon.arpabet import from_ipa
from speech.lexicon.base import (
    UNKNOWN,
    BadLine,
    Built,
    Lexicon,
    LexiconConfig,
    LexiconError,
    LexiconSource,
    Pronunciation,
    covered,
)
from speech.lexicon.espeak import pronounce
from speech.lexicon.formats import Format, Parsed, read_lexicon
from speech.lexicon.stress import Stress, with_stress
from speech.synthesis.espeak import SynthesizerMissingError

_CASES: dict[str, Callable[[str], str]] = {"keep": str, "lower": str.lower, "upper": str.upper}
_ARPABET = re.compile(r"(AA|AE|AH|AO|EH|ER|EY|IH|IY|OW|UW)[0-2]?")


class FileLexiconConfig(LexiconConfig):
    """Pronunciations from a file."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """Path of the lexicon."""
    format: Format | Literal["auto"] = "auto"
    """`kaldi` (lexicon.txt), `kaldip` (lexiconp.txt), `cmudict` or `mfa`; `auto` detects the format."""
    stress: Stress = "keep"
    """Stress marks: `keep` them, `merge` secondary with primary stress, or `drop` them."""
    case: Literal["keep", "lower", "upper"] = "keep"
    """Letter case that the file's words are converted to; it must be that of the transcripts."""
    phones: str = ""
    """A file whose first column lists the permitted phones, with stress marks as in the lexicon; lines with other
    phones are quarantined. Empty: all phones are permitted."""
    missing: Literal["espeak", "unknown"] = "espeak"
    """Words that the file does not have: `espeak` pronounces them with eSpeak NG if it is installed and its phonemes
    can be mapped to the file's phones; `unknown` does not."""
    language: str = "en-us"
    """Language code of eSpeak NG for missing words."""
    unknown: str = UNKNOWN
    """The word that stands for all words without a pronunciation."""

    file_fields: ClassVar[dict[str, str]] = {"path": "lexicon", "phones": "phones"}

    @override
    def build(self) -> LexiconSource:
        return FileLexicon(self)


class FileLexicon(LexiconSource):
    """Reads a lexicon file and adds missing words."""

    cfg: FileLexiconConfig

    @override
    def build(self, counts: Mapping[str, int]) -> Built:
        parsed = read_lexicon(Path(self.cfg.path), self.cfg.format)
        inventory = {
            phone
            for variants in parsed.entries.values()
            for pronunciation in variants
            for phone in pronunciation.phones
        }
        bad = parsed.bad + self._foreign(parsed, inventory)
        entries = self._brought(parsed)
        coverage, missing = covered(counts, entries, "file")
        notes = self._case_note(entries, missing, counts)
        if missing and self.cfg.missing == "espeak":
            completed, note = self._completed(missing, inventory)
            entries |= completed
            notes += note
        for word in missing:
            coverage.add(word, counts[word], "espeak" if word in entries else "unknown")
        return Built(Lexicon(entries, self.cfg.unknown), coverage, bad, parsed.duplicates(), notes)

    def _foreign(self, parsed: Parsed, inventory: set[str]) -> list[BadLine]:
        """Remove pronunciations with phones that are not permitted, and return them as bad lines."""
        if not self.cfg.phones:
            return []
        try:
            lines = normalize("NFC", Path(self.cfg.phones).read_text(encoding="utf-8-sig")).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LexiconError(f"lexicon.phones: {self.cfg.phones} cannot be read: {error}") from error
        listed = {fields[0] for line in lines if (fields := line.split())}
        if not inventory - listed:
            return []
        bad = []
        for word, variants in list(parsed.entries.items()):
            kept = [pronunciation for pronunciation in variants if set(pronunciation.phones) <= listed]
            for pronunciation in variants:
                if foreign := [phone for phone in pronunciation.phones if phone not in listed]:
                    text = " ".join([word, *pronunciation.phones])
                    bad.append(BadLine(0, text[:60], f"phone {foreign[0]} is not in lexicon.phones"))
            parsed.entries[word] = kept
            if not kept:
                del parsed.entries[word]
        inventory &= listed
        return bad

    def _brought(self, parsed: Parsed) -> dict[str, list[Pronunciation]]:
        """The entries in the configured case, with the configured stress marks."""
        case = _CASES[self.cfg.case]
        brought: dict[str, list[Pronunciation]] = {}
        for word, variants in parsed.entries.items():
            brought.setdefault(case(word), []).extend(
                Pronunciation(self._stressed(pronunciation.phones), pronunciation.probability)
                for pronunciation in variants
            )
        return brought

    def _stressed(self, phones: Iterable[str]) -> tuple[str, ...]:
        return tuple(with_stress(phone, self.cfg.stress) for phone in phones)

    def _completed(self, missing: list[str], inventory: set[str]) -> tuple[dict[str, list[Pronunciation]], list[str]]:
        """Pronunciations of missing words in the file's phones, and remarks for the user."""
        try:
            phonemes = pronounce(missing, self.cfg.language)
        except SynthesizerMissingError as error:
            return {}, [f"words that are not in the file are unknown: {error}"]
        arpabet = sum(bool(_ARPABET.fullmatch(phone)) for phone in inventory) >= 8
        digits = any(phone[-1] in "012" for phone in inventory)
        completed = {}
        for word, phones in phonemes.items():
            own = from_ipa(phones, digits=digits) if arpabet else phones
            if own is not None and inventory.issuperset(own):
                completed[word] = [Pronunciation(self._stressed(own))]
        foreign = len(phonemes) - len(completed)
        return completed, [
            f"{foreign} words whose eSpeak NG phonemes have no counterpart among the file's phones"
        ] if foreign else []

    def _case_note(self, entries: Mapping[str, object], missing: list[str], counts: Mapping[str, int]) -> list[str]:
        """Remark for a file that has most of the missing words in another letter case, or no word at all."""
        for case, change in _CASES.items():
            known = set(map(change, entries)).intersection(missing)
            if 2 * len(known) > len(missing):
                return [
                    f"{self.cfg.path} has {counted(len(known), 'more word')} of the transcripts, such as {min(known)}, "
                    f"in another letter case: set lexicon.case={case}"
                ]
        if counts and len(missing) == len(counts):
            return [f"no word of the transcripts is in {self.cfg.path}: is it a lexicon of another language?"]
        return []
