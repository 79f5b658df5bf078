"""Ranking hypotheses again with a language model that is a network."""

import numpy as np
import pytest
import torch
from support import load_beside, write_arpa

from recognition.bundle import BundleSpec, add_decoder, check_files, own_decoder, save_bundle
from speech.decoding import WordsConfig, build_decoder
from speech.decoding.nbest import WordPath
from speech.decoding.rescoring import Rescorer
from speech.features import LogMelConfig
from speech.lm import LmError, LmSpec, LstmConfig, read_network
from speech.lm.vocabulary import SPECIAL
from speech.models import ConformerConfig
from speech.tokens import CharacterTokenizer

words = load_beside(__file__, "test_words.py")
LETTERS = CharacterTokenizer(["<blank>", "▁", "a", "b"])
LISTED = ["aa", "b", "ab", "unseen"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in LISTED))
    torch.manual_seed(3)
    spec = LmSpec(network=LstmConfig(dim=6), words=(*SPECIAL, *LISTED[:-1]))
    network = spec.build_model()
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(3)  # probabilities that differ
    spec.save(folder, network.state_dict())
    return {
        "lm": write_arpa(folder / "small.arpa", words.UNIGRAMS, words.BIGRAMS),
        "rescore_lm": str(folder / "lm.safetensors"),
        "words": str(folder / "words.txt"),
    }


def hypothesis(score, *sentence):
    return WordPath(sentence, (), np.zeros(0, dtype=np.int64), score)


def log10_sentence(path, sentence):
    """Word by word."""
    model = read_network(path)
    state, total = model.start, 0.0
    for word in [*sentence, "</s>"]:
        state, log_prob = model.score(state, model.words.index(word))
        total += log_prob
    return total


def test_network_probability_replaces_the_first_models(files):
    paths = [hypothesis(-1.0, "aa"), hypothesis(-2.0, "b", "ab"), hypothesis(-3.0)]
    rescorer = Rescorer(files["lm"], files["rescore_lm"], LISTED)
    arpa = Rescorer(files["lm"], files["lm"], LISTED)
    assert [path.score for path in arpa(paths, 1.0, 2.0)] == [-1.0, -2.0, -3.0]
    gains = {}
    for path in rescorer(paths, 1.0, 2.0):
        before = next(other.score for other in paths if other.words == path.words)
        gains[path.words] = (path.score - before) / 2.0 - log10_sentence(files["rescore_lm"], path.words)
    first = {path.words: -words.log10_sentence(path.words) for path in paths}
    assert gains == pytest.approx(first, abs=1e-4)


def test_word_missing_in_the_network_is_an_unknown_word(files):
    path = files["rescore_lm"]
    assert log10_sentence(path, ["unseen", "b"]) == log10_sentence(path, ["unheard", "b"])
    (rescored,) = Rescorer(files["lm"], path, LISTED)([hypothesis(0.0, "unseen")], 1.0, 1.0)
    assert rescored.score == pytest.approx(
        log10_sentence(path, ["unheard"]) - words.log10_sentence(["unseen"]), abs=1e-4
    )


def test_bundle_includes_the_network(files, tmp_path):
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=8, cmvn="none"),
        stats=None,
        tokenizer=LETTERS.to_dict(),
        model=ConformerConfig(dim=16, layers=1, heads=2, kernel=5, channels=4),
    )
    save_bundle(tmp_path, spec, dict(spec.build_model().state_dict()))
    add_decoder(tmp_path, WordsConfig(**files, nbest=3))
    assert "rescore-lm.safetensors" in check_files(tmp_path)
    log_probs = words.posteriors(1, 6, 4, seed=1)
    own, given = (build_decoder(cfg, LETTERS) for cfg in (own_decoder(tmp_path), WordsConfig(**files, nbest=3)))
    assert own.decode(log_probs, torch.tensor([6])) == given.decode(log_probs, torch.tensor([6]))


def test_file_that_is_not_a_network_is_an_error(files, tmp_path):
    (tmp_path / "lm.safetensors").write_bytes(b"none")
    with pytest.raises(LmError, match="cannot be read as a language model"):
        Rescorer(files["lm"], str(tmp_path / "lm.safetensors"), LISTED)
