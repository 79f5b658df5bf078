"""Ranking hypotheses again with a second language model equals searching with it."""

import itertools

import pytest
import torch
from support import frame_recognizer, load_beside, write_arpa

from recognition.bundle import BundleSpec, add_decoder, check_files, own_decoder, save_bundle
from recognition.decoder_tuning import DecoderTrials
from recognition.systems.acoustic import Scores
from speech.decoding import WordsConfig, build_decoder
from speech.decoding.nbest import WordPath
from speech.decoding.rescoring import Rescorer
from speech.features import LogMelConfig
from speech.lm import LmError
from speech.models import ConformerConfig
from speech.tokens import CharacterTokenizer

words = load_beside(__file__, "test_words.py")
WIDE, UNIGRAMS, BIGRAMS, log10_sentence = words.WIDE, words.UNIGRAMS, words.BIGRAMS, words.log10_sentence
LETTERS = CharacterTokenizer(["<blank>", "▁", "a", "b"])
SECOND = UNIGRAMS | {"ab": (-0.2, -0.1), "b": (-1.9, -0.3), "a": (-1.0, 0.0)}
SECOND_PAIRS = {("<s>", "b"): -0.1, ("a", "</s>"): -0.05, ("b", "b"): -0.2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.txt").write_text("aa\nb\nab\nunseen\na\nbb\n")
    return {
        "lm": write_arpa(folder / "small.arpa", UNIGRAMS, BIGRAMS),
        "rescore_lm": write_arpa(folder / "large.arpa", SECOND, SECOND_PAIRS),
        "words": str(folder / "words.txt"),
    }


def decoded(cfg, log_probs):
    (hypothesis,) = build_decoder(cfg, LETTERS).decode(log_probs, torch.tensor([log_probs.shape[1]]))
    return hypothesis


@pytest.mark.parametrize("seed", range(5))
def test_second_model_alone_ranks_like_a_search_with_it(files, seed):
    log_probs = words.posteriors(1, 6, 4, seed=seed)
    common = {**WIDE, "lm_weight": 1.7, "word_score": 0.3, "nbest": 1000}
    hypothesis = decoded(WordsConfig(**files, **common, rescore_nbest=100_000), log_probs)
    wanted = decoded(WordsConfig(lm=files["rescore_lm"], words=files["words"], **common), log_probs)
    first = decoded(WordsConfig(lm=files["lm"], words=files["words"], **common), log_probs)
    assert hypothesis.text == wanted.text
    assert hypothesis.score == pytest.approx(wanted.score, abs=1e-3)
    assert hypothesis.word_confidences == pytest.approx(wanted.word_confidences, abs=1e-3)
    assert {alternative.text: alternative.score for alternative in hypothesis.nbest} == pytest.approx(
        {alternative.text: alternative.score for alternative in wanted.nbest}, abs=1e-3
    )
    assert [alternative.score for alternative in hypothesis.nbest] == sorted(
        (alternative.score for alternative in hypothesis.nbest), reverse=True
    )
    assert [alternative.text for alternative in first.nbest] != [alternative.text for alternative in hypothesis.nbest]


def test_weight_is_the_second_models_share(files):
    log_probs = words.posteriors(1, 6, 4, seed=2)
    common = {**files, **WIDE, "lm_weight": 2.0, "nbest": 50}
    scores = {
        weight: {
            alternative.text: alternative.score
            for alternative in decoded(WordsConfig(**common, rescore_weight=weight), log_probs).nbest
        }
        for weight in (0.0, 0.25, 1.0)
    }
    without = decoded(WordsConfig(**common | {"rescore_lm": ""}), log_probs)
    assert scores[0.0] == {alternative.text: alternative.score for alternative in without.nbest}
    for text in scores[0.0].keys() & scores[0.25].keys() & scores[1.0].keys():
        assert scores[0.25][text] == pytest.approx(0.75 * scores[0.0][text] + 0.25 * scores[1.0][text], abs=1e-4)


def test_without_a_first_model_the_second_is_added(files):
    log_probs = words.posteriors(1, 5, 4, seed=3)
    common = {"words": files["words"], **WIDE, "lm_weight": 1.3}
    hypothesis = decoded(WordsConfig(**common, rescore_lm=files["rescore_lm"], rescore_nbest=100_000), log_probs)
    wanted = decoded(WordsConfig(**common, lm=files["rescore_lm"]), log_probs)
    assert (hypothesis.text, hypothesis.score) == (wanted.text, pytest.approx(wanted.score, abs=1e-3))


def test_only_the_configured_number_of_hypotheses_is_rescored(files):
    log_probs = words.posteriors(1, 6, 4, seed=1)
    first = decoded(WordsConfig(lm=files["lm"], words=files["words"], **WIDE), log_probs)
    hypothesis = decoded(WordsConfig(**files, **WIDE, rescore_nbest=1), log_probs)
    assert hypothesis.text == first.text
    assert decoded(WordsConfig(**files, **WIDE, rescore_nbest=1, nbest=4), log_probs).nbest[3:]


def test_scores_change_by_the_models_probabilities(files):
    listed = ["aa", "b", "ab", "unseen", "a", "bb"]
    rescorer = Rescorer(files["lm"], files["rescore_lm"], listed)
    sentences = [(), ("b", "b"), ("ab", "unseen"), *itertools.product(listed, repeat=2)]
    paths = rescorer([WordPath(sentence, (), torch.zeros(0).numpy(), 0.0) for sentence in sentences], 0.5, 3.0)
    for path in paths:
        gain = log10_sentence(path.words, SECOND, SECOND_PAIRS) - log10_sentence(path.words)
        assert path.score == pytest.approx(1.5 * gain, abs=1e-4)
    assert {path.words for path in paths} == set(sentences)


def test_file_that_is_not_a_model_is_named(files, tmp_path):
    (tmp_path / "large.arpa").write_text("hello\n")
    for name, message in (("none.arpa", "there is no language model .*none.arpa"), ("large.arpa", "no language model")):
        cfg = WordsConfig(**files | {"rescore_lm": str(tmp_path / name)})
        with pytest.raises(LmError, match=message):
            decoded(cfg, words.posteriors(1, 3, 4))


def test_weights_are_tuned_like_other_parameters(files):
    recognizer = frame_recognizer(WordsConfig(**files), LETTERS)
    scored = [(["a", "ab b"], Scores(words.posteriors(2, 9, 4), torch.tensor([9, 7]), torch.zeros(2)))]
    weights = (0.0, 1.0, 3.0)
    with DecoderTrials(recognizer, scored) as trials:
        counts = [trials.errors({"rescore_weight": weight}) for weight in weights]
    assert len(set(counts)) > 1
    other = recognizer.with_decoder(WordsConfig(**files, rescore_weight=0.5))
    assert other.decoder._rescorer is recognizer.decoder._rescorer
    for weight, tuned in zip(weights, counts, strict=True):
        configured = frame_recognizer(WordsConfig(**files, rescore_weight=weight), LETTERS)
        assert DecoderTrials(configured, scored).errors({}) == tuned


def test_bundle_includes_the_second_model(files, tmp_path):
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=LETTERS.to_dict(),
        model=ConformerConfig(dim=8, layers=1, heads=2, kernel=3, channels=2),
    )
    save_bundle(tmp_path / "model", spec, dict(spec.build_model().state_dict()))
    add_decoder(tmp_path / "model", WordsConfig(**files))
    assert sorted(check_files(tmp_path / "model")) == ["lm.arpa", "model.safetensors", "rescore-lm.arpa", "words.txt"]
    log_probs = words.posteriors(1, 6, 4, seed=4)
    assert decoded(own_decoder(tmp_path / "model"), log_probs) == decoded(WordsConfig(**files), log_probs)
