"""What every decoder of posteriors does: a new one is tested by being registered."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from support import load_beside

from recognition.systems import SYSTEMS
from speech.decoding import DECODERS, DecodeError, build_decoder
from speech.hmm.priors import StateOutputs, log_priors
from speech.tokens import WordTokenizer

toys = load_beside(__file__, "../hmm/toys.py")
TOKENIZER = WordTokenizer(["<blank>", *toys.LEXICON])
LENGTHS = [30, 0, 17, 12, 30, 8]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """An HMM, and the files that decoders may name by their fields."""
    folder = tmp_path_factory.mktemp("decoders")
    rng = np.random.default_rng(3)
    model = toys.random_model(rng, toys.context_tree(rng))
    model.save(folder / "hmm")
    (folder / "lexicon.txt").write_text(
        "".join(f"{word} {' '.join(phones)}\n" for word, several in toys.LEXICON.items() for phones in several)
    )
    (folder / "lm.arpa").write_text(toys.arpa())
    files = {"hmm": folder / "hmm" / "model.json", "lexicon": folder / "lexicon.txt", "lm": folder / "lm.arpa"}
    return model, {name: str(path) for name, path in files.items()}


@pytest.fixture(params=[*SYSTEMS["ctc"].decoders, *SYSTEMS["hybrid"].decoders])
def decoder(request, sources):
    """A decoder with the language model, and the HMMs if it reads states; tokens are words."""
    model, files = sources
    kind = DECODERS[request.param]
    cfg = kind(**{name: path for name, path in files.items() if name in kind.file_fields})
    of_states = request.param in SYSTEMS["hybrid"].decoders
    priors = StateOutputs(log_priors(np.arange(1, model.gmm.num_pdfs + 1)))
    return build_decoder(cfg, TOKENIZER, priors if of_states else None)


def posteriors(decoder, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), max(lengths, default=0), decoder.num_outputs, generator=generator)
    return (12 * scores).log_softmax(-1)


def decode(decoder, log_probs, lengths):
    return decoder.decode(log_probs, torch.tensor(lengths))


def test_every_decoder_belongs_to_a_system():
    assert {kind for system in SYSTEMS.values() for kind in system.decoders} == set(DECODERS)


def test_registered_name_is_that_of_the_configuration(decoder):
    assert DECODERS[decoder.cfg.kind] is type(decoder.cfg)
    assert decoder.cfg.lacking() == ""


def test_hypotheses_have_known_words_and_valid_confidences(decoder):
    hypotheses = decode(decoder, posteriors(decoder, LENGTHS), LENGTHS)
    assert len(hypotheses) == len(LENGTHS)
    assert any(hypothesis.text for hypothesis in hypotheses)
    for hypothesis, length in zip(hypotheses, LENGTHS, strict=True):
        words = hypothesis.text.split()
        assert set(words) <= set(toys.LEXICON)
        assert hypothesis.text == " ".join(words)
        assert np.isfinite(hypothesis.score)
        assert all(0 <= confidence <= 1 for confidence in [hypothesis.confidence, *hypothesis.word_confidences])
        assert all(0 <= start <= end <= length for start, end in hypothesis.word_frames)
        assert all(before <= after for (_, before), (after, _) in pairwise(hypothesis.word_frames))
        assert {len(hypothesis.word_frames), len(hypothesis.word_confidences)} <= {0, len(words)}


def test_result_depends_neither_on_the_batch_nor_on_padding(decoder):
    log_probs = posteriors(decoder, LENGTHS)
    padded = log_probs.clone()
    for row, length in enumerate(LENGTHS):
        padded[row, length:] = float("nan")
    alone = [decode(decoder, log_probs[row : row + 1, :n], [n])[0] for row, n in enumerate(LENGTHS)]
    assert decode(decoder, padded, LENGTHS) == alone


def test_utterances_without_frames_have_no_words(decoder):
    for lengths, frames in (([0, 0], 0), ([0], 9), ([], 9)):
        hypotheses = decode(decoder, torch.zeros(len(lengths), frames, decoder.num_outputs), lengths)
        assert [(hypothesis.text, hypothesis.tokens, hypothesis.word_frames) for hypothesis in hypotheses] == [
            ("", [], [])
        ] * len(lengths)


@pytest.mark.parametrize(
    ("frames", "extra", "lengths", "message"),
    [
        (5, 1, [5], "model and the tokenizer must belong together"),
        (5, 0, [5, 5], "lengths must be 1 numbers in 0 to 5"),
        (5, 0, [6], "lengths must be 1 numbers in 0 to 5"),
        (5, 0, [-1], "lengths must be 1 numbers in 0 to 5"),
    ],
)
def test_wrong_shapes_and_lengths_are_refused(decoder, frames, extra, lengths, message):
    with pytest.raises(DecodeError, match=message):
        decode(decoder, torch.zeros(1, frames, decoder.num_outputs + extra), lengths)


def test_nan_is_refused(decoder):
    log_probs = posteriors(decoder, [9])
    log_probs[0, 4, 1] = float("nan")
    with pytest.raises(DecodeError, match="NaN"):
        decode(decoder, log_probs, [9])


def test_another_process_and_a_copy_with_the_same_parameters_find_the_same(decoder):
    log_probs = posteriors(decoder, LENGTHS, seed=1)
    hypotheses = decode(decoder, log_probs, LENGTHS)
    assert decode(pickle.loads(pickle.dumps(decoder)), log_probs, LENGTHS) == hypotheses
    assert decode(decoder.with_config(decoder.cfg), log_probs, LENGTHS) == hypotheses


def test_several_hypotheses_are_sorted_and_the_first_is_the_result(decoder):
    if "nbest" not in type(decoder.cfg).model_fields:
        with pytest.raises(DecodeError, match="finds one hypothesis"):
            decoder.cfg.with_nbest(3)
        return
    with pytest.raises(DecodeError, match="1 or more"):
        decoder.cfg.with_nbest(0)
    hypotheses = decode(decoder.with_config(decoder.cfg.with_nbest(3)), posteriors(decoder, LENGTHS), LENGTHS)
    assert any(len(hypothesis.nbest) == 3 for hypothesis in hypotheses)
    for hypothesis in hypotheses:
        texts = [alternative.text for alternative in hypothesis.nbest]
        scores = [alternative.score for alternative in hypothesis.nbest]
        assert texts[:1] in ([], [hypothesis.text])
        assert len(set(texts)) == len(texts) <= 3
        assert scores == sorted(scores, reverse=True)
        assert sum(alternative.posterior for alternative in hypothesis.nbest) <= 1 + 1e-6
