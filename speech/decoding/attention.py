"""Search with a decoder network: tokens from left to right, each given the encoder's frames and the tokens before it.

A hypothesis is scored by the decoder network, by CTC prefix scores (Watanabe et al. 2017) and by a language model of
tokens. All hypotheses of all utterances of a batch are extended at once, with cached keys and values.

A decoder network may repeat itself without end, above all in silence and noise. Two rules bound that: a text has at
most `tokens_per_frame` tokens for a frame of the encoder, and a hypothesis whose last tokens are the same phrase
`max_repeats` times is ended, without the repetitions. Whisper says itself whether there is speech: an improbable text
where it says that there is none is left out (Radford et al. 2022, section 4.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from speech.attention_alignment import attended_frames
from speech.decoding.ctc_prefix import CtcPrefixes, CtcPrefixScorer
from speech.decoding.token_search import END, Ended, States, TokenSearch, TokenSearchConfig
from speech.hypotheses import Hypothesis

if TYPE_CHECKING:
    from torch import Tensor

    from speech.models.networks.decoder import DecoderCache, DecoderNetwork
    from speech.tokens import Tokenizer

_LONGEST_LOOP = 64
"""Tokens of a phrase whose repetitions are found; longer ones are left to the bound on a text's length."""


class AttentionDecodeConfig(TokenSearchConfig):
    """The best text by a decoder network; with `beam: 1`, its most probable token at each place."""

    kind: Literal["attention"] = "attention"
    beam: int = Field(default=8, ge=1)
    """Number of partial hypotheses kept after each token; 1 is greedy."""
    beam_tokens: int = Field(default=20, ge=0)
    """Number of tokens tried after each hypothesis, those that the decoder network and hot words prefer; 0 for all."""
    ctc_weight: float = Field(default=0.3, ge=0, lt=1)
    """Share of CTC prefix scores in a hypothesis' score, if the encoder has CTC; the decoder network has the rest."""
    length_power: float = Field(default=0.0, ge=0, le=2)
    """Finished hypotheses are compared by score / (tokens + 1) ** length_power: 0 compares probabilities, 1 compares
    means over tokens."""
    patience: float = Field(default=1.0, ge=0, le=1000)
    """The search of an utterance ends when `beam` times as many hypotheses have ended (Kasai et al. 2022,
    arXiv:2204.05424); 0: only when no other can become better."""
    tokens_per_frame: float = Field(default=1.0, gt=0, le=100)
    """Most tokens of a text for a frame of the encoder."""
    max_repeats: int = Field(default=8, ge=0)
    """A phrase that is repeated so often, each time at once, is a loop, and ends the hypothesis; 0 for no such rule."""
    no_speech: float = Field(default=0.6, ge=0, le=1)
    """An utterance has no words if the probability that there is no speech is higher, and `no_speech_log_prob` does not
    speak against it. Only of decoder networks with a token for it, as Whisper's; 1 for no such rule."""
    no_speech_log_prob: float = Field(default=-1.0, le=0)
    """A text whose tokens and end have at least this mean log probability is given all the same."""
    language: Literal["found", "given"] = "found"
    """Language of a set's utterances, if the model has tokens of languages: the most probable one of each, or the one
    that the data name, if the model has it."""
    times: Literal["auto", "ctc", "attention", "none"] = "auto"
    """Where words' times come from: the best path of CTC, the frames that are attended to, or (`auto`) CTC if the
    encoder has it."""

    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "ctc_weight": (0.0, 0.3, 0.5),
        "lm_weight": (0.25, 0.5, 1.0),
        "length_bonus": (0.0, 0.5),
    }

    @property
    @override
    def languages_given(self) -> bool:
        return self.language == "given"


@dataclass
class _Opening:
    """What precedes the texts of a batch."""

    prompts: Tensor
    """Tokens [batch, tokens]."""
    log_probs: Tensor
    """Of the first token of a text [batch, 1, vocab]."""
    cache: DecoderCache
    no_speech: Tensor
    """Probability that there is no speech [batch]; 0 if the network does not say."""


@dataclass
class _Search:
    """The hypotheses of utterances that are not done; all have the same number of tokens."""

    rows: list[int]
    """Number of each utterance in the batch."""
    limits: Tensor
    """Most tokens of each utterance [batch]."""
    tokens: Tensor
    """[batch, W, tokens]."""
    log_probs: Tensor
    """Of each token by the decoder network [batch, W, tokens]."""
    next: Tensor
    """Log probabilities of the next token [batch, W, vocab]."""
    scores: Tensor
    """Of each hypothesis [batch, W]; minus infinity if there is none."""
    repeats: Tensor
    """For each length of a phrase, how many of the last tokens equal the one a phrase before [batch, W, phrases]."""
    cache: DecoderCache
    ctc: CtcPrefixScorer | None
    prefixes: CtcPrefixes | None
    lm_scores: Tensor
    """log10 p of the tokens by the language model [batch, W]."""
    lm_states: States
    """State of the language model of each hypothesis."""

    def utterances(self, keep: Sequence[int]) -> _Search:
        """The search of some utterances."""
        if len(keep) == len(self.rows):
            return self
        at = torch.tensor(keep, dtype=torch.long, device=self.tokens.device)
        tensors = {
            name: getattr(self, name)[at]
            for name in ("limits", "tokens", "log_probs", "next", "scores", "repeats", "lm_scores")
        }
        return replace(
            self,
            rows=[self.rows[row] for row in keep],
            cache=self.cache.utterances(at),
            ctc=self.ctc and self.ctc.utterances(at),
            prefixes=self.prefixes and self.prefixes.utterances(at),
            lm_states=[self.lm_states[row] for row in keep if self.lm_states],
            **tensors,
        )


@dataclass
class _Candidates:
    """What may follow each hypothesis."""

    tokens: Tensor
    """[batch, W, K]."""
    scores: Tensor
    """Of the hypotheses with them [batch, W, K]; minus infinity for what must not follow."""
    lm: Tensor
    """log10 p by the language model [batch, W, K]."""
    ends: Tensor
    """Scores of the hypotheses as whole texts [batch, W]."""


class AttentionSearch(TokenSearch):
    """Finds texts for an encoder's frames with a decoder network.

    Args:
        cfg: Its parameters.
        network: The decoder network, in evaluation mode.
        tokenizer: The model's tokens.
    """

    cfg: AttentionDecodeConfig

    def __init__(self, cfg: AttentionDecodeConfig, network: DecoderNetwork, tokenizer: Tokenizer) -> None:
        super().__init__(cfg, network.encoder_width, tokenizer)
        self._network = network

    @override
    def _again(self, cfg: Any) -> Self:
        return type(self)(cfg, self._network, self._tokenizer)

    # --- the search

    @override
    def _searched(
        self, encoded: Tensor, frames: Tensor, ctc: Tensor | None, languages: Sequence[str]
    ) -> list[list[Ended]]:
        opening = self._opened(encoded, frames, languages)
        ended: list[list[Ended]] = [[] for _ in frames]
        search = self._start(opening, frames, ctc if self.cfg.ctc_weight else None)
        while search.rows:
            search = self._step(search, ended)
        for some, prompt, no_speech in zip(ended, opening.prompts.tolist(), opening.no_speech.tolist(), strict=True):
            some.sort(key=lambda hypothesis: -hypothesis.rank)
            for hypothesis in some:
                hypothesis.prompt, hypothesis.no_speech = prompt, no_speech
        return ended

    def _opened(self, encoded: Tensor, frames: Tensor, languages: Sequence[str]) -> _Opening:
        """What precedes the texts, with the most probable languages if the tokens leave a choice and none are given.

        Args:
            encoded: The encoder's frames.
            frames: Frames of each utterance [batch].
            languages: Language of each utterance; empty for one that is to be found.
        """
        tokenizer, cache = self._tokenizer, self._network.start(encoded, frames)
        starts = [tokenizer.start_of(language) if language else tokenizer.start for language in languages]
        prompts = torch.tensor(starts, device=encoded.device)
        found = torch.tensor([not language for language in languages], device=encoded.device)
        no_speech = torch.zeros(len(frames), device=encoded.device)
        for place in range(prompts.shape[1]):
            log_probs, cache = self._network.step(prompts[:, place : place + 1], cache)
            if place == tokenizer.opening and tokenizer.no_speech is not None:
                no_speech = log_probs[:, 0, tokenizer.no_speech].exp()
            if place == tokenizer.opening and tokenizer.languages:
                choice = torch.tensor(list(tokenizer.languages.values()), device=encoded.device)
                best = choice[log_probs[:, 0, choice].argmax(dim=1)]
                prompts[:, place + 1] = torch.where(found, best, prompts[:, place + 1])
        return _Opening(prompts, self._checked(log_probs), cache, no_speech)

    def _start(self, opening: _Opening, frames: Tensor, ctc: Tensor | None) -> _Search:
        """One empty hypothesis for each utterance."""
        batch, device = len(frames), opening.prompts.device
        limits = [max(1, ceil(self.cfg.tokens_per_frame * count)) for count in frames.tolist()]
        if most := self._network.most_tokens:
            limits = [min(limit, most - opening.prompts.shape[1]) for limit in limits]
        scorer = CtcPrefixScorer(ctc, frames) if ctc is not None else None
        return _Search(
            rows=list(range(batch)),
            limits=torch.tensor(limits, device=device),
            tokens=torch.zeros(batch, 1, 0, dtype=torch.long, device=device),
            log_probs=torch.zeros(batch, 1, 0, dtype=torch.float64, device=device),
            next=opening.log_probs,
            scores=torch.zeros(batch, 1, dtype=torch.float64, device=device),
            repeats=torch.zeros(batch, 1, _LONGEST_LOOP, dtype=torch.long, device=device),
            cache=opening.cache,
            ctc=scorer,
            prefixes=scorer.start() if scorer else None,
            lm_scores=torch.zeros(batch, 1, dtype=torch.float64, device=device),
            lm_states=self._lm.starts(batch) if self._lm else [],
        )

    def _step(self, search: _Search, ended: list[list[Ended]]) -> _Search:
        """Extend all hypotheses by one token; those that end are added to `ended`."""
        candidates = self._candidates(search)
        _, beam, count = candidates.scores.shape
        everything = torch.cat((candidates.scores.flatten(1), candidates.ends), dim=1)
        ranked, order = everything.sort(dim=1, descending=True, stable=True)
        scores, chosen = ranked[:, : self.cfg.beam], order[:, : self.cfg.beam]
        ends = chosen >= beam * count
        parents = torch.where(ends, chosen - beam * count, chosen // max(1, count))
        self._end(search, ended, parents, ends & scores.isfinite(), scores)
        scores = scores.masked_fill(ends, -torch.inf)
        best = scores.max(dim=1).values.tolist()
        keep = [at for at, row in enumerate(search.rows) if self._goes_on(search, at, best[at], ended[row])]
        if not keep:
            return search.utterances(keep)
        at = torch.tensor(keep, device=scores.device)
        follow = chosen.masked_fill(ends, 0)
        part = search.utterances(keep)
        rest = _Candidates(*(scores[at] for scores in vars(candidates).values()))
        return self._extended(part, rest, parents[at], follow[at], scores[at])

    def _candidates(self, search: _Search) -> _Candidates:
        """What may follow each hypothesis, with scores."""
        cfg, tokenizer, empty = self.cfg, self._tokenizer, search.tokens.shape[2] == 0
        banned = [*tokenizer.suppressed, *(tokenizer.suppressed_first if empty else ())]
        log_probs = search.next.clone()
        log_probs[:, :, banned] = -torch.inf
        end_log_probs = log_probs[:, :, tokenizer.end].clone()
        log_probs[:, :, tokenizer.end] = -torch.inf
        vocab = log_probs.shape[2]
        wishes = self._wishes(search.lm_states, log_probs.device)
        wanted = log_probs if wishes is None else log_probs + wishes
        tokens = wanted.topk(min(cfg.beam_tokens or vocab, vocab), dim=2).indices
        best = log_probs.gather(2, tokens)
        weight = cfg.ctc_weight if search.ctc else 0.0
        attention = search.log_probs.sum(dim=2)
        scores = (1 - weight) * (attention.unsqueeze(2) + best)
        ends = (1 - weight) * (attention + end_log_probs)
        if search.ctc and search.prefixes:
            scores = scores + weight * search.ctc.extended(search.prefixes, tokens)
            ends = ends + weight * search.ctc.ends(search.prefixes)
        lm, lm_ends = self._by_language_model(search, tokens)
        length = search.tokens.shape[2]
        lm_weight = self._lm_weight
        scores = scores + lm_weight * (search.lm_scores.unsqueeze(2) + lm) + cfg.length_bonus * (length + 1)
        ends = ends + lm_weight * (search.lm_scores + lm_ends) + cfg.length_bonus * length
        alive = search.scores.isfinite()
        stopped = self._loops(search.repeats) | (search.limits <= length).unsqueeze(1)
        scores = scores.masked_fill((stopped | ~alive).unsqueeze(2), -torch.inf)
        return _Candidates(tokens, scores, lm, ends.masked_fill(~alive, -torch.inf))

    def _by_language_model(self, search: _Search, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """log10 p of tokens [batch, W, K] and of the end [batch, W] after each hypothesis."""
        lm = self._lm
        if lm is None:
            return torch.zeros_like(tokens, dtype=torch.float64), torch.zeros_like(search.lm_scores)
        batch, beam, _ = tokens.shape
        states = [state for states in search.lm_states for state in states]
        asked = torch.nn.functional.pad(tokens.flatten(0, 1), (0, 1), value=END)
        scores = lm.scores(states, asked).unflatten(0, (batch, beam))  # type: ignore[no-untyped-call]
        return scores[:, :, :-1], scores[:, :, -1]

    def _loops(self, repeats: Tensor) -> Tensor:
        """Which hypotheses end in a phrase that was repeated too often [batch, W]."""
        phrases = torch.arange(1, _LONGEST_LOOP + 1, device=repeats.device)
        most = self.cfg.max_repeats
        return (repeats >= most * phrases).any(dim=2) if most else torch.zeros_like(repeats[:, :, 0]).bool()

    def _end(self, search: _Search, ended: list[list[Ended]], parents: Tensor, ends: Tensor, scores: Tensor) -> None:
        """Add the hypotheses that end [batch, chosen] to `ended`."""
        for at, place in ends.nonzero().tolist():
            parent = int(parents[at, place])
            end = float(search.next[at, parent, self._tokenizer.end])
            tokens, log_probs = search.tokens[at, parent].tolist(), search.log_probs[at, parent].tolist()
            kept = self._without_loop(tokens)
            score = float(scores[at, place])
            rank = score / (len(tokens) + 1) ** self.cfg.length_power
            ended[search.rows[at]].append(Ended(tokens[:kept], log_probs[:kept], end, score, rank))

    def _without_loop(self, tokens: list[int]) -> int:
        """How many tokens are left without the repetitions of a phrase that ends a hypothesis too often."""
        most = self.cfg.max_repeats
        for phrase in range(1, min(_LONGEST_LOOP, len(tokens) // (most + 1)) + 1 if most else 1):
            repeated = 0
            while repeated < len(tokens) - phrase and tokens[-1 - repeated] == tokens[-1 - repeated - phrase]:
                repeated += 1
            if repeated >= most * phrase:
                return len(tokens) - repeated
        return len(tokens)

    def _goes_on(self, search: _Search, at: int, best: float, ended: list[Ended]) -> bool:
        """Whether the best partial hypothesis of an utterance may still become one of the best of all."""
        if best == -inf:
            return False
        cfg = self.cfg
        wanted = max(cfg.nbest, min(cfg.hypotheses, cfg.beam))
        if len(ended) < wanted:
            return True
        if cfg.patience and len(ended) >= cfg.patience * cfg.beam:
            return False
        if self._hot:  # hot words may follow
            return True
        length, limit = search.tokens.shape[2] + 1, int(search.limits[at])
        # all scores but the bonus only fall, and a longer text divides a negative score by more
        most = best + max(0.0, cfg.length_bonus) * max(0, limit - length)
        most /= ((limit if most < 0 else length) + 1) ** cfg.length_power
        return bool(most > sorted(hypothesis.rank for hypothesis in ended)[-wanted])

    def _extended(
        self, search: _Search, candidates: _Candidates, parents: Tensor, chosen: Tensor, scores: Tensor
    ) -> _Search:
        """The search with the chosen candidates [batch, chosen], by their numbers among all of an utterance."""
        rows = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        tokens = candidates.tokens.flatten(1).gather(1, chosen)
        log_probs = search.next[rows, parents, tokens].unsqueeze(2)
        before = search.tokens[rows, parents]
        recent = before[:, :, -_LONGEST_LOOP:].flip(2)
        same = torch.nn.functional.pad(recent == tokens.unsqueeze(2), (0, _LONGEST_LOOP - recent.shape[2]))
        next_log_probs, cache = self._network.step(tokens, search.cache.reordered(parents))
        ctc = search.ctc
        prefixes = ctc.step(search.prefixes.reordered(parents), tokens) if ctc and search.prefixes else None
        return replace(
            search,
            tokens=torch.cat((before, tokens.unsqueeze(2)), dim=2),
            log_probs=torch.cat((search.log_probs[rows, parents], log_probs), dim=2),
            next=self._checked(next_log_probs),
            scores=scores,
            repeats=torch.where(same, search.repeats[rows, parents] + 1, 0),
            cache=cache,
            prefixes=prefixes,
            lm_scores=search.lm_scores[rows, parents] + candidates.lm.flatten(1).gather(1, chosen),
            lm_states=self._lm_after(search.lm_states, parents.tolist(), tokens),
        )

    def _lm_after(self, states: States, parents: list[list[int]], tokens: Tensor) -> States:
        """States of the language model after one more token of each hypothesis [batch, W]."""
        if self._lm is None:
            return []
        before = [states[row][parent] for row, some in enumerate(parents) for parent in some]
        after = iter(self._lm.after(before, tokens.flatten().tolist()))
        return [[next(after) for _ in some] for some in parents]

    # --- results

    @override
    def _hypothesis(self, ended: Sequence[Ended], encoded_1TD: Tensor, ctc_TV: Tensor | None) -> Hypothesis:
        best = ended[0]
        if self._is_silence(best, encoded_1TD):
            made = Hypothesis(score=log(best.no_speech), confidence=min(best.no_speech, 1.0))
        else:
            made = super()._hypothesis(ended, encoded_1TD, ctc_TV)
        return replace(made, language=self._language(best.prompt))

    @override
    def _written(self, ended: Ended) -> Hypothesis:
        return replace(super()._written(ended), language=self._language(ended.prompt))

    def _language(self, prompt: Sequence[int]) -> str:
        """Code of the language that was chosen for an utterance; empty if there was no choice."""
        codes = {number: code for code, number in self._tokenizer.languages.items()}
        return codes[prompt[self._tokenizer.opening + 1]] if codes else ""

    def _is_silence(self, best: Ended, encoded_1TD: Tensor) -> bool:
        """Whether an utterance has no words, by the probability that there is no speech, and by that of its best text.

        As in the published code, the latter is that of the tokens that are not suppressed.
        """
        tokenizer, device = self._tokenizer, encoded_1TD.device
        if not best.tokens or not best.no_speech > self.cfg.no_speech:
            return False
        count = torch.tensor([encoded_1TD.shape[1]], device=device)
        read = torch.tensor([[*best.prompt, *best.tokens]], device=device)
        log_probs = self._network(read, encoded_1TD, count)[0, len(best.prompt) - 1 :].double()
        log_probs[:, list(tokenizer.suppressed)] = -torch.inf
        log_probs[0, list(tokenizer.suppressed_first)] = -torch.inf
        written = torch.tensor([*best.tokens, tokenizer.end], device=device).unsqueeze(1)
        return float(log_probs.log_softmax(dim=1).gather(1, written).mean()) < self.cfg.no_speech_log_prob

    @override
    def _own_spans(self, ended: Ended, encoded_1TD: Tensor) -> list[tuple[int, int]]:
        tokens = torch.tensor([[*ended.prompt, *ended.tokens]], device=encoded_1TD.device)
        lengths = torch.tensor([encoded_1TD.shape[1]], device=encoded_1TD.device)
        weights = self._network.attention(tokens, encoded_1TD, lengths)
        return attended_frames(weights[0, :, len(ended.prompt) - 1 :])
