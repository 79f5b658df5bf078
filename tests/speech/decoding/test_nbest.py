"""n-best lists of searches for tokens, and of recordings that were cut into pieces."""

import itertools
import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import write_arpa

from recognition.alternatives import NOTHING, TimedAlternative, joined_alternatives, timed_alternatives
from speech.decoding import BeamConfig, DecodeError, GreedyConfig, TokensConfig, WordsConfig, build_decoder
from speech.decoding.nbest import WordPath, alternatives, merged_texts, posteriors, word_confidences
from speech.tokens import CharacterTokenizer
from speech.words import FrameTimes

LETTERS = CharacterTokenizer(["<blank>", "▁", "a", "b"])


def token_sequences(log_probs):
    """Log probability of every token sequence, all its alignments added up."""
    totals = {}
    frames = log_probs.tolist()
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        tokens = tuple(token for token, _ in itertools.groupby(path) if token)
        totals[tokens] = totals.get(tokens, 0.0) + math.exp(sum(map(operator.getitem, frames, path)))
    return totals


@given(seed=st.integers(0, 10_000), num_frames=st.integers(1, 5), nbest=st.sampled_from([2, 4, 400]))
@settings(max_examples=20)
def test_beam_search_texts_sum_posteriors_of_their_token_sequences(seed, num_frames, nbest):
    log_probs = torch.randn(1, num_frames, 4, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    cfg = BeamConfig(beam=5000, beam_threshold=1e4, nbest=nbest)
    (hypothesis,) = build_decoder(cfg, LETTERS).decode(log_probs, torch.tensor([num_frames]))
    best, totals = {}, {}
    for tokens, probability in token_sequences(log_probs[0].double()).items():
        text = LETTERS.decode(list(tokens))
        best[text] = max(best.get(text, 0.0), probability)
        totals[text] = totals.get(text, 0.0) + probability
    assert (
        len({alternative.text for alternative in hypothesis.nbest}) == len(hypothesis.nbest) == min(nbest, len(totals))
    )
    assert (hypothesis.nbest[0].text, hypothesis.nbest[0].score) == (hypothesis.text, hypothesis.score)
    assert [alternative.score for alternative in hypothesis.nbest] == sorted(
        (alternative.score for alternative in hypothesis.nbest), reverse=True
    )
    ranked = sorted(best.values(), reverse=True)
    for alternative, probability in zip(hypothesis.nbest, ranked, strict=False):
        assert math.exp(alternative.score) == pytest.approx(best[alternative.text], rel=1e-3)
        assert math.exp(alternative.score) == pytest.approx(probability, rel=1e-3)
        assert alternative.posterior == pytest.approx(totals[alternative.text], rel=1e-3)
    assert build_decoder(cfg.with_nbest(1), LETTERS).decode(log_probs, torch.tensor([num_frames]))[0].nbest == []


def test_search_with_token_language_model_gives_its_best_texts(tmp_path):
    unigrams = {"<unk>": (-2.0, None), "</s>": (-0.9, None), "<s>": (-99.0, -0.3)}
    lm = write_arpa(tmp_path / "lm.arpa", unigrams | {"a": (-0.5, 0), "b": (-0.6, 0), "▁": (-1, 0)}, {("a", "b"): -0.1})
    log_probs = torch.zeros(1, 4, 4).log_softmax(-1)
    (hypothesis,) = build_decoder(TokensConfig(lm=lm, nbest=3), LETTERS).decode(log_probs, torch.tensor([4]))
    assert len({alternative.text for alternative in hypothesis.nbest}) == 3
    assert hypothesis.nbest[0].text == hypothesis.text
    assert sum(alternative.posterior for alternative in hypothesis.nbest) <= 1 + 1e-6


@pytest.mark.parametrize("cfg", [BeamConfig(nbest=3), WordsConfig(words="x", nbest=3)])
def test_empty_utterance_has_no_alternatives(cfg, tmp_path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    cfg = cfg.with_files(lambda _: str(tmp_path / "words.txt"))
    (hypothesis,) = build_decoder(cfg, LETTERS).decode(torch.zeros(1, 3, 4), torch.tensor([0]))
    assert (hypothesis.text, hypothesis.nbest) == ("", [])
    assert timed_alternatives(hypothesis, FrameTimes(0.01)) == [NOTHING]


def test_number_of_hypotheses_is_set_for_decoders_with_nbest():
    assert BeamConfig(beam=3).with_nbest(5) == BeamConfig(beam=3, nbest=5)
    with pytest.raises(DecodeError, match=r"decode\.kind greedy finds one hypothesis .* register the model again"):
        GreedyConfig().with_nbest(2)
    with pytest.raises(DecodeError, match="must be 1 or more, not 0"):
        BeamConfig().with_nbest(0)


def path(text, score, *spans):
    return WordPath(tuple(text.split()), spans, torch.zeros(0).numpy(), score)


def test_words_of_every_hypothesis_have_times_and_posteriors():
    paths = [path("a b", -1.0, (0, 2), (3, 5)), path("a", -2.0, (1, 2)), path("b b", -3.0, (0, 2), (4, 6))]
    shares = posteriors([word_path.score for word_path in paths])
    first, second, third = alternatives(paths, shares, 3)
    assert first.word_frames == [(0, 2), (3, 5)]
    assert first.word_confidences == pytest.approx([shares[0] + shares[1], shares[0] + shares[2]])
    assert second.word_confidences == pytest.approx([shares[0] + shares[1]])
    assert third.word_confidences == pytest.approx([shares[2], shares[0] + shares[2]])
    assert first.word_confidences == word_confidences(paths, shares)
    assert alternatives(paths, shares, 1) == []
    (timed, *_) = timed_alternatives(hypothesis_of(first), FrameTimes(0.5, 10.0))
    assert [(word.word, word.start, word.duration) for word in timed.words] == [("a", 10.0, 1.0), ("b", 11.5, 1.0)]


def hypothesis_of(alternative):
    from speech.decoding import Hypothesis

    return Hypothesis(text=alternative.text, nbest=[alternative])


def test_token_sequences_of_one_text_are_one_hypothesis():
    merged = merged_texts(["a", "b", "a", "c"], [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], 2)
    assert [(alternative.text, alternative.posterior) for alternative in merged] == [
        ("a", pytest.approx(0.6)),
        ("b", pytest.approx(0.3)),
    ]
    assert merged_texts(["a"], [0.0], 1) == []


def random_lists(seed):
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for size in torch.randint(1, 5, (3,), generator=generator).tolist():
        scores = sorted((-3 * torch.rand(size, generator=generator)).tolist(), reverse=True)
        texts = [
            " ".join("ab"[int(n)] for n in torch.randint(0, 2, (k % 3,), generator=generator)) for k in range(size)
        ]
        shares = posteriors(scores)
        lists.append([TimedAlternative(*row) for row in zip(texts, scores, shares, strict=True)])
    return lists


@pytest.mark.parametrize("seed", range(10))
def test_hypotheses_of_a_recording_are_the_best_combinations_of_its_pieces(seed):
    lists = random_lists(seed)
    best, totals = {}, {}
    for chosen in itertools.product(*lists):
        text = " ".join(piece.text for piece in chosen if piece.text)
        best[text] = max(best.get(text, -math.inf), sum(piece.score for piece in chosen))
        totals[text] = totals.get(text, 0.0) + math.prod(piece.posterior for piece in chosen)
    everything = joined_alternatives(lists, 1000)
    assert {alternative.text: pytest.approx(alternative.score) for alternative in everything} == best
    assert {alternative.text: pytest.approx(alternative.posterior) for alternative in everything} == totals
    assert sum(alternative.posterior for alternative in everything) == pytest.approx(1.0)
    few = joined_alternatives(lists, 3)
    assert [alternative.score for alternative in few] == pytest.approx(sorted(best.values(), reverse=True)[:3])
    assert joined_alternatives([], 5) == [NOTHING]
