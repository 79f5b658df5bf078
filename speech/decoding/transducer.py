"""Search with a transducer: in each frame, every hypothesis says one token or none.

This is `modified_beam_search` of icefall (Kuang et al. 2022, "Pruned RNN-T for fast, memory-efficient ASR training"):
Graves' search (2012, section 2.5) with at most one token a frame, so that all hypotheses of all utterances go on to the
next frame together. Those with the same tokens become one, whose probability is their sum. With `beam: 1` it is greedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from speech.decoding.token_search import END, Ended, States, TokenSearch, TokenSearchConfig
from speech.hypotheses import Hypothesis

if TYPE_CHECKING:
    from torch import Tensor

    from speech.models.networks.lstm import Memory
    from speech.models.networks.transducer import Transducer
    from speech.tokens import Tokenizer

_NONE = -1
"""In place of a text's number: there is no such hypothesis, or the text is empty and has no beginning."""


class TransducerDecodeConfig(TokenSearchConfig):
    """The best text by a transducer over its alignments with at most one token a frame; with `beam: 1`, greedy."""

    kind: Literal["transducer"] = "transducer"
    beam: int = Field(default=4, ge=1)
    """Number of hypotheses kept after each frame; 1 is greedy."""
    beam_tokens: int = Field(default=20, ge=0)
    """Number of continuations tried in each frame, the best ones of all hypotheses of an utterance; 0 for all."""
    times: Literal["auto", "ctc", "transducer", "none"] = "auto"
    """Where words' times come from: the best path of CTC, the frames in which tokens are said, or (`auto`) CTC if the
    encoder has it."""

    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "lm_weight": (0.25, 0.5, 1.0),
        "length_bonus": (0.0, 0.5),
    }


@dataclass
class _Hypotheses:
    """The hypotheses of utterances that have frames left, W for each."""

    scores: Tensor
    """[batch, W], float64; minus infinity if there is none."""
    texts: Tensor
    """Number of each hypothesis' text, equal texts of an utterance have equal ones [batch, W]."""
    beginnings: Tensor
    """Number of the text without its last token [batch, W]."""
    last: Tensor
    """The last token [batch, W]."""
    vectors: Tensor
    """What the predictor and the joiner's layer for it made of the text [batch, W, width]."""
    memory: Memory
    """The predictor's, each [batch * W, ...]."""
    lm_states: States


@dataclass
class _Choice:
    """Which hypotheses follow in a frame, all [batch, W]."""

    scores: Tensor
    parents: Tensor
    """The hypothesis that each goes on from."""
    tokens: Tensor
    """What it says; 0 for none."""
    path_parents: Tensor
    """The hypothesis that the best alignment goes on from: another one, if that says the last token only now."""
    path_tokens: Tensor
    """What is said in this frame in the best alignment."""


class _Frame(NamedTuple):
    """What was chosen in a frame, for the way back, all [batch, W]."""

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]


class TransducerSearch(TokenSearch):
    """Finds texts for an encoder's frames with a predictor and a joiner.

    Args:
        cfg: Its parameters.
        network: The transducer, in evaluation mode.
        tokenizer: The model's tokens.
    """

    cfg: TransducerDecodeConfig

    def __init__(self, cfg: TransducerDecodeConfig, network: Transducer, tokenizer: Tokenizer) -> None:
        super().__init__(cfg, network.width, tokenizer)
        self._network, self._predictor, self._joiner = network, network.predictor, network.joiner

    @override
    def _again(self, cfg: Any) -> Self:
        return type(self)(cfg, self._network, self._tokenizer)

    @override
    def _searched(
        self, encoded: Tensor, frames: Tensor, ctc: Tensor | None, languages: Sequence[str]
    ) -> list[list[Ended]]:
        counts = frames.cpu()
        order = counts.argsort(descending=True, stable=True)  # utterances that end go from the end of the batch
        counts, rows = counts[order], order.tolist()
        projected = self._joiner.encoder(encoded)[order.to(encoded.device)]
        search, history = self._start(len(rows), projected), list[_Frame]()
        texts: dict[tuple[int, int, int], int] = {}
        ended: list[list[Ended]] = [[] for _ in rows]
        for frame in range(int(counts[0])):
            alive = int((counts > frame).sum())
            search = self._step(_first(search, alive), projected[:alive, frame], texts, history)
            for row in range(int((counts > frame + 1).sum()), alive):
                ended[rows[row]] = self._ended(search, history, row)
        return ended

    def stream(self) -> TransducerStream:
        """Begin the search in an utterance whose frames come one after another.

        Raises:
            LmError: The language model cannot be read.
        """
        self.prepare()
        return TransducerStream(self)

    # --- one frame

    def _start(self, batch: int, projected: Tensor) -> _Hypotheses:
        """One empty hypothesis for each utterance."""
        device = projected.device
        blanks = torch.zeros(batch, dtype=torch.long, device=device)
        vectors, memory = self._predictor.step(blanks, self._predictor.nothing(batch))
        return _Hypotheses(
            scores=torch.zeros(batch, 1, dtype=torch.float64, device=device),
            texts=blanks.unsqueeze(1),
            beginnings=torch.full((batch, 1), _NONE, device=device),
            last=blanks.unsqueeze(1),
            vectors=self._joiner.predictor(vectors).unsqueeze(1),
            memory=memory,
            lm_states=self._lm.starts(batch) if self._lm else [],
        )

    def _step(
        self, search: _Hypotheses, encoded_BJ: Tensor, texts: dict[tuple[int, int, int], int], history: list[_Frame]
    ) -> _Hypotheses:
        """The hypotheses after a frame; what was chosen is added to the history."""
        scores_BWV = self._joiner(encoded_BJ.unsqueeze(1), search.vectors)
        log_probs = self._checked(scores_BWV.log_softmax(dim=-1))
        choice = self._chosen(search, log_probs)
        rows = torch.arange(len(log_probs), device=log_probs.device).unsqueeze(1)
        said = log_probs[rows, choice.path_parents, choice.path_tokens]
        history.append(_Frame(*(tensor.cpu().numpy() for tensor in (choice.path_parents, choice.path_tokens, said))))
        return self._extended(search, choice, texts)

    def _chosen(self, search: _Hypotheses, log_probs: Tensor) -> _Choice:
        """The best hypotheses after a frame, each with one more token or none."""
        stay = search.scores + log_probs[:, :, 0]
        moves, parents, tokens = self._moves(search, log_probs)
        # a move to a text that another hypothesis has already: their probabilities are added
        begins = search.texts.gather(1, parents).unsqueeze(1)
        same = (search.beginnings.unsqueeze(2) == begins) & (search.last.unsqueeze(2) == tokens.unsqueeze(1))
        same &= search.scores.isfinite().unsqueeze(2)
        moves = self._with_lm(search, moves, parents, tokens, self._may_count(moves, stay, same.any(dim=1)))
        others, which = moves.unsqueeze(1).masked_fill(~same, -torch.inf).max(dim=2)
        later = others > stay
        own = torch.arange(stay.shape[1], device=stay.device).expand_as(stay)
        path_parents = torch.where(later, parents.gather(1, which), own)
        path_tokens = torch.where(later, search.last, 0)
        everything = torch.cat((torch.logaddexp(stay, others), moves.masked_fill(same.any(dim=1), -torch.inf)), dim=1)
        ranked, order = everything.sort(dim=1, descending=True, stable=True)
        order = order[:, : self.cfg.beam]

        def chosen(of_stay: Tensor, of_moves: Tensor) -> Tensor:
            return torch.cat((of_stay, of_moves), dim=1).gather(1, order)

        return _Choice(
            scores=ranked[:, : self.cfg.beam],
            parents=chosen(own, parents),
            tokens=chosen(torch.zeros_like(own), tokens),
            path_parents=chosen(path_parents, parents),
            path_tokens=chosen(path_tokens, tokens),
        )

    def _moves(self, search: _Hypotheses, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hypotheses that say a token: scores, the hypotheses that they go on from, and tokens, all [batch, M]."""
        cfg, others = self.cfg, log_probs.shape[2] - 1
        moves = (search.scores.unsqueeze(2) + log_probs[:, :, 1:] + cfg.length_bonus).flatten(1)
        wishes = self._wishes(search.lm_states, moves.device)
        wanted = moves if wishes is None else moves + wishes[:, :, 1:].flatten(1)
        order = wanted.topk(min(cfg.beam_tokens or moves.shape[1], moves.shape[1]), dim=1).indices
        return moves.gather(1, order), order // others, order % others + 1

    def _may_count(self, moves: Tensor, stay: Tensor, same: Tensor) -> Tensor:
        """Which moves can still become one of the best: a language model without hot words only lowers scores."""
        if stay.shape[1] < self.cfg.beam or self._hot:
            return moves.isfinite()
        return moves.isfinite() & (same | (moves > stay.min(dim=1, keepdim=True).values))

    def _with_lm(self, search: _Hypotheses, moves: Tensor, parents: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """Scores of moves with the language model's for their tokens; minus infinity for those that are not asked."""
        if self._lm is None:
            return moves
        moves = moves.masked_fill(~asked, -torch.inf)
        rows, places = asked.nonzero().unbind(1)
        if not len(rows):
            return moves
        earlier = zip(rows.tolist(), parents[rows, places].tolist(), strict=True)
        by_lm = self._lm.scores((search.lm_states[row][at] for row, at in earlier), tokens[rows, places].unsqueeze(1))
        return moves.index_put((rows, places), self._lm_weight * by_lm.squeeze(1), accumulate=True)

    def _extended(self, search: _Hypotheses, choice: _Choice, texts: dict[tuple[int, int, int], int]) -> _Hypotheses:
        """The chosen hypotheses."""
        parents = choice.parents
        rows = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        flat = (rows * search.scores.shape[1] + parents).flatten()
        made = _Hypotheses(
            scores=choice.scores,
            texts=search.texts.gather(1, parents),
            beginnings=search.beginnings.gather(1, parents),
            last=search.last.gather(1, parents),
            vectors=search.vectors[rows, parents],
            memory=tuple(tensor[flat] for tensor in search.memory),
            lm_states=[
                [states[at] for at in some]
                for states, some in zip(search.lm_states, parents.tolist() if self._lm else (), strict=True)
            ],
        )
        spoken = (choice.tokens > 0) & choice.scores.isfinite()
        at = spoken.nonzero()
        if len(at):
            self._say(made, at, choice.tokens[spoken], texts)
        return made

    def _say(self, made: _Hypotheses, at: Tensor, tokens: Tensor, texts: dict[tuple[int, int, int], int]) -> None:
        """Add tokens to some of the hypotheses, by row and place [hypotheses, 2]."""
        rows, places = at.unbind(1)
        begins = made.texts[rows, places]
        numbers = [
            texts.setdefault(text, len(texts) + 1)
            for text in zip(rows.tolist(), begins.tolist(), tokens.tolist(), strict=True)
        ]
        made.beginnings[rows, places], made.last[rows, places] = begins, tokens
        made.texts[rows, places] = torch.tensor(numbers, device=at.device)
        flat = rows * made.scores.shape[1] + places
        vectors, memory = self._predictor.step(tokens, tuple(tensor[flat] for tensor in made.memory))
        made.vectors[rows, places] = self._joiner.predictor(vectors)
        for tensor, after in zip(made.memory, memory, strict=True):
            tensor[flat] = after
        if self._lm is not None:
            spots = list(zip(rows.tolist(), places.tolist(), strict=True))
            after_lm = self._lm.after((made.lm_states[row][place] for row, place in spots), tokens.tolist())
            for (row, place), state in zip(spots, after_lm, strict=True):
                made.lm_states[row][place] = state

    # --- results

    def _ended(self, search: _Hypotheses, history: list[_Frame], row: int) -> list[Ended]:
        """An utterance's hypotheses after its last frame, the best first."""
        scores = search.scores[row]
        if self._lm is not None:
            ends = torch.full((len(scores), 1), END, device=scores.device)
            scores = scores + self._lm_weight * self._lm.scores(search.lm_states[row], ends).squeeze(1)
        ranked, order = scores.sort(descending=True, stable=True)
        some = [pair for pair in zip(ranked.tolist(), order.tolist(), strict=True) if pair[0] > -torch.inf]
        return [self._traced(history, row, place, score) for score, place in some]

    @staticmethod
    def _traced(history: list[_Frame], row: int, place: int, score: float) -> Ended:
        """A hypothesis with its best alignment."""
        tokens: list[int] = []
        log_probs: list[float] = []
        frames: list[int] = []
        nothing = 0.0
        for number in reversed(range(len(history))):
            frame = history[number]
            token, log_prob = int(frame.tokens[row, place]), float(frame.log_probs[row, place])
            place = int(frame.parents[row, place])
            nothing += log_prob
            if token:
                tokens.append(token)
                log_probs.append(log_prob)
                frames.append(number)
        return Ended(tokens[::-1], log_probs[::-1], nothing / len(history), score, score, frames[::-1])

    @override
    def _own_spans(self, ended: Ended, encoded_1TD: Tensor) -> list[tuple[int, int]]:
        assert ended.frames is not None
        return [(frame, frame + 1) for frame in ended.frames]


class TransducerStream:
    """The search in one utterance whose frames come one after another; it finds what the search finds in all.

    Args:
        search: Makes the steps.
    """

    def __init__(self, search: TransducerSearch) -> None:
        self._search = search
        self._hypotheses: _Hypotheses | None = None
        self._history: list[_Frame] = []
        self._texts: dict[tuple[int, int, int], int] = {}
        self._encoded: list[Tensor] = []
        self._ctc: list[Tensor] = []

    def step(self, encoded_D: Tensor, ctc_V: Tensor | None = None) -> bool:
        """Go on with a frame; returns whether the best hypothesis says nothing in it.

        Args:
            encoded_D: The encoder's frame.
            ctc_V: Natural log posteriors by CTC; None if the encoder has none.

        Raises:
            DecodeError: The network's output contains NaN.
        """
        search = self._search
        with torch.inference_mode():
            projected_1J = search._joiner.encoder(encoded_D.unsqueeze(0))
            before = self._hypotheses or search._start(1, projected_1J)
            self._hypotheses = search._step(before, projected_1J, self._texts, self._history)
        self._encoded.append(encoded_D)
        self._ctc += [] if ctc_V is None else [ctc_V.float()]
        return not self._history[-1].tokens[0, 0]

    def best(self, final: bool) -> Hypothesis:
        """The best hypothesis of the frames so far; `final`: nothing follows.

        The second language model ranks whole utterances only.
        """
        if self._hypotheses is None:
            return Hypothesis()
        with torch.inference_mode():
            ended = self._search._ended(self._hypotheses, self._history, 0)
            ended = self._search._ranked_again(ended) if final else ended
            ctc_TV = torch.stack(self._ctc) if self._ctc else None
            return self._search._hypothesis(ended, torch.stack(self._encoded).unsqueeze(0), ctc_TV)


def _first(search: _Hypotheses, count: int) -> _Hypotheses:
    """The hypotheses of the first utterances."""
    batch, beam = search.scores.shape
    if count == batch:
        return search
    tensors = {name: getattr(search, name)[:count] for name in ("scores", "texts", "beginnings", "last", "vectors")}
    memory = tuple(tensor[: count * beam] for tensor in search.memory)
    return _Hypotheses(**tensors, memory=memory, lm_states=search.lm_states[:count])
