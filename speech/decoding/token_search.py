"""What searches share that ask a network for one token after another: a language model of tokens, n-best lists, times.

Hypotheses of all utterances of a batch are searched together. `TokenLm` adds a language model's probabilities to theirs
(shallow fusion, Gulcehre et al. 2015).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from speech.decoding.base import Decoder
from speech.decoding.hot_words import HOT_WORDS_FILE, HotWords, hot_tokens
from speech.decoding.nbest import merged_texts
from speech.decoding.rescoring import RescoredConfig, SentenceScorer, open_vocabulary_scorer
from speech.hypotheses import DecodeError, Hypothesis
from speech.lm.base import LanguageModel
from speech.lm.kenlm import KenlmModel
from speech.lm.network import MODEL, read_network
from speech.lm.vocabulary import END_ID

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.priors import StateOutputs
    from speech.tokens import Tokenizer

END = -1
"""In place of a token: the end of a text."""
States = list[list[Any]]
"""A language model's state of each hypothesis of each utterance."""


class TokenSearchConfig(RescoredConfig):
    """What searches have in common that ask a network for one token after another."""

    lm: str = ""
    """Language model of tokens, written as the tokenizer writes them: an ARPA file (also .gz), a KenLM binary, or a
    network (`lm.safetensors`). Empty: that of the pipeline's stage `lm`, if there is one."""
    lm_weight: float = Field(default=0.5, ge=0)
    """Factor of the language model's log10 probabilities; 2.3 makes them natural logarithms."""
    length_bonus: float = 0.0
    """Added for each token; more than 0 makes longer texts."""
    rescore_lm: str = ""
    """Language model of words, with which the best hypotheses are ranked again in the form of the transcripts: an ARPA
    file (also .gz) or a network (`lm.safetensors`). Empty: none."""
    rescore_weight: float = Field(default=0.3, ge=0)
    """Factor of its natural log probabilities, which are added to the hypotheses' scores."""
    word_score: float = 0.0
    """Added for each word when hypotheses are ranked again; more than 0 makes up for what each word costs in
    `rescore_lm`."""
    times: str
    """Where words' times come from."""

    packages: ClassVar[tuple[str, ...]] = ("flashlight-text",)
    file_fields: ClassVar[dict[str, str]] = {"lm": "lm", "rescore_lm": "rescore-lm", **HOT_WORDS_FILE}
    lm_unit: ClassVar[str] = "token"
    reads_networks: ClassVar[bool] = True

    @property
    @override
    def untimed(self) -> Self:
        return self.model_copy(update={"times": "none"})

    @property
    @override
    def ranks_again(self) -> bool:
        return super().ranks_again or self.word_score != 0

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        raise DecodeError(f"decode.kind {self.kind} searches with a network: use greedy or beam for posteriors")


class TokenLm:
    """A language model of tokens, asked for the hypotheses of a batch.

    Args:
        path: Its file.
        tokenizer: The acoustic model's tokens.

    Raises:
        LmError: It cannot be read.
    """

    def __init__(self, path: str, tokenizer: Tokenizer) -> None:
        network, symbols = Path(path).suffix == Path(MODEL).suffix, tokenizer.symbols
        self._model: LanguageModel = read_network(Path(path)) if network else KenlmModel(path, symbols)
        self._numbers = np.append(self._model.words.indices(symbols), END_ID)  # which END stands for

    def starts(self, batch: int) -> States:
        """The state of an empty hypothesis for each utterance."""
        return [list(self._model.starts(1)) for _ in range(batch)]

    def scores(self, states: Iterable[Any], tokens: Tensor) -> Tensor:
        """log10 p of tokens after some hypotheses [hypotheses, tokens], float64.

        Args:
            states: Of the hypotheses.
            tokens: The tokens of each, or `END` [hypotheses, tokens].
        """
        scores = self._model.score_next(list(states), self._numbers[tokens.cpu().numpy()])
        return torch.from_numpy(scores).to(tokens.device)

    def after(self, states: Iterable[Any], tokens: Sequence[int]) -> list[Any]:
        """States after one more token of each of some hypotheses."""
        return list(self._model.score_batch(list(states), self._numbers[np.asarray(tokens, dtype=np.int64)])[0])


class BiasedTokenLm:
    """A language model of tokens with hot words, to be used with weight 1.

    Args:
        lm: The language model; None for hot words alone.
        weight: Factor of its log10 probabilities.
        hot: The hot words.
    """

    def __init__(self, lm: TokenLm | None, weight: float, hot: HotWords) -> None:
        self._lm, self._weight, self._hot = lm, weight, hot

    def starts(self, batch: int) -> States:
        """The state of an empty hypothesis for each utterance."""
        before = self._lm.starts(batch) if self._lm else [[None]] * batch
        return [[(state, self._hot.start) for state in states] for states in before]

    def scores(self, states: Iterable[Any], tokens: Tensor) -> Tensor:
        """What tokens add after some hypotheses [hypotheses, tokens], float64; arguments as of `TokenLm.scores`."""
        states = list(states)
        numbers = tokens.cpu().numpy()  # END is the last of the gains
        gains = [self._hot.gains(hot)[row] for (_, hot), row in zip(states, numbers, strict=True)]
        added = torch.from_numpy(np.stack(gains)).to(tokens.device)
        return added + self._weight * self._lm.scores([lm for lm, _ in states], tokens) if self._lm else added

    def after(self, states: Iterable[Any], tokens: Sequence[int]) -> list[Any]:
        """States after one more token of each of some hypotheses."""
        states = list(states)
        after = self._lm.after([lm for lm, _ in states], tokens) if self._lm else [None] * len(states)
        hot = [self._hot.step(hot, token)[0] for (_, hot), token in zip(states, tokens, strict=True)]
        return list(zip(after, hot, strict=True))

    def wishes(self, states: States, device: torch.device) -> Tensor:
        """What hot words add for every token [batch, W, vocab], so that their tokens are among those that are tried."""
        gains = [[self._hot.gains(hot)[:-1] for _, hot in some] for some in states]
        return torch.from_numpy(np.array(gains)).to(device)


@dataclass
class Ended:
    """A hypothesis that has ended."""

    tokens: list[int]
    log_probs: list[float]
    """Of the tokens, by the network."""
    nothing: float
    """Log probability that stands for the confidence of an empty text."""
    score: float
    rank: float
    """What hypotheses are compared by."""
    frames: list[int] | None = None
    """Frame in which each token was said, if the search knows."""
    prompt: Sequence[int] = ()
    """What the network read before the text, if the search knows."""
    no_speech: float = 0.0
    """Probability that there is no speech; 0 if the network does not say."""


class TokenSearch(ABC):
    """Finds texts for an encoder's frames with a network that is asked for one token after another.

    Args:
        cfg: Its parameters.
        width: Width of the encoder's frames.
        tokenizer: The model's tokens.

    Attributes:
        comparable: Gives hypotheses the form of the transcripts, in which they are ranked again; by default they have
            it.
    """

    cfg: TokenSearchConfig
    comparable: Callable[[Hypothesis], str] = attrgetter("text")
    _lm: TokenLm | BiasedTokenLm | None = None
    """What scores tokens beside the network, once it is prepared."""
    _own_lm: TokenLm | None = None
    _hot: HotWords | None = None
    _prepared = False
    _rescorer: SentenceScorer | None = None

    def __init__(self, cfg: TokenSearchConfig, width: int, tokenizer: Tokenizer) -> None:
        self.cfg, self._width, self._tokenizer = cfg, width, tokenizer

    @abstractmethod
    def _again(self, cfg: Any) -> Self:
        """This search with other parameters."""

    def with_config(self, cfg: Any) -> Self:
        """This search with other parameters; it shares the language model if that is the same."""
        made = self._again(cfg)
        made.comparable = self.comparable
        if made.cfg.rescore_lm == self.cfg.rescore_lm:
            made._rescorer = self._rescorer
        if made.cfg.lm == self.cfg.lm:
            made._own_lm = self._own_lm
        if self._prepared and made.cfg.files() == self.cfg.files() and made.cfg.hot_words == self.cfg.hot_words:
            made._join(self._hot)
        return made

    def prepare(self) -> None:
        """Read the language models and the hot words now, not at the first utterance.

        Raises:
            LmError: A language model cannot be read.
            DecodeError: The hot words cannot be read.
        """
        if self._prepared:
            return
        if self.cfg.lm and self._own_lm is None:
            self._own_lm = TokenLm(self.cfg.lm, self._tokenizer)
        if self.cfg.rescore_lm and self._rescorer is None:
            self._rescorer = open_vocabulary_scorer(self.cfg.rescore_lm)
        self._join(hot_tokens(self.cfg.hot_words, self._tokenizer))

    def _join(self, hot: HotWords | None) -> None:
        """Put the language model and hot words together."""
        self._hot = hot
        self._lm = BiasedTokenLm(self._own_lm, self.cfg.lm_weight, hot) if hot else self._own_lm
        self._prepared = True  # last: other threads search as soon as it is

    @property
    def _lm_weight(self) -> float:
        """Factor of what `_lm` gives."""
        return 1.0 if self._hot else self.cfg.lm_weight

    def _wishes(self, states: States, device: torch.device) -> Tensor | None:
        """What hot words add for every token after each hypothesis [batch, W, vocab]; None without hot words."""
        return self._lm.wishes(states, device) if isinstance(self._lm, BiasedTokenLm) else None

    def __call__(
        self,
        encoded_BTD: Tensor,
        frames: Tensor,
        ctc_BTV: Tensor | None = None,
        languages: Sequence[str] | None = None,
    ) -> list[Hypothesis]:
        """The best hypothesis of each utterance.

        Args:
            encoded_BTD: The encoder's frames.
            frames: Frames of each utterance [batch].
            ctc_BTV: Natural log posteriors of the frames by CTC, the blank first; None if the encoder has none.
            languages: Language of each utterance, one that the tokens have; empty for one that is to be found.

        Raises:
            DecodeError: The shapes or lengths are invalid, a value is NaN, or what `times` asks for is missing.
        """
        self.prepare()
        counts = self._check(encoded_BTD, frames, ctc_BTV)
        heard = [row for row, count in enumerate(counts) if count]
        hypotheses = [Hypothesis() for _ in counts]
        if not heard:
            return hypotheses
        at = torch.tensor(heard, device=encoded_BTD.device)
        encoded, own = encoded_BTD[at], frames.to(encoded_BTD.device)[at]
        ctc = None if ctc_BTV is None else ctc_BTV.to(encoded.device)[at].float()
        with torch.inference_mode():
            given = [languages[row] for row in heard] if languages else [""] * len(heard)
            for place, found in enumerate(self._searched(encoded, own, ctc, given)):
                if ended := self._ranked_again(found):
                    row, count = heard[place], counts[heard[place]]
                    posteriors = None if ctc is None else ctc[place, :count]
                    hypotheses[row] = self._hypothesis(ended, encoded[place : place + 1, :count], posteriors)
        return hypotheses

    def _check(self, encoded: Tensor, frames: Tensor, ctc: Tensor | None) -> list[int]:
        """Frames of each utterance."""
        vocab = self._tokenizer.size
        if encoded.dim() != 3 or encoded.shape[2] != self._width:
            raise DecodeError(
                f"encoded frames must be [batch, frames, {self._width}], not {list(encoded.shape)}: the encoder and "
                "what searches its frames must belong together"
            )
        batch, most = encoded.shape[:2]
        counts = [int(count) for count in frames.tolist()]
        if len(counts) != batch or any(not 0 <= count <= most for count in counts):
            raise DecodeError(f"frames must be {batch} numbers in 0 to {most}, not {counts}")
        if ctc is not None and (ctc.dim() != 3 or ctc.shape != (batch, most, vocab)):
            raise DecodeError(f"CTC posteriors must be [{batch}, {most}, {vocab} tokens], not {list(ctc.shape)}")
        if self.cfg.times == "ctc" and ctc is None:
            raise DecodeError("decode.times is ctc, but the model has no CTC: use auto")
        inside = torch.arange(most, device=encoded.device) < frames.to(encoded.device).unsqueeze(1)
        for values in (encoded, ctc):
            if values is not None and bool((values.isnan().any(dim=2) & inside.to(values.device)).any()):
                raise DecodeError("the encoder's output contains NaN: it has diverged, or its input was damaged")
        return counts

    @staticmethod
    def _checked(log_probs: Tensor) -> Tensor:
        if bool(log_probs.isnan().any()):
            raise DecodeError("the network's output contains NaN: the model has diverged")
        return log_probs.double()

    @abstractmethod
    def _searched(
        self, encoded: Tensor, frames: Tensor, ctc: Tensor | None, languages: Sequence[str]
    ) -> list[list[Ended]]:
        """Hypotheses of each utterance, the best first; arguments as of a call, without utterances of no frames."""

    @abstractmethod
    def _own_spans(self, ended: Ended, encoded_1TD: Tensor) -> list[tuple[int, int]]:
        """For each token of a hypothesis the first frame and the one after its last, by the network; empty if unknown.

        Args:
            ended: The hypothesis.
            encoded_1TD: The encoder's frames.
        """

    def _ranked_again(self, ended: list[Ended]) -> list[Ended]:
        """Hypotheses by the language model of words and the score of a word, too, the best first."""
        cfg = self.cfg
        if not cfg.ranks_again or not ended:
            return ended
        some = ended[: cfg.hypotheses]
        sentences = [self.comparable(self._written(hypothesis)).split() for hypothesis in some]
        log10 = self._rescorer(sentences) if self._rescorer and cfg.rescore_weight else [0.0] * len(some)
        ranked = []
        for hypothesis, words, by_words in zip(some, sentences, log10, strict=True):
            added = cfg.rescore_weight * math.log(10) * by_words + cfg.word_score * len(words)
            share = hypothesis.rank / hypothesis.score if hypothesis.score else 1.0  # of longer texts, perhaps less
            score = hypothesis.score + added
            ranked.append(replace(hypothesis, score=score, rank=share * score))
        return sorted(ranked, key=lambda hypothesis: -hypothesis.rank)

    def _written(self, ended: Ended) -> Hypothesis:
        """What `comparable` needs of a hypothesis: its text, and its language if the search finds that."""
        return Hypothesis(text=self._tokenizer.decode(ended.tokens))

    def _hypothesis(self, ended: Sequence[Ended], encoded_1TD: Tensor, ctc_TV: Tensor | None) -> Hypothesis:
        """The best of an utterance's hypotheses, with the frames of its words, and the others if they are asked for."""
        best = ended[0]
        spoken = np.clip(np.exp(best.log_probs or [best.nothing]), 0.0, 1.0)
        words = self._tokenizer.word_groups(best.tokens)
        texts = [self._tokenizer.decode(hypothesis.tokens) for hypothesis in ended]
        made = Hypothesis(
            tokens=best.tokens,
            text=texts[0],
            score=best.score,
            confidence=float(spoken.mean()),
            word_confidences=[float(spoken[group].mean()) for group in words],
            nbest=merged_texts(texts, [hypothesis.rank for hypothesis in ended], self.cfg.nbest),
        )
        if self.cfg.times == "none" or not best.tokens:
            return made
        spans = self._spans(best, encoded_1TD, ctc_TV)
        return replace(
            made,
            frames=[first for first, _ in spans],
            word_frames=[(spans[group[0]][0], spans[group[-1]][1]) for group in words],
        )

    def _spans(self, best: Ended, encoded_1TD: Tensor, ctc_TV: Tensor | None) -> list[tuple[int, int]]:
        """For each token of a hypothesis the first frame, and the one after its last."""
        if ctc_TV is not None and self.cfg.times in ("auto", "ctc"):
            from speech.ctc_alignment import token_spans

            spans = token_spans(ctc_TV.cpu(), best.tokens)
        else:
            spans = self._own_spans(best, encoded_1TD)
        if spans:
            return spans
        # too few frames for the tokens: each gets its share
        frames, count = encoded_1TD.shape[1], len(best.tokens)
        return [(place * frames // count, (place + 1) * frames // count) for place in range(count)]
