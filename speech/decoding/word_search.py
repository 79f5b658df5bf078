"""Searches in log posteriors that stay inside a list of words: one for letters, one for word pieces and whole words.

Both give the sum over all alignments of each word sequence (as far as the beam keeps them) with what the language model
adds. Letters go to flashlight-text's `LexiconDecoder`. What it needs to be exact is not in its manual:

- every word is spelled with a space at its end, the last one, too: a frame is added after the last in which only the
  space is possible;
- the space is what it calls silence: the token that may last between two words, before the first and after the last.
  Tokenizers without a space get a column of their own for it, and then at most one word is recognized;
- `log_add=True`: otherwise it scores the best alignment only;
- the language model's dictionary lists the words in the order of their labels.

That decoder takes a word's last token for one frame only, and does not ask for a blank between two equal ones at its
end. Pieces that begin with the space have their last token there, so they go to the search without a lexicon, which a
language model keeps inside the lexicon: see `trie_lm`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from speech.decoding.hot_words import HotWords
from speech.decoding.nbest import WordPath
from speech.decoding.paths import NEVER, emissions_for
from speech.lm.kenlm import FlashlightLm
from speech.tokens import SPACE_SYMBOL, Tokenizer

_INCOMPLETE = NEVER / 2


@dataclass(frozen=True)
class SearchOptions:
    """How wide a search is, and what words cost."""

    beam: int
    beam_tokens: int
    beam_threshold: float
    lm_weight: float
    word_score: float


class WordSearch(ABC):
    """A search over words.

    Args:
        options: How wide it is.
        tokenizer: Whose tokens the posteriors are of.
        words: What can be recognized, by label.
        spellings: The tokens of each.
        lm: Language model with the same labels.
        hot: Hot words with the same labels, if there are any.
    """

    def __init__(
        self,
        options: SearchOptions,
        tokenizer: Tokenizer,
        words: Sequence[str],
        spellings: Sequence[Sequence[int]],
        lm: FlashlightLm,
        hot: HotWords | None = None,
    ) -> None:
        self.words, self.tokenizer, self._spellings = words, tokenizer, spellings
        self.lm, self._lm_alone, self._hot, self._options = lm, lm, hot, options
        # The search and a language model in Python hold one utterance at a time, and a server recognizes in several
        # threads.
        self._one_at_a_time = threading.Lock()
        options = self._with_hot_words(options)
        self._index(spellings)
        self._native = self._build(options)

    def with_options(self, options: SearchOptions) -> Self:
        """The same search with other weights or another width; the index of words is shared."""
        other = copy(self)
        other._options, other._one_at_a_time = options, threading.Lock()
        native = other._with_hot_words(options)
        # with hot words, the index has the sum of what they add and of the weighted model
        if self._hot and options.lm_weight != self._options.lm_weight:
            other._index(self._spellings)
        other._native = other._build(native)
        return other

    def alone(self) -> Self:
        """The same search for one utterance, while others are searched."""
        return self.with_options(self._options)

    def _with_hot_words(self, options: SearchOptions) -> SearchOptions:
        """Put the hot words into the language model, if there are any; the options of a search with it."""
        if self._hot is None:
            return options
        from speech.decoding.biased_lm import BiasedLm

        self.lm = BiasedLm(self._lm_alone, options.lm_weight, self._hot)
        return replace(options, lm_weight=1.0)

    @abstractmethod
    def _index(self, spellings: Sequence[Sequence[int]]) -> None:
        """Prepares what does not depend on the options: a trie of the words."""

    @abstractmethod
    def _build(self, options: SearchOptions) -> Any:
        """flashlight-text's decoder."""

    def paths(self, log_probs: NDArray[np.float32]) -> list[WordPath]:
        """Word sequences of an utterance [frames, tokens], the best first."""
        with self._one_at_a_time:
            self.begin()
            self.step(log_probs)
            return self.ended(len(log_probs))

    def begin(self) -> None:
        """Begin with an utterance."""
        self._native.decode_begin()

    @abstractmethod
    def step(self, log_probs: NDArray[np.float32]) -> None:
        """Go on with further frames [frames, tokens]."""

    @abstractmethod
    def ended(self, num_frames: int) -> list[WordPath]:
        """End the utterance; its word sequences, the best first."""

    def partial(self, num_frames: int) -> WordPath:
        """The best word sequence of the frames so far; the search can go on."""
        return self._path(self._native.get_best_hypothesis(), num_frames)

    @abstractmethod
    def _path(self, result: Any, num_frames: int) -> WordPath:
        """A native result."""


class LetterSearch(WordSearch):
    """Over tokens that are characters."""

    @override
    def _index(self, spellings: Sequence[Sequence[int]]) -> None:
        from flashlight.lib.text.decoder import SmearingMode, Trie

        symbols, size = self.tokenizer.symbols, self.tokenizer.size
        self._space = symbols.index(SPACE_SYMBOL) if SPACE_SYMBOL in symbols else size
        self._width = max(size, self._space + 1)
        self._trie = Trie(self._width, self._space)
        start = self.lm.start(True)
        for label, spelling in enumerate(spellings):
            # with unigram probabilities inside the trie, a narrow beam sees a word's likelihood before its end
            self._trie.insert([*spelling, self._space], label, self.lm.score(start, label)[1])
        self._trie.smear(SmearingMode.MAX)

    @override
    def _build(self, options: SearchOptions) -> Any:
        from flashlight.lib.text.decoder import CriterionType, LexiconDecoder, LexiconDecoderOptions

        native = LexiconDecoderOptions(
            beam_size=options.beam,
            beam_size_token=min(options.beam_tokens or self._width, self._width),
            beam_threshold=options.beam_threshold,
            lm_weight=options.lm_weight,
            word_score=options.word_score,
            unk_score=-np.inf,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        return LexiconDecoder(native, self._trie, self.lm, self._space, self.tokenizer.blank, -1, [], False)

    @override
    def step(self, log_probs: NDArray[np.float32]) -> None:
        self._step(emissions_for(log_probs, self._width, len(log_probs)))

    def _step(self, emissions: NDArray[np.float32]) -> None:
        self._native.decode_step(emissions.ctypes.data, len(emissions), self._width)

    @override
    def ended(self, num_frames: int) -> list[WordPath]:
        emissions = np.full((1, self._width), NEVER, dtype=np.float32)
        emissions[0, self._space] = 0.0
        self._step(emissions)
        self._native.decode_end()
        return [self._path(result, num_frames) for result in self._native.get_all_final_hypothesis()]

    @override
    def _path(self, result: Any, num_frames: int) -> WordPath:
        # after the silence before the first frame; at the end, a space and the silence after it follow
        path, labels = (np.asarray(part[1 : num_frames + 2]) for part in (result.tokens, result.words))
        ends = np.flatnonzero(labels >= 0)
        last = int(ends[-1]) if len(ends) else 0
        if result.score <= _INCOMPLETE:  # the beam kept no complete word after these
            path[last:] = self.tokenizer.blank
        path = path[:num_frames]
        labelled = np.flatnonzero((path != self.tokenizer.blank) & (path != self._space))
        spans, begin = [], 0
        for end in ends:
            inside = labelled[(labelled >= begin) & (labelled < end)]
            spans.append((int(inside[0]), int(inside[-1]) + 1))
            begin = int(end)
        path[path >= self.tokenizer.size] = self.tokenizer.blank
        words = tuple(self.words[label] for label in labels[ends])
        return WordPath(words, tuple(spans), path, _complete(float(result.score)))


class PieceSearch(WordSearch):
    """Over tokens that are pieces of words, the first with a space at its front, or whole words."""

    @override
    def _index(self, spellings: Sequence[Sequence[int]]) -> None:
        from speech.decoding.trie_lm import word_trie

        self._first = np.zeros(self.tokenizer.size, dtype=bool)
        self._first[[pieces[0] for pieces in spellings]] = True
        self._known = set(self.words)
        self._trie = word_trie(self.lm, spellings)

    @override
    def _build(self, options: SearchOptions) -> Any:
        from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions

        from speech.decoding.trie_lm import TrieLm

        size = self.tokenizer.size
        # kept here, since the decoder does not keep it
        self._trie_lm = TrieLm(self.lm, self._trie, options.lm_weight, options.word_score)
        native = LexiconFreeDecoderOptions(
            beam_size=options.beam,
            beam_size_token=min(options.beam_tokens or size, size),
            beam_threshold=options.beam_threshold,
            lm_weight=1.0,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        return LexiconFreeDecoder(native, self._trie_lm, size, self.tokenizer.blank, [])

    @override
    def step(self, log_probs: NDArray[np.float32]) -> None:
        width = self.tokenizer.size + 1
        emissions = emissions_for(log_probs, width, len(log_probs))
        self._native.decode_step(emissions.ctypes.data, len(log_probs), width)

    @override
    def ended(self, num_frames: int) -> list[WordPath]:
        self._native.decode_end()
        results = self._native.get_all_final_hypothesis()
        complete = [result for result in results if result.score > _INCOMPLETE]
        return [self._path(result, num_frames) for result in complete or results[:1]]

    @override
    def partial(self, num_frames: int) -> WordPath:
        return self._in_lexicon(self._native.get_best_hypothesis(), num_frames)  # the last word may not have ended

    @override
    def _path(self, result: Any, num_frames: int) -> WordPath:
        if result.score <= _INCOMPLETE:
            return self._in_lexicon(result, num_frames)
        return self._word_path(np.asarray(result.tokens[1 : num_frames + 1]), result.score)

    def _in_lexicon(self, result: Any, num_frames: int) -> WordPath:
        """A native result up to the first word that is not in the lexicon."""
        path = np.asarray(result.tokens[1 : num_frames + 1])
        path[self._left_lexicon(path) :] = self.tokenizer.blank
        return self._word_path(path, result.score)

    def _word_path(self, path: NDArray[np.int64], score: float) -> WordPath:
        """The words of an alignment."""
        starts = self._starts(path)
        begins = starts[self._first[path[starts]]].tolist()
        labelled = np.flatnonzero(path != self.tokenizer.blank)
        spans = []
        for begin, end in zip(begins, [*begins, len(path)][1:], strict=True):
            spans.append((begin, int(labelled[labelled < end][-1]) + 1))
        words = tuple(self.tokenizer.decode(path[starts].tolist()).split())
        return WordPath(words, tuple(spans), path, _complete(float(score)))

    def _starts(self, path: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frames in which tokens start."""
        return np.flatnonzero((np.diff(path, prepend=-1) != 0) & (path != self.tokenizer.blank))

    def _left_lexicon(self, path: NDArray[np.int64]) -> int:
        """The frame in which the first word begins that is not in the lexicon: the beam kept nothing inside it."""
        starts = self._starts(path)
        begins = starts[self._first[path[starts]]].tolist()
        if len(starts) and starts[0] not in begins:
            return 0
        for begin, end in zip(begins, [*begins, len(path)][1:], strict=True):
            pieces = path[starts[(starts >= begin) & (starts < end)]].tolist()
            if self.tokenizer.decode(pieces) not in self._known:
                return int(begin)
        return len(path)


def _complete(score: float) -> float:
    """Without the penalties of words that were never finished."""
    return score - round(score / NEVER) * NEVER
