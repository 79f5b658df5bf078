"""Search with a decoder network: exactness against all texts, language models, n-best, loops, times, bad input."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import ctc_loss

from speech.attention_alignment import attended_frames, monotonic_path
from speech.decoding import DecodeError
from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.decoding.ctc_prefix import CtcPrefixScorer
from speech.lm.kenlm import KenlmModel
from speech.lm.lstm import LstmConfig
from speech.lm.network import LmSpec, read_network
from speech.models import TransformerDecoderConfig
from speech.models.networks.decoder import DecoderCache, DecoderNetwork
from speech.tokens import CharacterTokenizer, WordTokenizer

WIDTH = 6
ALL = {"beam": 10**6, "beam_tokens": 0, "max_repeats": 0, "times": "none"}


def tokenizer(size):
    return CharacterTokenizer(["<blank>", *"abcdefgh"][:size])


def network(size, seed=0, sharpness=4.0):
    """A random network whose outputs are not nearly uniform."""
    torch.manual_seed(seed)
    made = TransformerDecoderConfig(**TransformerDecoderConfig.tiny).build(WIDTH, size).eval()
    with torch.no_grad():
        made.output.weight.mul_(sharpness)
    return made


def speech(counts, size, seed=0):
    """Encoded frames, their numbers, and posteriors by CTC."""
    generator = torch.Generator().manual_seed(seed)
    encoded = 2 * torch.randn(len(counts), max(counts), WIDTH, generator=generator)
    posteriors = (2 * torch.randn(len(counts), max(counts), size, generator=generator)).log_softmax(-1)
    return encoded, torch.tensor(counts), posteriors


def by_decoder(net, encoded, text):
    """Log probability of a text and its end."""
    tokens = torch.tensor([[0, *text]])
    log_probs = net(tokens, encoded[None], torch.tensor([len(encoded)]))[0].double()
    return float(log_probs.detach()[torch.arange(len(text) + 1), torch.tensor([*text, 0])].sum())


def by_ctc(posteriors, text):
    """Log probability of a text over all its alignments."""
    loss = ctc_loss(
        posteriors.double().unsqueeze(1),
        torch.tensor([text], dtype=torch.long),
        (len(posteriors),),
        (len(text),),
        reduction="none",
    )
    return -float(loss)


def texts(size, longest):
    return [text for length in range(longest + 1) for text in itertools.product(range(1, size), repeat=length)]


ARPA = "\n".join(
    [
        *("\\data\\", "ngram 1=5", "ngram 2=3", "", "\\1-grams:", "-1.5\t<unk>", "-99\t<s>\t-0.3", "-0.7\t</s>"),
        *("-0.4\ta\t-0.2", "-0.6\tb", "", "\\2-grams:", "-0.2\t<s> b", "-0.9\ta a", "-0.1\ta </s>", "", "\\end\\", ""),
    ]
)


@pytest.fixture(params=["ngram", "lstm"])
def language_model(request, tmp_path):
    """Path of a language model of the tokens a and b, and the model."""
    if request.param == "ngram":
        path = tmp_path / "lm.arpa"
        path.write_text(ARPA)
        return str(path), KenlmModel(path, ["a", "b"])
    torch.manual_seed(2)
    spec = LmSpec(network=LstmConfig(dim=8, unit="token"), words=("<unk>", "<s>", "</s>", "a", "b"))
    spec.save(tmp_path, dict(spec.build_model().state_dict()))
    return str(tmp_path / "lm.safetensors"), read_network(tmp_path / "lm.safetensors")


# --- exactness


@pytest.mark.parametrize(
    ("weight", "bonus", "power"), [(0, 0, 0), (0.4, 0, 0), (0.9, 0, 0), (0.4, 0.7, 0), (0, 0, 1), (0.3, 0.5, 0.6)]
)
def test_unlimited_beam_finds_the_best_of_all_texts(weight, bonus, power):
    size, counts = 3, (5, 3, 1)
    net, (encoded, frames, posteriors) = network(size), speech(counts, size)
    cfg = AttentionDecodeConfig(**ALL, ctc_weight=weight, length_bonus=bonus, length_power=power, nbest=500)
    hypotheses = AttentionSearch(cfg, net, tokenizer(size))(encoded, frames, posteriors)
    for row, count in enumerate(counts):
        scores = {}
        for text in texts(size, count):
            score = (1 - weight) * by_decoder(net, encoded[row, :count], text) + bonus * len(text)
            own = by_ctc(posteriors[row, :count], text) if weight else 0.0
            scores["".join(" ab"[token] for token in text)] = score + weight * own if math.isfinite(own) else -math.inf
        ranks = {text: score / (len(text) + 1) ** power for text, score in scores.items() if math.isfinite(score)}
        best = max(ranks, key=ranks.get)
        assert hypotheses[row].text == best
        assert hypotheses[row].score == pytest.approx(scores[best], abs=1e-4)
        several = {alternative.text: alternative.score for alternative in hypotheses[row].nbest}
        for text, rank in ranks.items():
            assert several.pop(text) == pytest.approx(rank, abs=1e-4)
        assert all(score < -1e3 for score in several.values())  # impossible by CTC


def test_best_of_all_texts_is_found_behind_the_most_probable_language_or_the_given_one():
    plain, counts = tokenizer(3), (4, 3, 3)
    tokens = plain.with_languages(["de", "en"])
    net, (encoded, frames, _) = network(tokens.size, seed=3), speech(counts, 3)
    search = AttentionSearch(AttentionDecodeConfig(**ALL, ctc_weight=0.0), net, tokens)

    def scores_of(row, languages):
        """The best text of all, behind one of some languages, and the language."""
        first = net(torch.tensor([[0]]), encoded[row : row + 1, : counts[row]], frames[row : row + 1])[0, 0].detach()
        best = max(languages, key=lambda code: first[tokens.languages[code]].item())
        scores = {}
        for text in texts(3, counts[row]):
            read = torch.tensor([[*tokens.start_of(best), *text]])
            after = net(read, encoded[row : row + 1, : counts[row]], frames[row : row + 1])[0, 1:].double().detach()
            scores[text] = float(after[torch.arange(len(text) + 1), torch.tensor([*text, 0])].sum())
        text = max(scores, key=scores.get)
        return best, plain.decode(text), pytest.approx(scores[text], abs=1e-4)

    for given in (None, ["", "de", "en"], ["en", "de", ""]):
        wanted = [scores_of(row, [code] if code else ["de", "en"]) for row, code in enumerate(given or ("", "", ""))]
        for beam in ({}, {"nbest": 3, "times": "attention"}):
            found = search.with_config(search.cfg.model_copy(update=beam))(encoded, frames, None, given)
            assert [(one.language, one.text, one.score) for one in found] == wanted
    assert {language for language, *_ in wanted} == {"de", "en"}


def test_probabilities_of_all_texts_up_to_a_length_are_those_of_the_decoder_network():
    size, counts = 4, (4,)
    net, (encoded, frames, _) = network(size), speech(counts, size)
    cfg = AttentionDecodeConfig(**ALL, nbest=10**6)
    (hypothesis,) = AttentionSearch(cfg, net, tokenizer(size))(encoded, frames)
    assert len(hypothesis.nbest) == len(texts(size, 4)) == 121
    total = sum(math.exp(by_decoder(net, encoded[0], text)) for text in texts(size, 4))
    assert sum(math.exp(alternative.score) for alternative in hypothesis.nbest) == pytest.approx(total, rel=1e-5)
    assert sum(alternative.posterior for alternative in hypothesis.nbest) == pytest.approx(1)


@pytest.mark.parametrize("weight", [0.0, 1.7])
def test_language_model_is_added_by_weight(language_model, weight):
    path, lm = language_model
    size, counts = 3, (4, 2)
    net, (encoded, frames, posteriors) = network(size), speech(counts, size)
    cfg = AttentionDecodeConfig(**ALL, ctc_weight=0.2, lm=path, lm_weight=weight, nbest=500)
    hypotheses = AttentionSearch(cfg, net, tokenizer(size))(encoded, frames, posteriors)
    for row, count in enumerate(counts):
        several = {alternative.text: alternative.score for alternative in hypotheses[row].nbest}
        for text in texts(size, count):
            if not math.isfinite(own := by_ctc(posteriors[row, :count], text)):
                continue
            words = "".join(" ab"[token] for token in text)
            expected = 0.8 * by_decoder(net, encoded[row, :count], text) + 0.2 * own
            assert several[words] == pytest.approx(expected + weight * sum(lm.sentence(list(words))), abs=1e-4)


def test_next_words_of_a_language_model_are_scored_as_one_by_one(language_model):
    _, lm = language_model
    states = [lm.start, lm.score(lm.start, 3)[0], lm.score(lm.start, 4)[0]]
    words = np.array([[3, 4], [4, 2], [2, 0]])
    expected = [[lm.score(state, int(word))[1] for word in row] for state, row in zip(states, words, strict=True)]
    np.testing.assert_allclose(lm.score_next(states, words), expected, rtol=1e-5)
    assert lm.score_next([], np.zeros((0, 2), np.int64)).shape == (0, 2)


def test_ctc_prefix_is_the_sum_over_all_texts_that_begin_with_it():
    counts, size = (5, 3, 2), 3
    _, frames, posteriors = speech(counts, size)
    posteriors = posteriors.double().log_softmax(-1)
    scorer = CtcPrefixScorer(posteriors, frames)
    for text in texts(size, 3)[1:]:
        prefixes, score = scorer.start(), torch.zeros(3, 1, dtype=torch.float64)
        for token in text:
            tokens = torch.full((3, 1), token)
            score = scorer.extended(prefixes, tokens.unsqueeze(2)).squeeze(2)
            prefixes = scorer.step(prefixes, tokens)
        for row, count in enumerate(counts):
            own = {tokens: by_ctc(posteriors[row, :count], tokens) for tokens in texts(size, count)}
            begun = sum(math.exp(value) for tokens, value in own.items() if tokens[: len(text)] == text)
            if begun:
                assert float(score[row]) == pytest.approx(math.log(begun), abs=1e-8)
                whole = own.get(text, -math.inf)
                assert float(scorer.ends(prefixes)[row]) == pytest.approx(whole, abs=1e-8) or whole == -math.inf
            else:
                assert float(score[row]) < -1e5


def test_ctc_prefixes_of_long_utterances_stay_exact():
    _, frames, _ = speech((1500, 700), 5)
    posteriors = (30 * torch.randn(2, 1500, 5, generator=torch.Generator().manual_seed(3))).log_softmax(-1)
    scorer, text = CtcPrefixScorer(posteriors, frames), [1, 1, 3, 4, 2, 2, 2, 4]
    prefixes = scorer.start()
    for token in text:
        prefixes = scorer.step(prefixes, torch.full((2, 1), token))
    for row, count in enumerate((1500, 700)):
        assert float(scorer.ends(prefixes)[row]) == pytest.approx(by_ctc(posteriors[row, :count], text), rel=1e-9)


def test_beam_of_one_takes_the_best_token_at_each_place():
    size, counts = 6, (9, 4, 7)
    net, (encoded, frames, _) = network(size), speech(counts, size)
    hypotheses = AttentionSearch(AttentionDecodeConfig(beam=1, times="none"), net, tokenizer(size))(encoded, frames)
    for row, count in enumerate(counts):
        tokens = [0]
        while len(tokens) <= count:
            best = net(torch.tensor([tokens]), encoded[row : row + 1, :count], frames[row : row + 1])[0, -1].argmax()
            if not best:
                break
            tokens.append(int(best))
        assert hypotheses[row].tokens == tokens[1:]
        assert hypotheses[row].score == pytest.approx(by_decoder(net, encoded[row, :count], tokens[1:]), abs=1e-4)


def test_wide_beam_finds_better_texts_than_a_narrow_one():
    size = 6
    net, (encoded, frames, posteriors) = network(size), speech((12,) * 6, size)
    narrow, wide = (
        AttentionSearch(AttentionDecodeConfig(beam=beam, beam_tokens=0, times="none"), net, tokenizer(size))(
            encoded, frames, posteriors
        )
        for beam in (1, 64)
    )
    assert all(few.score <= many.score + 1e-6 for few, many in zip(narrow, wide, strict=True))
    assert sum(few.score < many.score - 0.1 for few, many in zip(narrow, wide, strict=True)) > 1


def test_search_ends_when_no_hypothesis_can_improve():
    size = 5
    net, (encoded, frames, posteriors) = network(size), speech((40,), size)
    steps = []
    step = net.step
    net.step = lambda tokens, cache: steps.append(tokens.shape) or step(tokens, cache)
    cfg = AttentionDecodeConfig(beam=4, times="none")
    (hypothesis,) = AttentionSearch(cfg, net, tokenizer(size))(encoded, frames, posteriors)
    assert len(steps) < 40
    assert len(hypothesis.tokens) < 40


@pytest.mark.parametrize("fields", [{"length_bonus": 2.0}, {"length_power": 1.0}])
def test_search_ends_when_so_many_hypotheses_have_ended_as_patience_says(fields):
    size, limit, lengths = 5, 40, {}
    net, (encoded, frames, posteriors) = network(size), speech((limit,), size)
    step = net.step
    for patience in (1.0, 3.0, 0.0):
        steps = []
        net.step = lambda tokens, cache, steps=steps: steps.append(tokens.shape) or step(tokens, cache)
        cfg = AttentionDecodeConfig(beam=4, times="none", patience=patience, max_repeats=0, **fields)
        AttentionSearch(cfg, net, tokenizer(size))(encoded, frames, posteriors)
        lengths[patience] = len(steps)
    assert lengths[1.0] < lengths[3.0] < lengths[0.0]


@pytest.mark.parametrize("fields", [{}, {"beam": 1}, {"ctc_weight": 0.0}, {"nbest": 3, "length_bonus": 0.4}])
def test_result_depends_neither_on_the_batch_nor_on_padding(fields):
    size, counts = 6, [11, 0, 4, 7, 1]
    net, (encoded, frames, posteriors) = network(size), speech(counts, size)
    search = AttentionSearch(AttentionDecodeConfig(**fields), net, tokenizer(size))
    padded, noisy = encoded.clone(), posteriors.clone()
    for row, count in enumerate(counts):
        padded[row, count:] = noisy[row, count:] = float("nan")
    together = search(padded, frames, noisy)
    for row, count in enumerate(counts):
        own = slice(row, row + 1)
        (alone,) = search(encoded[own, :count], frames[own], posteriors[own, :count])
        assert (alone.text, alone.tokens, alone.frames) == tuple(
            getattr(together[row], name) for name in ("text", "tokens", "frames")
        )
        assert alone.score == pytest.approx(together[row].score, abs=1e-4)
        assert [alternative.text for alternative in alone.nbest] == [
            alternative.text for alternative in together[row].nbest
        ]
    assert together[1].text == ""
    assert together == search(padded, frames, noisy)


# --- texts without end


class Parrot(DecoderNetwork):
    """Says a phrase again and again, whatever it hears, and ends a text very rarely.

    Args:
        phrase: The tokens.
        intro: Tokens that precede the first one.
        size: Tokens.
    """

    def __init__(self, phrase, intro=(), size=9):
        super().__init__(TransformerDecoderConfig(), WIDTH, size)
        self.phrase, self.intro = phrase, intro

    def _next(self, place):
        wanted = [*self.intro, *self.phrase * 1000][place]
        log_probs = torch.full((self.vocab_size,), -12.0)
        log_probs[wanted] = 0.0
        return log_probs.log_softmax(-1)

    def forward(self, tokens_BL, encoded_BTD, frames):
        return torch.stack([self._next(place) for place in range(tokens_BL.shape[1])]).expand(len(tokens_BL), -1, -1)

    def start(self, encoded_BTD, frames):
        nothing = torch.zeros(len(frames), 1, 1, 0, 1)
        return DecoderCache([], torch.ones(len(frames), 1, 1, 1, dtype=torch.bool), [(nothing, nothing)])

    def step(self, tokens_BW, cache):
        log_probs = self._next(cache.length).expand(*tokens_BW.shape, -1)
        return log_probs, DecoderCache([], cache.frame_mask, cache.tokens, cache.length + 1)

    def attention(self, tokens_BL, encoded_BTD, frames):
        return torch.full((len(frames), 1, tokens_BL.shape[1], encoded_BTD.shape[1]), 1 / encoded_BTD.shape[1])


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("phrase", [[1], [1, 2], [1, 2, 3, 1, 4], list(range(1, 9)) * 4])
def test_phrase_that_is_repeated_without_end_is_said_once(phrase, beam):
    cfg = AttentionDecodeConfig(beam=beam, times="none")
    (hypothesis,) = AttentionSearch(cfg, Parrot(phrase, (7, 5)), tokenizer(9))(
        torch.zeros(1, 750, WIDTH), torch.tensor([750])
    )
    # a phrase that consists of a shorter one is that one
    assert hypothesis.tokens == [7, 5, *(phrase[:8] if len(phrase) > 8 else phrase)]


def test_phrase_may_be_repeated_as_often_as_configured():
    net, frames = Parrot([1, 2]), torch.tensor([30])
    for repeats, expected in ((1, 2), (3, 2), (20, 30), (0, 30)):
        cfg = AttentionDecodeConfig(beam=1, max_repeats=repeats, times="none")
        (hypothesis,) = AttentionSearch(cfg, net, tokenizer(9))(torch.zeros(1, 30, WIDTH), frames)
        assert len(hypothesis.tokens) == expected


def test_repetitions_below_the_limit_stay():
    spoken = [3, *[1, 2] * 8, 4]

    class Speaker(Parrot):
        def _next(self, place):
            log_probs = torch.full((self.vocab_size,), -12.0)
            log_probs[[*spoken, 0, 0][place]] = 0.0
            return log_probs.log_softmax(-1)

    cfg = AttentionDecodeConfig(beam=1, times="none")
    (hypothesis,) = AttentionSearch(cfg, Speaker([1]), tokenizer(9))(torch.zeros(1, 50, WIDTH), torch.tensor([50]))
    assert hypothesis.tokens == spoken


def test_text_has_at_most_as_many_tokens_as_its_frames_allow():
    class Counter(Parrot):
        """Never says the same phrase twice on end."""

        def _next(self, place):
            log_probs = torch.full((self.vocab_size,), -12.0)
            log_probs[1 + bin(place).count("1") % 2] = 0.0  # the Thue-Morse sequence has no cubes
            return log_probs.log_softmax(-1)

    frames = torch.tensor([40, 7, 1])
    for share, expected in ((1.0, [40, 7, 1]), (0.25, [10, 2, 1]), (2.0, [80, 14, 2])):
        cfg = AttentionDecodeConfig(beam=1, max_repeats=4, tokens_per_frame=share, times="none")
        hypotheses = AttentionSearch(cfg, Counter([1]), tokenizer(9))(torch.zeros(3, 40, WIDTH), frames)
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == expected


def test_texts_are_no_longer_than_the_network_has_positions():
    net = Parrot([1])
    net.most_tokens = 6
    cfg = AttentionDecodeConfig(beam=1, max_repeats=0, times="none")
    (hypothesis,) = AttentionSearch(cfg, net, tokenizer(9))(torch.zeros(1, 40, WIDTH), torch.tensor([40]))
    assert len(hypothesis.tokens) == 5  # beside the token that starts a text


def test_suppressed_tokens_are_never_said_and_some_not_first():
    names, size = tokenizer(6), 6
    net, (encoded, frames, posteriors) = network(size), speech((9,) * 8, size)
    names.suppressed, names.suppressed_first = (2,), (0, 4)
    hypotheses = AttentionSearch(AttentionDecodeConfig(nbest=4), net, names)(encoded, frames, posteriors)
    assert not any("b" in alternative.text for utterance in hypotheses for alternative in utterance.nbest)
    assert all(
        alternative.text and alternative.text[0] != "d" for utterance in hypotheses for alternative in utterance.nbest
    )


# --- times


def test_words_have_the_times_of_their_best_path_by_ctc():
    names = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    path = [0, 2, 2, 3, 0, 1, 1, 0, 3, 0, 0, 2]
    posteriors = torch.full((1, 12, 4), -9.0)
    posteriors[0, torch.arange(12), torch.tensor(path)] = 0.0
    net = Parrot([2, 3, 1, 3, 2], size=4)
    cfg = AttentionDecodeConfig(beam=1, tokens_per_frame=5 / 12, ctc_weight=0.5)
    (hypothesis,) = AttentionSearch(cfg, net, names)(
        torch.zeros(1, 12, WIDTH), torch.tensor([12]), posteriors.log_softmax(-1)
    )
    assert hypothesis.text == "ab ba"
    assert hypothesis.frames == [1, 3, 5, 8, 11]
    assert hypothesis.word_frames == [(1, 4), (8, 12)]
    assert all(confidence > 0.9 for confidence in hypothesis.word_confidences)


def test_words_have_the_times_at_which_they_are_attended_to():
    class Reader(Parrot):
        def attention(self, tokens_BL, encoded_BTD, frames):
            starts = [0, 6, 12, 20, 27, 33, 40]  # of five tokens and the end
            weights = torch.full((1, 2, 6, 40), 0.01)
            for place, (first, end) in enumerate(itertools.pairwise(starts)):
                weights[:, 0, place, first:end] = 1.0
            return weights

    names = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    cfg = AttentionDecodeConfig(beam=1, tokens_per_frame=0.125)
    (hypothesis,) = AttentionSearch(cfg, Reader([2, 3, 1, 3, 2], size=4), names)(
        torch.zeros(1, 40, WIDTH), torch.tensor([40])
    )
    assert hypothesis.text == "ab ba"
    assert hypothesis.frames[0] == 0
    assert [abs(a - b) <= 1 for a, b in zip(hypothesis.frames, [0, 6, 12, 20, 27], strict=True)] == [True] * 5
    assert hypothesis.word_frames == [
        (hypothesis.frames[0], hypothesis.frames[2]),
        (hypothesis.frames[3], hypothesis.word_frames[1][1]),
    ]
    assert abs(hypothesis.word_frames[1][1] - 33) <= 1


def test_monotonic_path_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for tokens, frames in ((1, 4), (3, 3), (3, 7), (4, 6)):
        gains = rng.standard_normal((tokens, frames))
        paths = [
            np.repeat(np.arange(tokens), np.diff([0, *cuts, frames]))
            for cuts in itertools.combinations(range(1, frames), tokens - 1)
        ]
        best = max(paths, key=lambda path: gains[path, np.arange(frames)].sum())
        assert monotonic_path(gains).tolist() == best.tolist()


def test_fewer_frames_than_tokens_give_no_times():
    assert attended_frames(torch.full((1, 4, 3), 1 / 3)) == []
    assert attended_frames(torch.full((1, 2, 1), 1.0)) == []
    assert attended_frames(torch.full((2, 3, 3), 1 / 3)) == [(0, 1), (1, 2)]


def test_confidences_are_mean_probabilities_of_tokens():
    names, size = WordTokenizer(["<blank>", "one", "two", "three"]), 4
    net, (encoded, frames, _) = network(size), speech((6,), size, seed=4)
    names.suppressed_first = (0,)
    (hypothesis,) = AttentionSearch(AttentionDecodeConfig(beam=3), net, names)(encoded, frames)
    tokens = torch.tensor([[0, *hypothesis.tokens]])
    log_probs = net(tokens, encoded, frames)[0].detach()
    expected = [float(log_probs[place, token].exp()) for place, token in enumerate(hypothesis.tokens)]
    assert hypothesis.word_confidences == pytest.approx(expected, abs=1e-5)
    assert hypothesis.confidence == pytest.approx(sum(expected) / len(expected), abs=1e-5)


# --- bad input


def test_wrong_shapes_lengths_and_nan_are_refused(tmp_path):
    size = 4
    net, (encoded, frames, posteriors) = network(size), speech((5, 3), size)
    search = AttentionSearch(AttentionDecodeConfig(), net, tokenizer(size))
    for change, message in (
        ((encoded[:, :, :4], frames, posteriors), "encoder and what searches its frames must belong together"),
        ((encoded, torch.tensor([6, 3]), posteriors), "frames must be 2 numbers in 0 to 5"),
        ((encoded, frames[:1], posteriors), "frames must be 2 numbers in 0 to 5"),
        ((encoded, frames, posteriors[:, :, :3]), r"CTC posteriors must be \[2, 5, 4 tokens\]"),
        ((encoded.index_fill(1, torch.tensor([2]), float("nan")), frames, posteriors), "contains NaN"),
        ((encoded, frames, posteriors.index_fill(2, torch.tensor([2]), float("nan"))), "contains NaN"),
    ):
        with pytest.raises(DecodeError, match=message):
            search(*change)
    with torch.no_grad():
        net.layer_norm.weight.fill_(float("nan"))
    with pytest.raises(DecodeError, match="network's output contains NaN"):
        search(encoded, frames, posteriors)
    with pytest.raises(DecodeError, match="the model has no CTC: use auto"):
        AttentionSearch(AttentionDecodeConfig(times="ctc"), network(size), tokenizer(size))(encoded, frames)


def test_batch_without_frames_has_no_words():
    search = AttentionSearch(AttentionDecodeConfig(), network(4), tokenizer(4))
    assert [hypothesis.text for hypothesis in search(torch.zeros(2, 0, WIDTH), torch.tensor([0, 0]))] == ["", ""]
    assert search(torch.zeros(0, 5, WIDTH), torch.zeros(0, dtype=torch.long)) == []
