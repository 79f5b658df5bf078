"""Error counts and rates of a test set: total, by speaker and by domain.

The rate of a set is the sum of its errors over the sum of its reference words (NIST), never the mean of its utterances'
rates. A set without reference words has no rate (None), but its insertions count in sets that contain it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein

from speech.scoring.align import TextTooLongError, count_operations
from speech.scoring.network import PLAIN, MarkupError, ScoringRules
from speech.scoring.tracing import TraceStep, trace


class ScoringError(ValueError):
    """Hypotheses that cannot be scored: duplicate utterances, systems with different test sets, no reference words."""


class ScoringRow(NamedTuple):
    """One utterance to be scored; texts are normalized, words are separated by white space."""

    id: str
    ref: str
    hyp: str
    speaker: str = ""
    domain: str = ""
    labels: tuple[str, ...] = ()
    """Subsets that the utterance belongs to, as in an STM file."""


@dataclass(frozen=True)
class ErrorCounts:
    """Counts of one utterance or of a set; add them with `+`."""

    cor: int = 0
    """Correct words."""
    sub: int = 0
    """Substituted words."""
    ins: int = 0
    """Inserted words."""
    dele: int = 0
    """Deleted words."""
    char_errors: int = 0
    """Levenshtein distance between reference and hypothesis in characters."""
    ref_chars: int = 0
    """Characters of the reference, including single spaces between words."""
    utterances: int = 0
    """Number of utterances."""
    wrong_utterances: int = 0
    """Utterances with at least one word error."""

    @property
    def ref_words(self) -> int:
        """Words of the reference."""
        return self.cor + self.sub + self.dele

    @property
    def hyp_words(self) -> int:
        """Words of the hypothesis."""
        return self.cor + self.sub + self.ins

    @property
    def errors(self) -> int:
        """Word errors: substitutions, insertions and deletions."""
        return self.sub + self.ins + self.dele

    @property
    def wer(self) -> float | None:
        """Word error rate as a fraction; None without reference words."""
        return _rate(self.errors, self.ref_words)

    @property
    def cer(self) -> float | None:
        """Character error rate as a fraction, spaces included; None without reference characters."""
        return _rate(self.char_errors, self.ref_chars)

    @property
    def ser(self) -> float | None:
        """Share of utterances with an error (sentence error rate); None without utterances."""
        return _rate(self.wrong_utterances, self.utterances)

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            self.cor + other.cor,
            self.sub + other.sub,
            self.ins + other.ins,
            self.dele + other.dele,
            self.char_errors + other.char_errors,
            self.ref_chars + other.ref_chars,
            self.utterances + other.utterances,
            self.wrong_utterances + other.wrong_utterances,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value with the counts and the rates."""
        return {
            "cor": self.cor,
            "sub": self.sub,
            "ins": self.ins,
            "del": self.dele,
            "errors": self.errors,
            "ref_words": self.ref_words,
            "hyp_words": self.hyp_words,
            "char_errors": self.char_errors,
            "ref_chars": self.ref_chars,
            "utterances": self.utterances,
            "wrong_utterances": self.wrong_utterances,
            "wer": self.wer,
            "cer": self.cer,
            "ser": self.ser,
        }


@dataclass(frozen=True)
class UtteranceScore:
    """The counts and texts of one utterance."""

    id: str
    ref: str
    hyp: str
    speaker: str
    domain: str
    counts: ErrorCounts
    labels: tuple[str, ...] = ()
    rules: ScoringRules = PLAIN

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        texts = {"id": self.id, "ref": self.ref, "hyp": self.hyp, "speaker": self.speaker, "domain": self.domain}
        return {**texts, **self.counts.to_dict()}


@dataclass(frozen=True)
class ScoreReport:
    """The scores of a test set."""

    total: ErrorCounts
    """Counts of the whole set."""
    speakers: dict[str, ErrorCounts] = field(default_factory=dict)
    """Counts of each speaker, sorted by name; the empty name stands for all utterances whose speakers are unknown."""
    domains: dict[str, ErrorCounts] = field(default_factory=dict)
    """Counts of each domain, sorted by name."""
    utterances: tuple[UtteranceScore, ...] = ()
    """Every utterance, in the order given."""
    labels: dict[str, ErrorCounts] = field(default_factory=dict)
    """Counts of each label, in the order of their first utterances."""

    @property
    def wer(self) -> float | None:
        """Word error rate of the set as a fraction."""
        return self.total.wer

    @property
    def cer(self) -> float | None:
        """Character error rate of the set as a fraction."""
        return self.total.cer

    def errors(self) -> NDArray[np.int64]:
        """Returns the word errors of each utterance, [N], for confidence intervals and comparisons."""
        return np.array([utterance.counts.errors for utterance in self.utterances], dtype=np.int64)

    def words(self) -> NDArray[np.int64]:
        """Returns the reference words of each utterance, [N]."""
        return np.array([utterance.counts.ref_words for utterance in self.utterances], dtype=np.int64)

    def speaker_of(self) -> list[str]:
        """Returns the speaker of each utterance, [N], for intervals over speakers."""
        return [utterance.speaker for utterance in self.utterances]

    def to_dict(self, *, utterances: bool = False) -> dict[str, Any]:
        """Returns a JSON value; with `utterances`, it includes every utterance."""
        value: dict[str, Any] = {
            "total": self.total.to_dict(),
            "speakers": {name: counts.to_dict() for name, counts in self.speakers.items()},
            "domains": {name: counts.to_dict() for name, counts in self.domains.items()},
        }
        if self.labels:
            value["labels"] = {name: counts.to_dict() for name, counts in self.labels.items()}
        if utterances:
            value["utterances"] = [utterance.to_dict() for utterance in self.utterances]
        return value


def score_utterance(ref: str, hyp: str, rules: ScoringRules = PLAIN) -> ErrorCounts:
    """Counts the errors of one utterance; words are separated by white space.

    Raises:
        MarkupError: A text's alternatives cannot be read.
        TextTooLongError: The texts are too long to be aligned.
    """
    if rules.reads_marks(ref) or rules.reads_marks(hyp):
        return _count_steps(trace(ref, hyp, rules))
    ref_words, hyp_words = rules.fold(ref).split(), rules.fold(hyp).split()
    cor, sub, ins, dele = count_operations(ref_words, hyp_words)
    return _counts(cor, sub, ins, dele, " ".join(ref_words), " ".join(hyp_words))


def _count_steps(steps: list[TraceStep]) -> ErrorCounts:
    operations = [step.operation for step in steps]
    ref_words, hyp_words = [], []
    for step in steps:
        # a word that may be left out has no characters where it is, and a fragment has those of its word
        if step.operation == "cor" and step.ref and step.hyp:
            ref_words.append(step.ref.spelling)
            hyp_words.append(step.ref.spelling)
        elif step.error:
            ref_words += [step.ref.spelling] if step.ref else []
            hyp_words += [step.hyp.spelling] if step.hyp else []
    numbers = (operations.count("cor"), operations.count("sub"), operations.count("ins"), operations.count("del"))
    return _counts(*numbers, " ".join(ref_words), " ".join(hyp_words))


def _counts(cor: int, sub: int, ins: int, dele: int, ref: str, hyp: str) -> ErrorCounts:
    wrong = int(sub + ins + dele > 0)
    return ErrorCounts(cor, sub, ins, dele, Levenshtein.distance(ref, hyp), len(ref), 1, wrong)


def score_sets(rows: Iterable[ScoringRow | tuple[str, str, str, str, str]], rules: ScoringRules = PLAIN) -> ScoreReport:
    """Scores a test set.

    Args:
        rows: (id, reference, hypothesis, speaker, domain) of each utterance, with the same normalization of both texts.
            Include utterances without recognized words, with the hypothesis "": leaving them out hides deletions.
        rules: How texts are read and words compared.

    Raises:
        ScoringError: An utterance is listed twice or too long, or a text's alternatives cannot be read.
    """
    total, seen = ErrorCounts(), set()
    groups: tuple[dict[str, ErrorCounts], ...] = ({}, {}, {})
    utterances: list[UtteranceScore] = []
    for given in rows:
        row = ScoringRow(*given)
        row = row._replace(ref=normalize("NFC", row.ref), hyp=normalize("NFC", row.hyp))
        if row.id in seen:
            raise ScoringError(f"utterance {row.id!r} is listed twice: give every utterance one hypothesis")
        seen.add(row.id)
        try:
            counts = score_utterance(row.ref, row.hyp, rules)
        except (MarkupError, TextTooLongError) as error:
            raise ScoringError(f"utterance {row.id!r}: {error}") from error
        total += counts
        for group, names in zip(groups, ([row.speaker], [row.domain], row.labels), strict=True):
            for name in names:
                group[name] = group.get(name, ErrorCounts()) + counts
        utterances.append(UtteranceScore(row.id, row.ref, row.hyp, row.speaker, row.domain, counts, row.labels, rules))
    speakers, domains, labels = groups
    return ScoreReport(total, dict(sorted(speakers.items())), dict(sorted(domains.items())), tuple(utterances), labels)


def _rate(errors: int, units: int) -> float | None:
    return errors / units if units else None
