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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from speech.attention_alignment import attended_frames
from speech.decoding.base import DecodeConfig, Decoder
from speech.decoding.ctc_prefix import CtcPrefixes, CtcPrefixScorer
from speech.decoding.nbest import merged_texts
from speech.hypotheses import DecodeError, Hypothesis
from speech.lm.base import LanguageModel
from speech.lm.kenlm import KenlmModel
from speech.lm.network import MODEL, read_network
from speech.lm.vocabulary import END_ID

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.priors import StateOutputs
    from speech.models.networks.decoder import DecoderCache, DecoderNetwork
    from speech.tokens import Tokenizer

_LONGEST_LOOP = 64
"""Tokens of a phrase whose repetitions are found; longer ones are left to the bound on a text's length."""


class AttentionDecodeConfig(DecodeConfig):
    """The best text by a decoder network; with `beam: 1`, its most probable token at each place."""

    kind: Literal["attention"] = "attention"
    beam: int = Field(default=8, ge=1)
    """Number of partial hypotheses kept after each token; 1 is greedy."""
    beam_tokens: int = Field(default=20, ge=0)
    """Number of tokens tried after each hypothesis, those that the decoder network prefers; 0 for all."""
    ctc_weight: float = Field(default=0.3, ge=0, lt=1)
    """Share of CTC prefix scores in a hypothesis' score, if the encoder has CTC; the decoder network has the rest."""
    lm: str = ""
    """Language model of tokens, written as the tokenizer writes them: an ARPA file (also .gz), a KenLM binary, or a
    network (`lm.safetensors`). Empty: that of the pipeline's stage `lm`, if there is one."""
    lm_weight: float = Field(default=0.5, ge=0)
    """Factor of the language model's log10 probabilities; 2.3 makes them natural logarithms."""
    length_bonus: float = 0.0
    """Added for each token; more than 0 makes longer texts."""
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
    nbest: int = Field(default=1, ge=1)
    """Number of hypotheses that are given of each utterance."""
    times: Literal["auto", "ctc", "attention", "none"] = "auto"
    """Where words' times come from: the best path of CTC, the frames that are attended to, or (`auto`) CTC if the
    encoder has it."""

    packages: ClassVar[tuple[str, ...]] = ("flashlight-text",)
    file_fields: ClassVar[dict[str, str]] = {"lm": "lm"}
    lm_unit: ClassVar[str] = "token"
    reads_networks: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "ctc_weight": (0.0, 0.3, 0.5),
        "lm_weight": (0.25, 0.5, 1.0),
        "length_bonus": (0.0, 0.5),
    }

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        raise DecodeError("decode.kind attention searches with a decoder network: use greedy or beam for posteriors")


@dataclass
class _Ended:
    """A hypothesis that has ended."""

    tokens: list[int]
    log_probs: list[float]
    """Of the tokens and the end, by the decoder network."""
    score: float
    rank: float
    """What hypotheses are compared by."""


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
    lm_states: list[list[Any]]
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


class AttentionSearch:
    """Finds texts for an encoder's frames with a decoder network.

    Args:
        cfg: Its parameters.
        network: The decoder network, in evaluation mode.
        tokenizer: The model's tokens.
    """

    def __init__(self, cfg: AttentionDecodeConfig, network: DecoderNetwork, tokenizer: Tokenizer) -> None:
        self.cfg, self._network, self._tokenizer = cfg, network, tokenizer
        self._lm: LanguageModel | None = None

    def with_config(self, cfg: AttentionDecodeConfig) -> AttentionSearch:
        """This search with other parameters; it shares the language model if that is the same."""
        made = AttentionSearch(cfg, self._network, self._tokenizer)
        if cfg.files() == self.cfg.files() and self._lm is not None:
            made._lm, made._lm_numbers = self._lm, self._lm_numbers
        return made

    def prepare(self) -> None:
        """Read the language model now, not at the first utterance.

        Raises:
            LmError: It cannot be read.
        """
        cfg, symbols = self.cfg, self._tokenizer.symbols
        if cfg.lm and self._lm is None:
            network = Path(cfg.lm).suffix == Path(MODEL).suffix
            model: LanguageModel = read_network(Path(cfg.lm)) if network else KenlmModel(cfg.lm, symbols)
            self._lm_numbers = model.words.indices(symbols)
            self._lm = model

    def __call__(self, encoded_BTD: Tensor, frames: Tensor, ctc_BTV: Tensor | None = None) -> list[Hypothesis]:
        """The best hypothesis of each utterance.

        Args:
            encoded_BTD: The encoder's frames.
            frames: Frames of each utterance [batch].
            ctc_BTV: Natural log posteriors of the frames by CTC, the blank first; None if the encoder has none.

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
            opening = self._opened(encoded, own)
            for place, ended in enumerate(self._searched(opening, own, ctc)):
                row, count = heard[place], counts[heard[place]]
                posteriors = None if ctc is None else ctc[place, :count]
                prompt, attended = opening.prompts[place], encoded[place : place + 1, :count]
                no_speech = float(opening.no_speech[place])
                if self._is_silence(no_speech, ended, prompt, attended):
                    found = Hypothesis(score=log(no_speech), confidence=min(no_speech, 1.0))
                else:
                    found = self._timed(self._hypothesis(ended), prompt, attended, posteriors)
                hypotheses[row] = replace(found, language=self._language(prompt))
        return hypotheses

    def _check(self, encoded: Tensor, frames: Tensor, ctc: Tensor | None) -> list[int]:
        """Frames of each utterance."""
        width, vocab = self._network.encoder_width, self._tokenizer.size
        if encoded.dim() != 3 or encoded.shape[2] != width:
            raise DecodeError(
                f"encoded frames must be [batch, frames, {width}], not {list(encoded.shape)}: the encoder and the "
                "decoder network must belong together"
            )
        batch, most = encoded.shape[:2]
        counts = [int(count) for count in frames.tolist()]
        if len(counts) != batch or any(not 0 <= count <= most for count in counts):
            raise DecodeError(f"frames must be {batch} numbers in 0 to {most}, not {counts}")
        if ctc is not None and (ctc.dim() != 3 or ctc.shape != (batch, most, vocab)):
            raise DecodeError(f"CTC posteriors must be [{batch}, {most}, {vocab} tokens], not {list(ctc.shape)}")
        if self.cfg.times == "ctc" and ctc is None:
            raise DecodeError("decode.times is ctc, but the model has no CTC: use auto or attention")
        inside = torch.arange(most, device=encoded.device) < frames.to(encoded.device).unsqueeze(1)
        for values in (encoded, ctc):
            if values is not None and bool((values.isnan().any(dim=2) & inside.to(values.device)).any()):
                raise DecodeError("the encoder's output contains NaN: it has diverged, or its input was damaged")
        return counts

    # --- the search

    def _opened(self, encoded: Tensor, frames: Tensor) -> _Opening:
        """What precedes the texts, with the most probable languages if the tokens leave a choice."""
        tokenizer, cache = self._tokenizer, self._network.start(encoded, frames)
        prompts = torch.tensor(tokenizer.start, device=encoded.device).repeat(len(frames), 1)
        no_speech = torch.zeros(len(frames), device=encoded.device)
        for place in range(prompts.shape[1]):
            log_probs, cache = self._network.step(prompts[:, place : place + 1], cache)
            if place == tokenizer.opening and tokenizer.no_speech is not None:
                no_speech = log_probs[:, 0, tokenizer.no_speech].exp()
            if place == tokenizer.opening and tokenizer.languages:
                choice = torch.tensor(list(tokenizer.languages.values()), device=encoded.device)
                prompts[:, place + 1] = choice[log_probs[:, 0, choice].argmax(dim=1)]
        return _Opening(prompts, self._checked(log_probs), cache, no_speech)

    def _language(self, prompt: Tensor) -> str:
        """Code of the language that was chosen for an utterance; empty if there was no choice."""
        codes = {number: code for code, number in self._tokenizer.languages.items()}
        return codes[int(prompt[self._tokenizer.opening + 1])] if codes else ""

    def _is_silence(self, no_speech: float, ended: list[_Ended], prompt: Tensor, encoded_1TD: Tensor) -> bool:
        """Whether an utterance has no words, by the probability that there is no speech, and by that of its best text.

        As in the published code, the latter is that of the tokens that are not suppressed.
        """
        tokenizer, tokens = self._tokenizer, ended[0].tokens if ended else []
        if not tokens or not no_speech > self.cfg.no_speech:
            return False
        count = torch.tensor([encoded_1TD.shape[1]], device=prompt.device)
        read = torch.cat((prompt, torch.tensor(tokens, device=prompt.device)))
        log_probs = self._network(read.unsqueeze(0), encoded_1TD, count)[0, len(prompt) - 1 :].double()
        log_probs[:, list(tokenizer.suppressed)] = -torch.inf
        log_probs[0, list(tokenizer.suppressed_first)] = -torch.inf
        written = torch.tensor([*tokens, tokenizer.end], device=prompt.device).unsqueeze(1)
        return float(log_probs.log_softmax(dim=1).gather(1, written).mean()) < self.cfg.no_speech_log_prob

    def _searched(self, opening: _Opening, frames: Tensor, ctc: Tensor | None) -> list[list[_Ended]]:
        """Ended hypotheses of each utterance, the best first."""
        ended: list[list[_Ended]] = [[] for _ in frames]
        search = self._start(opening, frames, ctc if self.cfg.ctc_weight else None)
        while search.rows:
            search = self._step(search, ended)
        return [sorted(some, key=lambda hypothesis: -hypothesis.rank) for some in ended]

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
            lm_states=[list(self._lm.starts(1)) for _ in range(batch)] if self._lm else [],
        )

    def _checked(self, log_probs: Tensor) -> Tensor:
        if bool(log_probs.isnan().any()):
            raise DecodeError("the decoder network's output contains NaN: the model has diverged")
        return log_probs.double()

    def _step(self, search: _Search, ended: list[list[_Ended]]) -> _Search:
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
        best, tokens = log_probs.topk(min(cfg.beam_tokens or vocab, vocab), dim=2)
        weight = cfg.ctc_weight if search.ctc else 0.0
        attention = search.log_probs.sum(dim=2)
        scores = (1 - weight) * (attention.unsqueeze(2) + best)
        ends = (1 - weight) * (attention + end_log_probs)
        if search.ctc and search.prefixes:
            scores = scores + weight * search.ctc.extended(search.prefixes, tokens)
            ends = ends + weight * search.ctc.ends(search.prefixes)
        lm, lm_ends = self._by_language_model(search, tokens)
        length = search.tokens.shape[2]
        scores = scores + cfg.lm_weight * (search.lm_scores.unsqueeze(2) + lm) + cfg.length_bonus * (length + 1)
        ends = ends + cfg.lm_weight * (search.lm_scores + lm_ends) + cfg.length_bonus * length
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
        numbers = self._lm_numbers[tokens.flatten(0, 1).cpu().numpy()]
        ends = np.full((len(numbers), 1), END_ID)
        states: Any = [state for states in search.lm_states for state in states]
        scores = torch.from_numpy(lm.score_next(states, np.concatenate([numbers, ends], axis=1)))
        scores = scores.to(tokens.device).unflatten(0, (batch, beam))  # type: ignore[no-untyped-call]
        return scores[:, :, :-1], scores[:, :, -1]

    def _loops(self, repeats: Tensor) -> Tensor:
        """Which hypotheses end in a phrase that was repeated too often [batch, W]."""
        phrases = torch.arange(1, _LONGEST_LOOP + 1, device=repeats.device)
        most = self.cfg.max_repeats
        return (repeats >= most * phrases).any(dim=2) if most else torch.zeros_like(repeats[:, :, 0]).bool()

    def _end(self, search: _Search, ended: list[list[_Ended]], parents: Tensor, ends: Tensor, scores: Tensor) -> None:
        """Add the hypotheses that end [batch, chosen] to `ended`."""
        for at, place in ends.nonzero().tolist():
            parent = int(parents[at, place])
            end = float(search.next[at, parent, self._tokenizer.end])
            tokens, log_probs = search.tokens[at, parent].tolist(), search.log_probs[at, parent].tolist()
            kept = self._without_loop(tokens)
            score = float(scores[at, place])
            rank = score / (len(tokens) + 1) ** self.cfg.length_power
            ended[search.rows[at]].append(_Ended(tokens[:kept], [*log_probs[:kept], end], score, rank))

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

    def _goes_on(self, search: _Search, at: int, best: float, ended: list[_Ended]) -> bool:
        """Whether the best partial hypothesis of an utterance may still become one of the best of all."""
        if best == -inf:
            return False
        cfg = self.cfg
        if len(ended) < cfg.nbest:
            return True
        if cfg.patience and len(ended) >= cfg.patience * cfg.beam:
            return False
        length, limit = search.tokens.shape[2] + 1, int(search.limits[at])
        # all scores but the bonus only fall, and a longer text divides a negative score by more
        most = best + max(0.0, cfg.length_bonus) * max(0, limit - length)
        most /= ((limit if most < 0 else length) + 1) ** cfg.length_power
        return bool(most > sorted(hypothesis.rank for hypothesis in ended)[-cfg.nbest])

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

    def _lm_after(self, states: list[list[Any]], parents: list[list[int]], tokens: Tensor) -> list[list[Any]]:
        """States of the language model after one more token of each hypothesis [batch, W]."""
        if self._lm is None:
            return []
        before: Any = [states[row][parent] for row, some in enumerate(parents) for parent in some]
        after = iter(self._lm.score_batch(before, self._lm_numbers[tokens.flatten().cpu().numpy()])[0])
        return [[next(after) for _ in some] for some in parents]

    # --- results

    def _hypothesis(self, ended: list[_Ended]) -> Hypothesis:
        """The best of an utterance's hypotheses, with the others if they are asked for."""
        if not ended:
            return Hypothesis()
        best = ended[0]
        spoken = np.clip(np.exp(best.log_probs[:-1] or best.log_probs), 0.0, 1.0)
        words = self._tokenizer.word_groups(best.tokens)
        texts = [self._tokenizer.decode(hypothesis.tokens) for hypothesis in ended]
        return Hypothesis(
            tokens=best.tokens,
            text=texts[0],
            score=best.score,
            confidence=float(spoken.mean()),
            word_confidences=[float(spoken[group].mean()) for group in words],
            nbest=merged_texts(texts, [hypothesis.rank for hypothesis in ended], self.cfg.nbest),
        )

    def _timed(self, hypothesis: Hypothesis, prompt: Tensor, encoded_1TD: Tensor, ctc_TV: Tensor | None) -> Hypothesis:
        """A hypothesis with the frames of its tokens and words."""
        if self.cfg.times == "none" or not hypothesis.tokens:
            return hypothesis
        if ctc_TV is not None and self.cfg.times != "attention":
            from speech.ctc_alignment import token_spans

            spans = token_spans(ctc_TV.cpu(), hypothesis.tokens)
        else:
            tokens = torch.tensor([[*prompt.tolist(), *hypothesis.tokens]], device=encoded_1TD.device)
            lengths = torch.tensor([encoded_1TD.shape[1]], device=encoded_1TD.device)
            weights = self._network.attention(tokens, encoded_1TD, lengths)
            spans = attended_frames(weights[0, :, len(prompt) - 1 :])
        if not spans:  # too few frames for the tokens: each gets its share
            frames, count = encoded_1TD.shape[1], len(hypothesis.tokens)
            spans = [(place * frames // count, (place + 1) * frames // count) for place in range(count)]
        words = self._tokenizer.word_groups(hypothesis.tokens)
        return replace(
            hypothesis,
            frames=[first for first, _ in spans],
            word_frames=[(spans[group[0]][0], spans[group[-1]][1]) for group in words],
        )
