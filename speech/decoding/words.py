"""Decoding into words: CTC posteriors, a list of words, and an n-gram language model of words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder, DecoderStream
from speech.decoding.hot_words import HOT_WORDS_FILE, hot_vocabulary
from speech.decoding.nbest import WordPath, alternatives, posteriors, silence_posterior, word_confidences
from speech.decoding.paths import collapse
from speech.decoding.rescoring import RescoredConfig, Rescorer
from speech.decoding.word_search import LetterSearch, PieceSearch, SearchOptions, WordSearch
from speech.hmm.priors import StateOutputs
from speech.hypotheses import DecodeError, Hypothesis
from speech.lm.kenlm import arpa_words, load_lm, read_words
from speech.tokens import TokenError, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
_SEARCHES: dict[str, type[WordSearch]] = {"characters": LetterSearch, "bpe": PieceSearch, "words": PieceSearch}


class WordsConfig(RescoredConfig):
    """The best sequence of known words, with a language model of words."""

    kind: Literal["words"] = "words"
    packages: ClassVar[tuple[str, ...]] = ("flashlight-text",)
    lm: str = ""
    """Language model of words: an ARPA file (also .gz) or a KenLM binary. Empty: that of the pipeline's stage `lm`;
    without it, all words are equally likely."""
    words: str = ""
    """What can be recognized: a text file whose first column lists words, such as a lexicon. Empty: the words of the
    language model."""
    lm_weight: float = Field(default=1.5, ge=0)
    """Factor of the language model's log10 probabilities; 2.3 makes them natural logarithms."""
    word_score: float = 0.0
    """Added for each word; more than 0 makes more and shorter words."""
    beam: int = Field(default=64, ge=1)
    """Number of partial hypotheses that are kept after each frame."""
    beam_tokens: int = Field(default=20, ge=0)
    """Number of tokens tried in each frame, the most probable ones; 0 for all."""
    beam_threshold: float = Field(default=20.0, gt=0, le=1e6)
    """A partial hypothesis is dropped when its score is this much below the best one's."""

    file_fields: ClassVar[dict[str, str]] = {
        "lm": "lm",
        "words": "words",
        "rescore_lm": "rescore-lm",
        **HOT_WORDS_FILE,
    }
    lm_unit: ClassVar[str] = "word"
    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "lm_weight": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
        "word_score": (-1.0, 0.0, 1.0, 2.0),
    }

    @override
    def lacking(self) -> str:
        if self.lm or self.words:
            return ""
        return "decode.kind words needs words: give decode.lm (an ARPA file), decode.words (a list of them), or both"

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        return WordsDecoder(self, tokenizer, states)


class WordsDecoder(Decoder):
    """Prefix beam search over words and all their alignments.

    The score of a word sequence is the natural logarithm of its probability over all its alignments, plus `lm_weight`
    times the language model's log10 probability of the sentence, plus `word_score` for each word, plus what hot words
    add. With a second language model, the best sequences are ranked again: it takes the share `rescore_weight` of the
    first one's place.
    """

    slow = True
    native = ("_search", "_rescorer")
    cfg: WordsConfig

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        super().__init__(cfg, tokenizer, states)
        self._search: WordSearch | None = None
        self._rescorer: Rescorer | None = None

    @override
    def with_config(self, cfg: DecodeConfig) -> WordsDecoder:
        made = WordsDecoder(cfg, self.tokenizer)
        same = made.cfg.files() == self.cfg.files() and made.cfg.hot_words == self.cfg.hot_words
        if self._search is not None and same:
            made._search = self._search.with_options(made._options())
            made._rescorer = self._rescorer
        return made

    def prepare(self) -> None:
        """Read the files now, not at the first utterance.

        Raises:
            LmError: One cannot be read.
            DecodeError: No word can be spelled in the model's tokens, or the hot words cannot be read.
        """
        if self._search is None:
            search = self._build()
            if self.cfg.rescore_lm:
                self._rescorer = Rescorer(self.cfg.lm, self.cfg.rescore_lm, search.words)
            self._search = search  # last: other threads decode as soon as it is there

    def _build(self) -> WordSearch:
        cfg = self.cfg
        if lacking := cfg.lacking():
            raise DecodeError(lacking)
        words, spellings = self._spelled(read_words(cfg.words) if cfg.words else arpa_words(cfg.lm))
        lm = load_lm(cfg.lm, words)
        hot = hot_vocabulary(cfg.hot_words, words)
        return _SEARCHES[self.tokenizer.kind](self._options(), self.tokenizer, words, spellings, lm, hot)

    def _options(self) -> SearchOptions:
        cfg = self.cfg
        return SearchOptions(cfg.beam, cfg.beam_tokens, cfg.beam_threshold, cfg.lm_weight, cfg.word_score)

    def _spelled(self, candidates: list[str]) -> tuple[list[str], list[list[int]]]:
        """The words that the model can write, and their tokens."""
        words, spellings = [], []
        for word in candidates:
            try:
                spelling = self.tokenizer.encode(word)
            except TokenError:
                continue
            if spelling:
                words.append(word)
                spellings.append(spelling)
        source = self.cfg.words or self.cfg.lm
        if not words:
            raise DecodeError(
                f"none of the {len(candidates)} words of {source} can be written in the model's tokens "
                f"({self.tokenizer.kind}): normalize them as the training texts were (case, punctuation)"
            )
        if left := len(candidates) - len(words):
            log.info("%d of %d words of %s cannot be written in the model's tokens", left, len(candidates), source)
        return words, spellings

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        self.prepare()
        batch = log_probs.cpu().numpy()
        return [self._one(batch[row, :count]) for row, count in enumerate(lengths)]

    @override
    def stream(self) -> DecoderStream:
        self.prepare()
        assert self._search is not None
        return _WordStream(self, self._search.alone())

    def _one(self, log_probs: NDArray[np.float32]) -> Hypothesis:
        if len(log_probs) == 0:
            return Hypothesis()
        assert self._search is not None
        return self.found(self._search.paths(log_probs))

    def found(self, paths: Sequence[WordPath]) -> Hypothesis:
        """The best of all paths that a search ended with, after the second language model has ranked them."""
        if self._rescorer is not None:
            paths = self._rescorer(paths[: self.cfg.hypotheses], self.cfg.rescore_weight, self.cfg.lm_weight)
        shares = posteriors([path.score for path in paths])
        best = paths[0]
        confidences = word_confidences(paths, shares)
        tokens, frames, _ = collapse(best.path, np.zeros(len(best.path)), self.tokenizer.blank)
        return Hypothesis(
            tokens=tokens,
            text=" ".join(best.words),
            score=best.score,
            frames=frames,
            confidence=float(np.mean(confidences)) if confidences else silence_posterior(paths, shares),
            word_confidences=confidences,
            nbest=alternatives(paths, shares, self.cfg.nbest),
        )


class _WordStream(DecoderStream):
    """A native search of its own, which remembers its partial hypotheses.

    Args:
        decoder: Whose hypotheses it makes.
        search: The search.
    """

    def __init__(self, decoder: WordsDecoder, search: WordSearch) -> None:
        self._decoder, self._search, self._frames = decoder, search, 0
        search.begin()

    @override
    def accept(self, log_probs: NDArray[np.float32]) -> None:
        self._search.step(log_probs)
        self._frames += len(log_probs)

    @override
    def best(self) -> Hypothesis:
        """The second language model ranks whole utterances only."""
        if not self._frames:
            return Hypothesis()
        path = self._search.partial(self._frames)
        # without tokens: those of a word that has not ended are no word yet
        return Hypothesis(text=" ".join(path.words), score=path.score, word_frames=list(path.spans))

    @override
    def finish(self) -> Hypothesis:
        return self._decoder.found(self._search.ended(self._frames)) if self._frames else Hypothesis()
