"""Probabilities of pronunciations and of silence between words, from alignments (Chen et al. 2015).

A pronunciation's probability is divided by that of the word's most frequent one, so that words with many
pronunciations are not at a disadvantage (as in Kaldi's `dict_dir_add_pronprobs.sh`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speech.files import DAMAGED
from speech.hmm.graphs import NO_WORD, GraphOptions, Lexicon
from speech.hmm.model import ModelError, write_json
from speech.hmm.topology import PhoneSet
from speech.hmm.viterbi import StatePath
from speech.lexicon import Lexicon as Dictionary
from speech.lexicon import Pronunciation as Spoken
from speech.lexicon import read_lexicon

Pronunciation = tuple[str, tuple[str, ...]]
"""A word and its phones by name."""


_LEXICON, _SILENCE = "lexiconp.txt", "silence.json"


@dataclass
class PronunciationCounts:
    """Counts of pronunciations and pauses.

    Attributes:
        spoken: Count of each word with each pronunciation.
        pauses: Number of silences between words, before the first and after the last one.
        places: Number of places where silence was possible.
        paused: Number of silences after each word.
    """

    spoken: Counter[Pronunciation] = field(default_factory=Counter)
    pauses: int = 0
    places: int = 0
    paused: Counter[str] = field(default_factory=Counter)

    def add(self, alignment: StatePath, words: Sequence[str], phones: PhoneSet) -> PronunciationCounts:
        """Count an utterance, in place."""
        sequences: dict[int, list[str]] = {}
        for phone, word in zip(alignment.phones.tolist(), alignment.words.tolist(), strict=True):
            if word != NO_WORD:
                sequences.setdefault(word, []).append(phones.base(phone))
                continue
            self.pauses += 1
            if sequences:
                self.paused[words[max(sequences)]] += 1
        for word, names in sequences.items():
            self.spoken[words[word], tuple(names)] += 1
        self.places += len(words) + 1
        return self

    def __add__(self, other: PronunciationCounts) -> PronunciationCounts:
        return PronunciationCounts(
            self.spoken + other.spoken,
            self.pauses + other.pauses,
            self.places + other.places,
            self.paused + other.paused,
        )


def graph_options(
    counts: PronunciationCounts, lexicon: Lexicon, smoothing: float = 1.0, by_word: bool = False
) -> GraphOptions:
    """Probabilities for training and decoding graphs.

    Args:
        counts: Of all utterances.
        lexicon: All pronunciations.
        smoothing: Added to each count; pronunciations of words that did not occur stay equally probable.
        by_word: Whether the probability of silence depends on the word before it, as far as its count allows.

    Returns:
        Options whose pronunciations are those with less than the largest probability.
    """
    probabilities: dict[Pronunciation, float] = {}
    for word in {word for word, _ in counts.spoken}:
        numbers = {tuple(phones): counts.spoken[word, tuple(phones)] + smoothing for phones in lexicon.get(word, ())}
        if len(numbers) > 1:
            most = max(numbers.values())
            probabilities |= {(word, phones): number / most for phones, number in numbers.items() if number < most}
    silence = (counts.pauses + smoothing) / (counts.places + 2 * smoothing)
    if not by_word:
        return GraphOptions(silence, probabilities)
    occurrences: Counter[str] = Counter()
    for (word, _), count in counts.spoken.items():
        occurrences[word] += count
    prior = 2.0 * smoothing  # the weight of the probability after any word
    after = {
        word: (counts.paused[word] + prior * silence) / (count + prior) for word, count in sorted(occurrences.items())
    }
    return GraphOptions(silence, probabilities, after)


def count_pronunciations(
    alignments: Mapping[str, StatePath], transcripts: Mapping[str, Sequence[str]], phones: PhoneSet
) -> PronunciationCounts:
    """Counts of all aligned utterances."""
    total = PronunciationCounts()
    for name, alignment in alignments.items():
        total.add(alignment, transcripts[name], phones)
    return total


def word_pronunciations(lexicon: Dictionary, words: Iterable[str] | None = None) -> dict[str, list[tuple[str, ...]]]:
    """The pronunciations of words as training and decoding graphs need them; words without any are left out.

    Args:
        lexicon: The lexicon.
        words: The words; by default all of the lexicon.
    """
    chosen = lexicon if words is None else words
    return {word: [pronunciation.phones for pronunciation in lexicon[word]] for word in chosen if word in lexicon}


def save_lexicon(folder: Path, lexicon: Dictionary, options: GraphOptions) -> None:
    """Write a lexicon with the probabilities of pronunciations and silence: Kaldi's lexiconp.txt, and silence.json."""
    known = options.pronunciations or {}
    entries = {
        word: [
            Spoken(pronunciation.phones, known.get((word, pronunciation.phones), 1.0))
            for pronunciation in lexicon[word]
        ]
        for word in lexicon
    }
    folder.mkdir(parents=True, exist_ok=True)
    Dictionary(entries, lexicon.unknown).write(folder / _LEXICON, probabilities=True)
    facts: dict[str, Any] = {"silence_probability": options.silence_probability, "unknown": lexicon.unknown}
    if options.silence_after is not None:
        facts["after"] = dict(options.silence_after)
    write_json(folder / _SILENCE, facts)


def load_lexicon(folder: Path) -> tuple[Dictionary, GraphOptions]:
    """The inverse of `save_lexicon`.

    Raises:
        ModelError: A file is missing or damaged.
    """
    try:
        facts = json.loads((folder / _SILENCE).read_text(encoding="utf-8"))
        silence, unknown = float(facts["silence_probability"]), str(facts["unknown"])
        after = {str(word): float(p) for word, p in facts["after"].items()} if "after" in facts else None
        entries = read_lexicon(folder / _LEXICON, "kaldip").entries
        if not all(0 < probability < 1 for probability in (silence, *(after or {}).values())):
            raise ValueError("a probability of silence is not between 0 and 1")
    except DAMAGED as error:
        raise ModelError(f"{folder} holds no lexicon of an alignment ({error!r}): align again") from error
    probabilities = {
        (word, pronunciation.phones): pronunciation.probability
        for word, variants in entries.items()
        for pronunciation in variants
        if pronunciation.probability is not None and pronunciation.probability < 1.0
    }
    return Dictionary(entries, unknown), GraphOptions(silence, probabilities, after)
