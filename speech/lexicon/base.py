"""What a lexicon is: words, their pronunciations, the phones that these are made of."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from speech.choices import ChoiceWithFiles
from speech.files import replace_file

UNKNOWN = "<unk>"
UNKNOWN_PHONE = "SPN"
"""Kaldi's spoken noise: what words without a pronunciation are made of."""


class LexiconError(ValueError):
    """A lexicon that cannot be read or made; the message names the file or field, and the remedy."""


class LexiconConfig(ChoiceWithFiles):
    """Where pronunciations come from."""


@dataclass(frozen=True, order=True)
class Pronunciation:
    """One way to say a word."""

    phones: tuple[str, ...]
    """Its phones, in order."""
    probability: float | None = None
    """Probability, absolute or relative to the word's most probable pronunciation; None if unknown."""


class Lexicon:
    """Words with their pronunciations, in the order in which they were given; equal ones count once.

    Args:
        entries: Word to its pronunciations, one or more.
        unknown: The word that stands for all others; it gets a phone of its own unless it has an entry.
    """

    def __init__(self, entries: Mapping[str, Sequence[Pronunciation]], unknown: str = UNKNOWN) -> None:
        assert all(entries.values()), "a word without a pronunciation"
        self.unknown = unknown
        self._entries = {word: _merged(found) for word, found in entries.items()}
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
        """How many pronunciations have each phone, sorted by name; a phone that comes twice in one counts twice."""
        counts = Counter(phone for found in self._entries.values() for one in found for phone in one.phones)
        return Counter(dict(sorted(counts.items())))

    def homophones(self) -> dict[tuple[str, ...], list[str]]:
        """Phones that several words share, with these words."""
        shared: dict[tuple[str, ...], list[str]] = {}
        for word, found in self._entries.items():
            for one in found:
                shared.setdefault(one.phones, []).append(word)
        return {phones: words for phones, words in shared.items() if len(words) > 1}

    def lines(self, probabilities: bool = False) -> Iterator[str]:
        """Kaldi's lexicon.txt, or lexiconp.txt, whose probabilities are relative to the word's likeliest."""
        for word in sorted(self._entries):
            found = self._entries[word]
            highest = max(one.probability or 1.0 for one in found)
            for one in sorted(found):
                shown = [f"{(one.probability or 1.0) / highest:.6g}"] if probabilities else []
                yield " ".join([word, *shown, *one.phones])

    def write(self, path: Path, probabilities: bool = False) -> None:
        """Write Kaldi's lexicon.txt, or with probabilities lexiconp.txt: whole or not at all."""
        replace_file(path, "".join(f"{line}\n" for line in self.lines(probabilities)).encode())

    def digest(self) -> str:
        """SHA-256 of what it says; the order of words does not count."""
        digest = hashlib.sha256(f"{self.unknown}\n".encode())
        for word in sorted(self._entries):
            for one in sorted(self._entries[word], key=lambda one: one.phones):
                digest.update(f"{word}\t{one.probability}\t{' '.join(one.phones)}\n".encode())
        return digest.hexdigest()


def _merged(found: Sequence[Pronunciation]) -> tuple[Pronunciation, ...]:
    """Each sequence of phones once, with the highest of its probabilities."""
    best: dict[tuple[str, ...], float | None] = {}
    for one in found:
        before = best.get(one.phones)
        known = [value for value in (before, one.probability) if value is not None]
        best[one.phones] = max(known) if known else None
    return tuple(Pronunciation(phones, probability) for phones, probability in best.items())


@dataclass(frozen=True)
class BadLine:
    """A line of a lexicon's file that says nothing usable."""

    number: int
    """In the file, from 1."""
    text: str
    """Its beginning."""
    reason: str
    """What is wrong with it."""


@dataclass
class Coverage:
    """Where the pronunciations of some words come from."""

    types: Counter[str] = field(default_factory=Counter)
    """Different words by origin (a kind of source, or `unknown`)."""
    running: Counter[str] = field(default_factory=Counter)
    """The same in running text."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Words that got none, and how often they come."""
    origins: dict[str, str] = field(default_factory=dict)
    """The origin of each word."""

    def add(self, word: str, count: int, origin: str) -> None:
        """Count a word."""
        self.origins[word] = origin
        self.types[origin] += 1
        self.running[origin] += count
        if origin == "unknown":
            self.unknown[word] += count

    def part(self, counts: Mapping[str, int]) -> Coverage:
        """The same for some of the words, with other counts."""
        found = Coverage()
        for word, count in counts.items():
            found.add(word, count, self.origins[word])
        return found

    def to_dict(self, examples: int = 20) -> dict[str, Any]:
        """A JSON value, with the most frequent unknown words."""
        return {
            "words": self.types.total(),
            "running_words": self.running.total(),
            "origins": {name: {"words": self.types[name], "running": self.running[name]} for name in self.types},
            "unknown": dict(self.unknown.most_common(examples)),
        }


@dataclass
class Built:
    """A lexicon for some words, and how it came about."""

    lexicon: Lexicon
    coverage: Coverage
    bad_lines: list[BadLine] = field(default_factory=list)
    """Quarantined lines of the file."""
    duplicates: list[str] = field(default_factory=list)
    """Words that the file gives the same pronunciation twice, each time once."""
    notes: list[str] = field(default_factory=list)
    """What else should be known, such as that eSpeak NG is not installed."""

    def record(self) -> dict[str, Any]:
        """What a stage records, as a JSON value."""
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

    Attributes:
        config: Class of its configuration.
    """

    config: ClassVar[type[LexiconConfig]]

    def __init__(self, cfg: LexiconConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def build(self, counts: Mapping[str, int]) -> Built:
        """Makes a lexicon.

        Args:
            counts: The words that are needed, and how often each comes.

        Raises:
            LexiconError: The source cannot be read.
        """


def covered(
    counts: Mapping[str, int], found: Mapping[str, Sequence[Pronunciation]], origin: str
) -> tuple[Coverage, list[str]]:
    """How many words have a pronunciation, and those that have none."""
    coverage, missing = Coverage(), []
    for word, count in counts.items():
        if word in found:
            coverage.add(word, count, origin)
        else:
            missing.append(word)
    return coverage, missing
