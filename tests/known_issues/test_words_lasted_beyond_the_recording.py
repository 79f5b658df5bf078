"""Words that reached into the silence added around a piece ended after the recording, or after the next word's start.

A word that began in that silence got its whole duration from the start of the recording, so it ended too late.
"""

import itertools

import numpy as np
import pytest
import torch

from recognition.transcriber import Transcriber
from speech.vad import EverythingConfig
from speech.words import FrameTimes, placed_words


class OneWord(torch.nn.Module):
    """Every fourth log-mel frame [B, T, 6] to sure log probabilities of a word that lasts as long as the frames."""

    def forward(self, feats, lengths):
        tokens = torch.full(feats[:, ::4].shape[:2], 2)
        return (torch.nn.functional.one_hot(tokens, 4) * 20.0).log_softmax(-1), (lengths + 3) // 4


@pytest.mark.parametrize("seconds", [0.5, 40.0])
def test_words_stay_inside_their_pieces(bundle, seconds):
    transcriber = Transcriber(bundle, vad=EverythingConfig())
    transcriber.recognizer.model = OneWord()
    noise = np.random.default_rng(0).normal(size=int(8000 * seconds)).astype(np.float32) / 10
    (transcript,) = transcriber.transcribe([noise], words=True)
    assert len(transcript.words) == (2 if seconds > 30 else 1)
    assert transcript.words[0].start == 0.0
    assert transcript.words[-1].start + transcript.words[-1].duration == pytest.approx(seconds, abs=0.05)
    assert transcript.words[-1].start + transcript.words[-1].duration <= seconds + 0.0005
    for before, after in itertools.pairwise(transcript.words):
        assert before.start + before.duration <= after.start + 0.0005


def test_word_outside_its_piece_is_moved_to_its_edge():
    times = FrameTimes(0.01, offset=0.95, begin=1.0, end=2.0)
    for frames, expected in (
        ((0, 2), (1.0, 1.01)),
        ((3, 10), (1.0, 1.05)),
        ((50, 110), (1.45, 2.0)),
        ((107, 110), (1.99, 2.0)),
    ):
        (word,) = placed_words("a", [frames], [1.0], times)
        assert (word.start, round(word.start + word.duration, 3)) == expected
