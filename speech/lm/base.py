"""What every language model is: a state and a word in, the next state and log10 p out.

    state = model.start
    for word in "turn the radio on".split():
        state, log_prob = model.score(state, model.words.index(word))
    total += model.score(state, END_ID)[1]

A state is hashable: two histories with equal states get the same probabilities for whatever follows, so a decoder may
merge their hypotheses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from configurable.choices import Choice
from configurable.configuration import Configuration
from configurable.former_fields import former_fields
from speech.lm.vocabulary import END_ID, UNKNOWN_ID, Vocabulary

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer
    from speech.lm.sources import Text

Unit = Literal["word", "character", "token"]
States = Sequence[Any] | NDArray[np.int64]
"""States of a batch: an array where they are numbers."""
_BATCH = 8192  # sentences that are scored side by side


class LmError(ValueError):
    """A language model that cannot be estimated or read: too little text, impossible settings, a damaged file."""


class TextConfig(Configuration):
    """Which text a language model is estimated on, besides the training transcripts."""

    paths: tuple[str, ...] = ()
    """Paths or URLs of text files, one sentence a line, UTF-8; plain, .gz, .bz2 or .xz; `*` matches several."""
    allow_test_text: bool = False
    """Keeps lines that share a sequence of words with the test and validation transcripts."""
    protected_length: int = Field(default=8, ge=2)
    """Number of words of such a sequence."""

    _former = former_fields(block_bytes=16_000_000)


class LmConfig(Choice, ABC):
    """How a language model is estimated."""

    text: TextConfig = Field(default_factory=TextConfig)
    """Text besides the training transcripts; a list of paths or URLs is enough."""
    transcripts: bool = True
    """Whether the training transcripts belong to the text."""

    @field_validator("text", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"paths": [value]}
        return {"paths": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _some_text(self) -> Self:
        if not self.transcripts and not self.text.paths:
            raise ValueError("transcripts is false and text names no files: set transcripts: true, or name text")
        return self

    @abstractmethod
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        """Make the estimator; see `Estimator`."""

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """This configuration with other paths of text files."""
        text = self.text.model_copy(update={"paths": tuple(change(path) for path in self.text.paths)})
        return self.model_copy(update={"text": text})


class LanguageModel(ABC):
    """Probabilities of sentences.

    Attributes:
        words: Its vocabulary.
        start: State at the beginning of a sentence.
    """

    words: Vocabulary
    start: Any

    @abstractmethod
    def score(self, state: Any, word: int) -> tuple[Any, float]:
        """Returns the state after a word, and log10 of the word's probability.

        Args:
            state: `start`, or what an earlier call returned.
            word: Number of the word in `words`; 0 is an unknown word, 2 the end of the sentence.
        """

    def score_batch(self, states: States, words: NDArray[np.int64]) -> tuple[States, NDArray[np.float64]]:
        """Scores one word after each of several states: states and log10 p, both `[batch]`."""
        pairs = [self.score(state, int(word)) for state, word in zip(states, words, strict=True)]
        return [state for state, _ in pairs], np.array([log_prob for _, log_prob in pairs])

    def score_next(self, states: States, words: NDArray[np.int64]) -> NDArray[np.float64]:
        """log10 p of each of several words `[batch, words]` after each of several states, `[batch, words]`."""
        rows = np.repeat(np.arange(len(words)), words.shape[1])
        many = states[rows] if isinstance(states, np.ndarray) else [states[int(row)] for row in rows]
        return self.score_batch(many, words.reshape(-1))[1].reshape(words.shape)

    def starts(self, count: int) -> States:
        """As many states at the beginning of a sentence as one asks for."""
        return [self.start] * count

    def sentence(self, words: Sequence[str]) -> list[float]:
        """log10 p of each word of a sentence and of its end: one more than there are words."""
        return list(self.sentences([words])[0])

    def sentences(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float64]]:
        """log10 p of each word of each sentence, and of each sentence's end; all sentences side by side."""
        return [scores for _, scores in self._scored([self.words.indices(words) for words in sentences])]

    def _scored(self, sentences: Sequence[NDArray[np.int64]]) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Numbers of the words with the sentence's end, and their log10 p."""
        lengths = np.array([len(words) + 1 for words in sentences], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        ids = np.full((len(sentences), int(lengths.max(initial=0))), END_ID, dtype=np.int64)
        for row, words in enumerate(sentences):
            ids[row, : len(words)] = words
        log_probs = np.zeros(ids.shape)
        states = self.starts(len(sentences))
        for step in range(ids.shape[1]):
            alive = order[: int(np.count_nonzero(lengths > step))]
            states, log_probs[alive, step] = self.score_batch(states[: len(alive)], ids[alive, step])
        return [(ids[row, :length], log_probs[row, :length]) for row, length in enumerate(lengths)]

    def evaluate(self, sentences: Iterable[Sequence[str]]) -> Perplexity:
        """Perplexity on sentences that the model was not estimated on."""
        total = Perplexity()
        for batch in batches(sentences, _BATCH):
            for ids, log_probs in self._scored([self.words.indices(words) for words in batch]):
                known = ids != UNKNOWN_ID
                total += Perplexity(
                    sentences=1,
                    words=len(ids) - 1,
                    unknown=int(np.count_nonzero(~known)),
                    log10=float(log_probs.sum()),
                    log10_known=float(log_probs[known].sum()),
                )
        return total


class Estimator(ABC):
    """Estimates language models of one kind, and reads them again.

    Args:
        cfg: Its configuration.
        trainer: Trains networks; only these need it.
    """

    def __init__(self, cfg: LmConfig, trainer: NetworkTrainer | None = None) -> None:
        self.cfg, self.trainer = cfg, trainer

    @property
    def unit(self) -> Unit:
        """What the model predicts."""
        return "word"

    @property
    def arpa(self) -> str:
        """Name of the model's ARPA file, for decoders; empty if the model is not a plain n-gram model."""
        return ""

    @abstractmethod
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[LanguageModel, dict[str, Any]]:
        """Estimates a model and writes it to a folder.

        Args:
            text: The text, in blocks of the model's units.
            folder: Where the model's files go; it exists. Temporary files lie in it, too.
            workers: Number of processes.

        Returns:
            The model, and facts for the record as a JSON value: `text` with the counts of the text, and the model's,
            among them, if they apply, `ngrams` (number of n-grams of each order) and `parameters`, which reports show.
        """

    @abstractmethod
    def load(self, folder: Path) -> LanguageModel:
        """Reads the model that `estimate` wrote to a folder."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts sentences; the ends of sentences count as words."""

    sentences: int = 0
    words: int = 0
    """Without the ends of sentences."""
    unknown: int = 0
    """Words that the vocabulary lacks."""
    log10: float = 0.0
    """Sum of log10 p over words, unknown ones included, and ends of sentences."""
    log10_known: float = 0.0
    """The same without the unknown words."""

    def __add__(self, other: Perplexity) -> Perplexity:
        return Perplexity(*(mine + its for mine, its in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> list[Any]:
        return list(asdict(self).values())

    @property
    def with_unknown(self) -> float:
        """Perplexity with the unknown words, as many as there are, at the probability of <unk>."""
        return _perplexity(self.log10, self.words + self.sentences)

    @property
    def without_unknown(self) -> float:
        """Perplexity of the known words and the ends of sentences."""
        return _perplexity(self.log10_known, self.words + self.sentences - self.unknown)

    @property
    def unknown_rate(self) -> float:
        """Share of unknown words, 0 to 1."""
        return self.unknown / self.words if self.words else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return asdict(self) | {
            "perplexity_with_unknown": self.with_unknown,
            "perplexity_without_unknown": self.without_unknown,
            "unknown_rate": self.unknown_rate,
        }


def _perplexity(log10: float, count: int) -> float:
    return float(10 ** (-log10 / count)) if count else float("nan")


def batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of a size, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
