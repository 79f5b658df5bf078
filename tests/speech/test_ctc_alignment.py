"""Forced alignment with CTC, against all paths of tiny matrices."""

import itertools

import pytest
import torch

from speech.ctc_alignment import AlignmentError, align_tokens
from speech.tokens import TokenConfig, train_tokenizer
from speech.words import FrameTimes

CHARACTERS = train_tokenizer(TokenConfig(kind="characters"), ["ab ba"])


def best_path(log_probs, tokens):
    """The best path of a transcript, by trying all."""
    frames, size = log_probs.shape

    def text(path):
        return [label for label, _ in itertools.groupby(path) if label]

    paths = [path for path in itertools.product(range(size), repeat=frames) if text(path) == tokens]
    return max(paths, key=lambda path: float(sum(log_probs[t, label] for t, label in enumerate(path))))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("text", ["a b", "aa", "ab"])
def test_alignment_is_the_best_path(seed, text):
    log_probs = torch.randn(5, CHARACTERS.size, generator=torch.Generator().manual_seed(seed)).log_softmax(1)
    path = best_path(log_probs, CHARACTERS.encode(text))
    alignment = align_tokens("u", log_probs, CHARACTERS, text, FrameTimes(0.04))
    assert alignment.score == pytest.approx(
        float(sum(log_probs[t, label] for t, label in enumerate(path))) / 5, abs=1e-5
    )
    starts = [t for t, label in enumerate(path) if label and (t == 0 or path[t - 1] != label)]
    assert [unit.start for unit in alignment.units] == starts
    times = [unit.start for unit in alignment.timed(alignment.units)]
    assert times == pytest.approx([0.04 * start for start in starts], abs=1e-3)


def peaked_posteriors(frames):
    """Posteriors of 0.9 for a label of each frame."""
    log_probs = torch.full((len(frames), CHARACTERS.size), 0.1 / (CHARACTERS.size - 1))
    log_probs[range(len(frames)), frames] = 0.9
    return log_probs.log()


def test_words_have_times_and_confidences():
    a, space, b = (CHARACTERS.encode(symbol)[0] for symbol in ("a", " ", "b"))
    log_probs = peaked_posteriors([0, a, a, 0, b, space, 0, b, a, 0])
    alignment = align_tokens("u", log_probs, CHARACTERS, "ab ba", FrameTimes(0.1, offset=1.0))
    words = alignment.timed(alignment.words)
    assert [(word.word, word.start, word.duration) for word in words] == [("ab", 1.1, 0.4), ("ba", 1.7, 0.2)]
    assert [unit.label for unit in alignment.units] == ["a", "b", "▁", "b", "a"]
    assert all(word.confidence == pytest.approx(0.9, abs=1e-3) for word in words)
    assert alignment.score == pytest.approx(float(torch.tensor(0.9).log()), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("ab ba", "2 frames are too few for 5 tokens"), ("aa", "too few"), ("x", "not among the 4 tokens")],
)
def test_transcript_longer_than_the_audio_is_an_error(text, message):
    with pytest.raises(AlignmentError, match=message):
        align_tokens("u", peaked_posteriors([0, 1]), CHARACTERS, text, FrameTimes(0.1))
