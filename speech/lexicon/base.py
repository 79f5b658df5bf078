"""Lexicons: words and their pronunciations, which are sequences of phones."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configurable.choices import ChoiceWithFiles
from configurable.files import replace_file
from configurable.wording import counted

UNKNOWN = "<unk>"
_MANY_UNKNOWN = 0.05
"""A larger share of unknown running words is worth a remark: a lexicon that fits leaves a few per cent."""
UNKNOWN_PHONE = "SPN"
"""Kaldi's phone for spoken noise: the pronunciation of the unknown word."""


class LexiconError(ValueError):
    """A lexicon that cannot be read or built; the message names the file or field, and the remedy."""


class LexiconConfig(ChoiceWithFiles, ABC):
    """Base class of the sources' configurations."""

    @abstractmethod
    def build(self) -> LexiconSource:
        """Make the source."""


@dataclass(frozen=True, order=True)
class Pronunciation:
    """One pronunciation of a word."""

    phones: tuple[str, ...]
    """Its phones, in order."""
    probability: float | None = None
    """Probability, absolute or relative to the word's most probable pronunciation; None if unknown."""


class Lexicon:
    """Words with their pronunciations, in the order of the entries; equal pronunciations of a word are merged.

    Args:
        entries: Pronunciations by word, at least one for each.
        unknown: The word that stands for all other words; its pronunciation is `SPN` unless it has an entry.
    """

    def __init__(self, entries: Mapping[str, Sequence[Pronunciation]], unknown: str = UNKNOWN) -> None:
        assert all(entries.values()), "a word without a pronunciation"
        self.unknown = unknown
        self._entries = {word: _merged(variants) for word, variants in entries.items()}
        self._entries.setdefault(unknown, (Pronunciation((UNKNOWN_PHONE,)),))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, word: str) -> bool:
        return word in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, word: str) -> tuple[Pronunciation, ...]:
        """The pronunciations of a word; of the unknown word if there are none."""
        return self._entries.get(word, self._entries[self.unknown])

    def phones(self) -> Counter[str]:
        """Number of occurrences of each phone in all pronunciations, sorted by name."""
        counts = Counter(
            phone for variants in self._entries.values() for pronunciation in variants for phone in pronunciation.phones
        )
        return Counter(dict(sorted(counts.items())))

    def homophones(self) -> dict[tuple[str, ...], list[str]]:
        """Words that share a pronunciation, by that pronunciation."""
        shared: dict[tuple[str, ...], list[str]] = {}
        for word, variants in self._entries.items():
            for pronunciation in variants:
                shared.setdefault(pronunciation.phones, []).append(word)
        return {phones: words for phones, words in shared.items() if len(words) > 1}

    def lines(self, probabilities: bool = False) -> Iterator[str]:
        """Yields Kaldi's lexicon.txt, or lexiconp.txt, in which each word's best pronunciation has probability 1."""
        for word in sorted(self._entries):
            variants = self._entries[word]
            highest = max(pronunciation.probability or 1.0 for pronunciation in variants)
            for pronunciation in sorted(variants):
                shown = [f"{(pronunciation.probability or 1.0) / highest:.6g}"] if probabilities else []
                yield " ".join([word, *shown, *pronunciation.phones])

    def write(self, path: Path, probabilities: bool = False) -> None:
        """Write Kaldi's lexicon.txt, or lexiconp.txt if probabilities are wanted; atomic."""
        replace_file(path, "".join(f"{line}\n" for line in self.lines(probabilities)).encode())

    def digest(self) -> str:
        """SHA-256 of all entries, independent of their order."""
        digest = hashlib.sha256(f"{self.unknown}\n".encode())
        for word in sorted(self._entries):
            for pronunciation in sorted(self._entries[word], key=lambda pronunciation: pronunciation.phones):
                digest.update(f"{word}\t{pronunciation.probability}\t{' '.join(pronunciation.phones)}\n".encode())
        return digest.hexdigest()


def _merged(variants: Sequence[Pronunciation]) -> tuple[Pronunciation, ...]:
    """Merge equal phone sequences; the highest of their probabilities is kept."""
    best: dict[tuple[str, ...], float | None] = {}
    for pronunciation in variants:
        before = best.get(pronunciation.phones)
        known = [value for value in (before, pronunciation.probability) if value is not None]
        best[pronunciation.phones] = max(known) if known else None
    return tuple(Pronunciation(phones, probability) for phones, probability in best.items())


@dataclass(frozen=True)
class BadLine:
    """A line of a lexicon file that cannot be used."""

    number: int
    """Line number, from 1."""
    text: str
    """Beginning of the line."""
    reason: str
    """Why it cannot be used."""


@dataclass
class Coverage:
    """Counts of words by the origin of their pronunciations."""

    types: Counter[str] = field(default_factory=Counter)
    """Number of different words by origin (a kind of source, or `unknown`)."""
    running: Counter[str] = field(default_factory=Counter)
    """Number of running words by origin."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Words without a pronunciation, with their number of occurrences."""
    origins: dict[str, str] = field(default_factory=dict)
    """Origin by word."""

    def add(self, word: str, count: int, origin: str) -> None:
        """Count a word."""
        self.origins[word] = origin
        self.types[origin] += 1
        self.running[origin] += count
        if origin == "unknown":
            self.unknown[word] += count

    def warnings(self) -> list[str]:
        """A remark if many of the words have no pronunciation; none otherwise."""
        words, unknown = self.types.total(), len(self.unknown)
        share = self.unknown.total() / self.running.total() if self.running.total() else unknown / max(words, 1)
        if share <= _MANY_UNKNOWN:
            return []
        named = ", ".join(word for word, _ in self.unknown.most_common(3))
        part = f"{unknown:,} of {counted(words, 'word')} ({100 * share:.1f} % of the running words)"
        return [
            f"{part} have no pronunciation, such as {named}: "
            f"add them to the lexicon, or correct its spelling, letter case or language"
        ]

    def part(self, counts: Mapping[str, int]) -> Coverage:
        """The coverage of some of the words, with other counts."""
        coverage = Coverage()
        for word, count in counts.items():
            coverage.add(word, count, self.origins[word])
        return coverage

    def to_dict(self, examples: int = 20) -> dict[str, Any]:
        """Convert to a JSON value, with the most frequent unknown words."""
        return {
            "words": self.types.total(),
            "running_words": self.running.total(),
            "origins": {name: {"words": self.types[name], "running": self.running[name]} for name in self.types},
            "unknown": dict(self.unknown.most_common(examples)),
        }


@dataclass
class Built:
    """A lexicon for some words, with its coverage and problems."""

    lexicon: Lexicon
    coverage: Coverage
    bad_lines: list[BadLine] = field(default_factory=list)
    """Quarantined lines of the file."""
    duplicates: list[str] = field(default_factory=list)
    """Words for which the file lists a pronunciation twice, once per repetition."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user, such as that eSpeak NG is not installed."""

    def record(self) -> dict[str, Any]:
        """Returns the part of a stage's record about the lexicon, a JSON value."""
        return {
            "digest": self.lexicon.digest(),
            "words": len(self.lexicon),
            "phones": len(self.lexicon.phones()),
            "coverage": self.coverage.to_dict(),
            "quarantined": dict(Counter(line.reason for line in self.bad_lines)),
            "duplicates": len(self.duplicates),
            "notes": list(self.notes),
        }


class LexiconSource(ABC):
    """A source of pronunciations.

    Args:
        cfg: Its configuration.
    """

    def __init__(self, cfg: LexiconConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def build(self, counts: Mapping[str, int]) -> Built:
        """Builds a lexicon.

        Args:
            counts: The words, and how often each occurs.

        Raises:
            LexiconError: The source cannot be read.
        """


def covered(
    counts: Mapping[str, int], entries: Mapping[str, Sequence[Pronunciation]], origin: str
) -> tuple[Coverage, list[str]]:
    """Returns the coverage of the words that have a pronunciation, and the list of the others."""
    coverage, missing = Coverage(), []
    for word, count in counts.items():
        if word in entries:
            coverage.add(word, count, origin)
        else:
            missing.append(word)
    return coverage, missing
