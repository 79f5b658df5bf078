"""Decoders: one suite for every kind, exactness of the beam search against all paths, and what each has of its own."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from speech.decoding import (
    BeamConfig,
    DecodeChoice,
    DecodeConfig,
    DecodeError,
    GreedyConfig,
    Hypothesis,
    build_decoder,
)
from speech.decoding.paths import collapse
from speech.tokens import CharacterTokenizer, TokenConfig, WordTokenizer, train_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def alphabet(size):
    """A tokenizer of `size` tokens: the blank, the space from three on, and letters or words."""
    if size > 20:
        return WordTokenizer(["<blank>", *(f"w{index}" for index in range(1, size))])
    space = ["▁"] if size > 2 else []
    return CharacterTokenizer(["<blank>", *space, *LETTERS][:size])


def posteriors(*shape, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * sharpness).log_softmax(-1)


def one_hot(path, size, probability=0.9):
    """Posteriors [1, T, size] that favour a path."""
    rest = (1 - probability) / (size - 1)
    frames = torch.full((1, len(path), size), rest)
    frames[0, torch.arange(len(path)), torch.tensor(path)] = probability
    return frames.log()


def spelled(path):
    return [token for token, _ in itertools.groupby(path) if token]


class DecoderSuite:
    """What every decoder does."""

    cfg: DecodeConfig

    def decode(self, log_probs, lengths, size=None):
        decoder = build_decoder(self.cfg, alphabet(size or log_probs.shape[2]))
        return decoder.decode(log_probs, torch.tensor(lengths))

    @pytest.mark.parametrize("path", [[1], [0], [0, 2, 2, 0, 2, 3], [3, 3, 3], [0, 0, 1, 2, 0], [2, 1, 2, 1]])
    def test_clear_posteriors_give_their_text(self, path):
        (hypothesis,) = self.decode(one_hot(path, 4), [len(path)])
        assert hypothesis.tokens == spelled(path)

    def test_text_is_that_of_the_tokens(self):
        (hypothesis,) = self.decode(one_hot([2, 3, 3, 0, 3, 1, 2], 4), [7])
        assert hypothesis.text == "abb a"
        assert hypothesis.tokens == [2, 3, 3, 1, 2]

    def test_frames_are_the_starts_of_tokens(self):
        (hypothesis,) = self.decode(one_hot([0, 2, 2, 0, 2, 3, 3, 0], 4), [8])
        assert hypothesis.frames == [1, 4, 5]

    @pytest.mark.parametrize("first", [1, 2, 3])
    def test_first_and_last_tokens_are_decoded(self, first):
        (hypothesis,) = self.decode(one_hot([first, first, 0, first], 4, 0.99), [4])
        assert hypothesis.tokens == [first, first]
        assert hypothesis.frames == [0, 3]

    @pytest.mark.parametrize("size", [2, 3, 5, 32, 500])
    @pytest.mark.parametrize("num_frames", [1, 2, 37])
    def test_hypotheses_are_consistent_for_any_size(self, size, num_frames):
        log_probs = posteriors(3, num_frames, size, seed=size)
        for hypothesis in self.decode(log_probs, [num_frames, num_frames // 2, 0]):
            assert len(hypothesis.tokens) == len(hypothesis.frames) <= num_frames
            assert all(0 < token < size for token in hypothesis.tokens)
            assert hypothesis.frames == sorted(set(hypothesis.frames))
            assert all(type(value) is int for value in hypothesis.tokens + hypothesis.frames)
            assert 0 <= hypothesis.confidence <= 1
            assert hypothesis.score <= 0

    def test_batch_equals_single_and_padding_is_never_read(self):
        log_probs, lengths = posteriors(6, 30, 9), [30, 0, 1, 17, 29, 5]
        padded = log_probs.clone()
        for row, length in enumerate(lengths):
            padded[row, length:] = float("nan")
        together = self.decode(padded, lengths)
        alone = [self.decode(log_probs[row : row + 1, :n], [n])[0] for row, n in enumerate(lengths)]
        assert together == alone

    def test_empty_utterance_gives_an_empty_hypothesis(self):
        assert self.decode(torch.zeros(2, 0, 5), [0, 0]) == [Hypothesis(), Hypothesis()]
        assert self.decode(posteriors(1, 9, 5), [0]) == [Hypothesis()]
        assert self.decode(torch.zeros(0, 9, 5), []) == []

    def test_silence_is_confident_when_the_blank_is(self):
        (hypothesis,) = self.decode(one_hot([0, 0, 0], 4, 0.8), [3])
        assert hypothesis.tokens == []
        assert hypothesis.text == ""
        assert hypothesis.confidence == pytest.approx(0.8)

    def test_confidence_is_the_mean_of_the_tokens_peaks(self):
        log_probs = torch.tensor([[[0.1, 0.2, 0.7], [0.05, 0.05, 0.9], [0.9, 0.05, 0.05], [0.2, 0.6, 0.2]]]).log()
        (hypothesis,) = self.decode(log_probs, [4])
        assert hypothesis.tokens == [2, 1]
        assert hypothesis.confidence == pytest.approx((0.9 + 0.6) / 2)

    def test_impossible_tokens_do_not_affect_the_result(self):
        log_probs = one_hot([2, 0, 3], 4)
        log_probs[:, :, 1] = -torch.inf
        (hypothesis,) = self.decode(log_probs, [3])
        assert hypothesis.tokens == [2, 3]
        assert np.isfinite(hypothesis.score)

    def test_half_precision_and_gradients_are_accepted(self):
        log_probs = one_hot([2, 0, 3], 4)
        assert self.decode(log_probs.bfloat16(), [3])[0].tokens == [2, 3]
        assert self.decode(log_probs.requires_grad_(), [3])[0].tokens == [2, 3]

    def test_decoder_can_be_pickled(self):
        decoder = build_decoder(self.cfg, alphabet(5))
        log_probs, lengths = posteriors(2, 12, 5), torch.tensor([12, 7])
        hypotheses = decoder.decode(log_probs, lengths)
        assert pickle.loads(pickle.dumps(decoder)).decode(log_probs, lengths) == hypotheses

    @pytest.mark.parametrize(
        ("shape", "lengths", "message"),
        [
            ((2, 5, 6), [5, 5], "model and the tokenizer"),
            ((5, 4), [5], "batch, frames"),
            ((2, 5, 4), [5], "lengths"),
            ((1, 5, 4), [6], "lengths"),
            ((1, 5, 4), [-1], "lengths"),
        ],
    )
    def test_wrong_shapes_are_refused(self, shape, lengths, message):
        with pytest.raises(DecodeError, match=message):
            self.decode(torch.zeros(shape), lengths, size=4)

    def test_nan_is_refused(self):
        log_probs = posteriors(1, 5, 4)
        log_probs[0, 2, 1] = float("nan")
        with pytest.raises(DecodeError, match="NaN"):
            self.decode(log_probs, [5])
        assert len(self.decode(log_probs, [2])) == 1

    def test_decoding_is_deterministic(self):
        log_probs = posteriors(2, 40, 12)
        assert self.decode(log_probs, [40, 31]) == self.decode(log_probs, [40, 31])


class TestGreedy(DecoderSuite):
    cfg = GreedyConfig()

    @given(seed=st.integers(0, 10_000), size=st.integers(2, 6), num_frames=st.integers(1, 12))
    @settings(max_examples=60)
    def test_greedy_decoding_gives_the_best_path(self, seed, size, num_frames):
        log_probs = posteriors(1, num_frames, size, seed=seed)
        (hypothesis,) = self.decode(log_probs, [num_frames])
        assert hypothesis.tokens == spelled(log_probs[0].argmax(-1).tolist())
        assert hypothesis.score == pytest.approx(float(log_probs[0].max(-1).values.sum()), abs=1e-4)


class TestBeam(DecoderSuite):
    cfg = BeamConfig()


class TestNarrowBeam(DecoderSuite):
    cfg = BeamConfig(beam=4, beam_tokens=3, beam_threshold=10.0)


def all_sequences(log_probs):
    """The log probability of every token sequence, by adding up every path."""
    num_frames, size = log_probs.shape
    totals = {}
    for path in itertools.product(range(size), repeat=num_frames):
        sequence = tuple(spelled(path))
        score = sum(log_probs[frame, token] for frame, token in enumerate(path))
        totals[sequence] = np.logaddexp(totals.get(sequence, -np.inf), score)
    return totals


@given(
    seed=st.integers(0, 100_000),
    shape=st.sampled_from([(1, 2), (2, 2), (3, 2), (5, 2), (8, 2), (3, 3), (5, 3), (6, 3), (4, 4), (5, 4), (4, 5)]),
    sharpness=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
)
@settings(max_examples=120)
def test_wide_beam_equals_search_over_all_paths(seed, shape, sharpness):
    log_probs = posteriors(1, *shape, seed=seed, sharpness=sharpness)
    decoder = build_decoder(BeamConfig(beam=2000, beam_threshold=1e4), alphabet(shape[1]))
    (hypothesis,) = decoder.decode(log_probs, torch.tensor([shape[0]]))
    totals = all_sequences(log_probs[0].double().numpy())
    best = max(totals, key=totals.get)
    # Two sequences may be equally good to within float32.
    assert totals[tuple(hypothesis.tokens)] == pytest.approx(totals[best], abs=1e-5)
    assert hypothesis.score == pytest.approx(totals[best], abs=1e-4)


@given(seed=st.integers(0, 100_000))
@settings(max_examples=20)
def test_score_approaches_the_ctc_likelihood_of_its_tokens(seed):
    log_probs = posteriors(1, 20, 5, seed=seed, sharpness=4.0)
    decoder = build_decoder(BeamConfig(beam=1000, beam_threshold=200.0), alphabet(5))
    (hypothesis,) = decoder.decode(log_probs, torch.tensor([20]))
    lengths, targets = torch.tensor([20]), torch.tensor([hypothesis.tokens])
    loss = torch.nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, lengths, torch.tensor([len(hypothesis.tokens)]), reduction="sum"
    )
    # Alignments that were pruned on the way are missing from the sum: it can only be smaller, and little.
    assert -float(loss) - 0.2 < hypothesis.score < -float(loss) + 1e-4


def test_beam_sums_alignments_unlike_greedy():
    # The blank wins each frame, yet "a" wins over silence: 0.4 · 0.4 + 2 · 0.4 · 0.6 against 0.6 · 0.6.
    log_probs = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    lengths = torch.tensor([2])
    (greedy,) = build_decoder(GreedyConfig(), alphabet(2)).decode(log_probs, lengths)
    (beam,) = build_decoder(BeamConfig(), alphabet(2)).decode(log_probs, lengths)
    assert greedy.tokens == []
    assert beam.tokens == [1]
    assert beam.score == pytest.approx(np.log(0.64), abs=1e-6)


def test_wider_beam_is_never_less_probable():
    log_probs, lengths = posteriors(4, 60, 20, sharpness=1.0), torch.tensor([60] * 4)
    scores = [
        [h.score for h in build_decoder(BeamConfig(beam=beam), alphabet(20)).decode(log_probs, lengths)]
        for beam in (1, 8, 64)
    ]
    assert np.all(np.diff(scores, axis=0) >= -1e-6)


def test_bpe_hypothesis_is_plain_text():
    tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=40), ["turn the lights on", "turn the lights off"])
    path = [token for unit in tokenizer.encode("turn the lights on") for token in (unit, unit, 0)]
    for cfg in (GreedyConfig(), BeamConfig()):
        decoder = build_decoder(cfg, tokenizer)
        (hypothesis,) = decoder.decode(one_hot(path, tokenizer.size), torch.tensor([len(path)]))
        assert hypothesis.text == "turn the lights on"


def test_long_utterance_is_decoded():
    tokenizer = alphabet(5)
    log_probs = posteriors(1, 20_000, 5, sharpness=4.0)
    decoder = build_decoder(BeamConfig(beam=2), tokenizer)
    assert len(decoder.decode(log_probs, torch.tensor([20_000]))[0].tokens) > 5000


@given(path=st.lists(st.integers(0, 3), min_size=6, max_size=30))
@settings(max_examples=60)
def test_collapse_removes_repeats_and_blanks(path):
    posterior = np.linspace(0.1, 0.9, len(path))
    tokens, frames, peaks = collapse(np.array(path), posterior, 0)
    assert tokens == spelled(path)
    assert [path[frame] for frame in frames] == tokens
    ends = [frame + len(list(itertools.takewhile(lambda t, f=frame: t == path[f], path[frame:]))) for frame in frames]
    # The posteriors rise, so the peak of a token is in its last frame.
    assert peaks == [posterior[end - 1] for end in ends]


def test_hypothesis_is_a_json_value():
    value = Hypothesis([1], "a", -0.5, [3], 0.9).to_dict()
    assert value == {
        **{"tokens": [1], "text": "a", "score": -0.5, "frames": [3], "confidence": 0.9},
        **{"word_confidences": [], "nbest": [], "word_frames": [], "language": ""},
    }


@pytest.mark.parametrize("wrong", [{"kind": "best"}, {"beam": 0}, {"beam_tokens": -1}, {"beam_threshold": 0}, {"b": 1}])
def test_config_refuses_impossible_values(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(DecodeChoice).validate_python({"kind": "beam"} | wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("cfg", [GreedyConfig(), BeamConfig()])
def test_gpu_equals_cpu(cfg):
    if cfg.kind == "beam":
        pytest.importorskip("flashlight.lib.text")
    decoder = build_decoder(cfg, alphabet(12))
    log_probs, lengths = posteriors(4, 50, 12), torch.tensor([50, 20, 0, 1])
    assert decoder.decode(log_probs.cuda(), lengths.cuda()) == decoder.decode(log_probs, lengths)
