"""Search with a transducer: exactness against all alignments, language models, n-best, times, bad input."""

import itertools
import math

import pytest
import torch
from support import load_beside

from speech.decoding import DecodeError, TransducerDecodeConfig, TransducerSearch
from speech.models import ConformerConfig, LstmPredictorConfig, StatelessPredictorConfig, build_model
from speech.models.networks.transducer import Transducer
from speech.tokens import CharacterTokenizer, WordTokenizer

attention = load_beside(__file__, "test_attention_search.py")
language_model, tokenizer, texts = attention.language_model, attention.tokenizer, attention.texts
ALL = {"beam": 10**6, "beam_tokens": 0, "times": "none"}
PREDICTORS = {"stateless": StatelessPredictorConfig(dim=6, context=2), "lstm": LstmPredictorConfig(dim=6, layers=2)}


def network(size, seed=0, predictor="lstm", sharpness=4.0):
    """A random transducer whose outputs are not nearly uniform."""
    torch.manual_seed(seed)
    encoder = build_model(ConformerConfig(**ConformerConfig.tiny), 8, size)
    made = Transducer(encoder, PREDICTORS[predictor], 10, size, ctc=True).eval()
    with torch.no_grad():
        made.joiner.output.weight.mul_(sharpness)
        made.predictor.embedding.weight.mul_(2)
    return made


def speech(counts, net, seed=0):
    """Encoded frames, their numbers, and posteriors by CTC."""
    generator = torch.Generator().manual_seed(seed)
    encoded = 2 * torch.randn(len(counts), max(counts), net.width, generator=generator)
    return encoded, torch.tensor(counts), net.posteriors(encoded).detach()


def steps(net, encoded, text):
    """Log probabilities [frames, tokens + 1, vocabulary]."""
    with torch.no_grad():
        vectors = net.joiner.predictor(net.predictor(torch.tensor([[0, *text]])))[0]
        return net.joiner(net.joiner.encoder(encoded)[:, None], vectors[None]).double().log_softmax(-1)


def by_alignments(net, encoded, text):
    """Log probability of a text: the sum over all choices of the frames in which one token each is said."""
    log_probs, ways = steps(net, encoded, text), []
    for spoken in itertools.combinations(range(len(encoded)), len(text)):
        place, way = 0, 0.0
        for frame in range(len(encoded)):
            token = text[place] if frame in spoken else 0
            way += float(log_probs[frame, place, token])
            place += frame in spoken
        ways.append(way)
    return float(torch.logsumexp(torch.tensor(ways, dtype=torch.double), 0))


def letters(text):
    return "".join(" abcdefgh"[token] for token in text)


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@pytest.mark.parametrize("bonus", [0.0, 0.7])
def test_unlimited_beam_finds_the_sum_over_all_alignments_of_all_texts(predictor, bonus):
    size, counts = 3, (5, 2, 4, 1)
    net = network(size, predictor=predictor)
    encoded, frames, _ = speech(counts, net)
    cfg = TransducerDecodeConfig(**ALL, length_bonus=bonus, nbest=500)
    hypotheses = TransducerSearch(cfg, net, tokenizer(size))(encoded, frames)
    for row, count in enumerate(counts):
        expected = {
            letters(text): by_alignments(net, encoded[row, :count], text) + bonus * len(text)
            for text in texts(size, count)
        }
        assert {option.text: option.score for option in hypotheses[row].nbest} == pytest.approx(expected, abs=1e-4)
        assert hypotheses[row].text == max(expected, key=expected.get)
        assert hypotheses[row].score == pytest.approx(max(expected.values()), abs=1e-4)
        assert bonus or sum(map(math.exp, expected.values())) == pytest.approx(1)


@pytest.mark.parametrize("weight", [0.0, 1.7])
def test_language_model_is_added_by_weight(language_model, weight):
    path, lm = language_model
    size, counts = 3, (4, 2)
    net = network(size)
    encoded, frames, _ = speech(counts, net)
    cfg = TransducerDecodeConfig(**ALL, lm=path, lm_weight=weight, nbest=500)
    hypotheses = TransducerSearch(cfg, net, tokenizer(size))(encoded, frames)
    for row, count in enumerate(counts):
        expected = {
            letters(text): by_alignments(net, encoded[row, :count], text) + weight * sum(lm.sentence(letters(text)))
            for text in texts(size, count)
        }
        assert {option.text: option.score for option in hypotheses[row].nbest} == pytest.approx(expected, abs=1e-4)


def test_language_model_is_not_asked_for_what_cannot_become_one_of_the_best(language_model):
    """The result is that of a search that asks it for everything."""
    path, _ = language_model
    size, counts = 3, (30,) * 6
    net = network(size)
    encoded, frames, _ = speech(counts, net)
    found, asked = [], []
    for way in (TransducerSearch, Thorough):
        search = way(
            TransducerDecodeConfig(beam=3, lm=path, lm_weight=1.0, nbest=3, times="none"), net, tokenizer(size)
        )
        search.prepare()
        real, count = search._lm.scores, []
        search._lm.scores = lambda states, tokens, real=real, count=count: (
            count.append(tokens.numel()) or real(states, tokens)
        )
        found.append([(hypothesis.text, pytest.approx(hypothesis.score)) for hypothesis in search(encoded, frames)])
        asked.append(sum(count))
    assert found[0] == found[1]
    assert asked[0] < asked[1]


class Thorough(TransducerSearch):
    """Asks the language model for all moves."""

    def _may_count(self, moves, stay, same):
        return moves.isfinite()


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
def test_beam_of_one_takes_the_best_output_of_each_frame(predictor):
    size, counts = 6, (9, 4, 7)
    net = network(size, predictor=predictor)
    encoded, frames, _ = speech(counts, net)
    cfg = TransducerDecodeConfig(beam=1, times="transducer")
    hypotheses = TransducerSearch(cfg, net, tokenizer(size))(encoded, frames)
    assert any(hypothesis.tokens for hypothesis in hypotheses)
    for row, count in enumerate(counts):
        tokens, spoken, score = [], [], 0.0
        for frame in range(count):
            log_probs = steps(net, encoded[row, :count], tokens)[frame, -1]
            best = int(log_probs.argmax())
            score += float(log_probs[best])
            if best:
                tokens, spoken = [*tokens, best], [*spoken, frame]
        assert (hypotheses[row].tokens, hypotheses[row].frames) == (tokens, spoken)
        assert hypotheses[row].score == pytest.approx(score, abs=1e-4)


def test_wide_beam_finds_better_texts_than_a_narrow_one():
    size = 6
    net = network(size, sharpness=2.0)
    encoded, frames, _ = speech((12,) * 6, net)
    narrow, wide = (
        TransducerSearch(TransducerDecodeConfig(beam=beam, beam_tokens=0, times="none"), net, tokenizer(size))(
            encoded, frames
        )
        for beam in (2, 64)
    )
    assert all(few.score <= many.score + 1e-6 for few, many in zip(narrow, wide, strict=True))
    assert sum(few.score < many.score - 0.1 for few, many in zip(narrow, wide, strict=True)) > 1


@pytest.mark.parametrize("fields", [{}, {"beam": 1}, {"nbest": 3, "length_bonus": 0.4, "times": "transducer"}])
@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
def test_result_depends_neither_on_the_batch_nor_on_padding(fields, predictor):
    size, counts = 6, [11, 0, 4, 17, 1, 11]
    net = network(size, predictor=predictor)
    encoded, frames, posteriors = speech(counts, net)
    search = TransducerSearch(TransducerDecodeConfig(**fields), net, tokenizer(size))
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
        assert alone.word_confidences == pytest.approx(together[row].word_confidences, abs=1e-4)


class Told(Transducer):
    """Says given tokens in given frames, surely, whatever it hears."""

    def __init__(self, spoken, size):
        super().__init__(
            build_model(ConformerConfig(**ConformerConfig.tiny), 8, size), PREDICTORS["lstm"], 4, size, True
        )
        self.spoken, self.size = spoken, size
        self.joiner.encoder.forward = lambda encoded: encoded[..., :1]
        self.joiner.forward = self.joined

    def joined(self, encoded, predicted):
        frame = int(encoded.flatten()[0])
        scores = torch.full((*predicted.shape[:-1], self.size), -12.0)
        scores[..., self.spoken.get(frame, 0)] = 0.0
        return scores


def told(spoken, count, names, **fields):
    net = Told(spoken, names.size).eval()
    encoded = torch.arange(count)[None, :, None].expand(1, count, net.width).float()
    return TransducerSearch(TransducerDecodeConfig(**fields), net, names), encoded, torch.tensor([count])


@pytest.mark.parametrize("beam", [1, 4])
def test_words_have_the_frames_in_which_their_tokens_are_said(beam):
    names = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    search, *heard = told({2: 2, 3: 3, 6: 1, 8: 3, 11: 2}, 14, names, beam=beam)
    (hypothesis,) = search(*heard)
    assert hypothesis.text == "ab ba"
    assert hypothesis.frames == [2, 3, 6, 8, 11]
    assert hypothesis.word_frames == [(2, 4), (8, 12)]
    assert all(confidence > 0.99 for confidence in hypothesis.word_confidences)


def test_words_have_the_times_of_their_best_path_by_ctc_if_there_is_one():
    names = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    path = [0, 2, 2, 3, 0, 1, 1, 0, 3, 0, 0, 2]
    posteriors = torch.full((1, 12, 4), -9.0)
    posteriors[0, torch.arange(12), torch.tensor(path)] = 0.0
    for times, expected in (("auto", [(1, 4), (8, 12)]), ("ctc", [(1, 4), (8, 12)]), ("transducer", [(3, 6), (9, 12)])):
        search, *heard = told({3: 2, 5: 3, 7: 1, 9: 3, 11: 2}, 12, names, beam=1, times=times)
        (hypothesis,) = search(*heard, posteriors.log_softmax(-1))
        assert hypothesis.word_frames == expected
    search, *heard = told({3: 2}, 12, names, times="none")
    assert not search(*heard)[0].frames


def test_time_of_a_token_is_that_of_the_best_alignment():
    """Whose last token is said later than in the hypothesis that had it first."""
    names = CharacterTokenizer(["<blank>", "a"])
    net = Told({}, 2).eval()
    shares = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.99, 0.01]]).log()

    def joined(encoded, predicted):
        return shares[int(encoded.flatten()[0])].expand(*predicted.shape[:-1], 2)

    net.joiner.forward = joined
    encoded = torch.arange(3)[None, :, None].expand(1, 3, net.width).float()
    cfg = TransducerDecodeConfig(nbest=9, beam=9)
    (hypothesis,) = TransducerSearch(cfg, net, names)(encoded, torch.tensor([3]))
    scores = {option.text: math.exp(option.score) for option in hypothesis.nbest}
    assert scores["a"] == pytest.approx(0.4 * 0.2 * 0.99 + 0.6 * 0.8 * 0.99 + 0.6 * 0.2 * 0.01)
    assert (hypothesis.text, hypothesis.frames) == ("a", [1])
    assert hypothesis.confidence == pytest.approx(0.8)


def test_confidence_without_words_is_that_of_silence():
    search, *heard = told({}, 5, WordTokenizer(["<blank>", "one", "two"]))
    (hypothesis,) = search(*heard)
    assert (hypothesis.text, hypothesis.word_confidences) == ("", [])
    assert hypothesis.confidence == pytest.approx(1.0, abs=1e-4)


def test_search_shares_its_language_model_with_one_of_other_parameters(language_model):
    cfg, net = TransducerDecodeConfig(lm=language_model[0]), network(3)
    search = TransducerSearch(cfg, net, tokenizer(3))
    search.prepare()
    other = search.with_config(cfg.model_copy(update={"lm_weight": 0.0}))
    assert other._lm is search._lm
    assert search.with_config(cfg.model_copy(update={"lm": ""}))._lm is None


def test_wrong_shapes_and_nan_are_refused():
    size = 4
    net = network(size)
    encoded, frames, posteriors = speech((5, 3), net)
    search = TransducerSearch(TransducerDecodeConfig(), net, tokenizer(size))
    for change, message in (
        ((encoded[:, :, :4], frames, posteriors), "encoder and what searches its frames must belong together"),
        ((encoded, torch.tensor([6, 3]), posteriors), "frames must be 2 numbers in 0 to 5"),
        ((encoded.index_fill(1, torch.tensor([2]), float("nan")), frames, posteriors), "contains NaN"),
    ):
        with pytest.raises(DecodeError, match=message):
            search(*change)
    with torch.no_grad():
        net.joiner.output.bias.fill_(float("nan"))
    with pytest.raises(DecodeError, match="network's output contains NaN"):
        search(encoded, frames, posteriors)
    with pytest.raises(DecodeError, match="the model has no CTC: use auto"):
        TransducerSearch(TransducerDecodeConfig(times="ctc"), net, tokenizer(size))(encoded, frames)


def test_batch_without_frames_has_no_words():
    net = network(4)
    search = TransducerSearch(TransducerDecodeConfig(), net, tokenizer(4))
    assert [hypothesis.text for hypothesis in search(torch.zeros(2, 0, net.width), torch.tensor([0, 0]))] == ["", ""]
    assert search(torch.zeros(0, 5, net.width), torch.zeros(0, dtype=torch.long)) == []
