"""Pieces were slices of the blocks they were cut from: an hour with a minute of speech stayed in memory as a whole."""

import pytest
import torch

from speech.vad import EverythingConfig, Vad, cut

RATE = 1000


class Sounding(Vad):
    """All samples between the first and the last that are not zero."""

    def speech(self, wave, sample_rate):
        places = torch.nonzero(wave).flatten().tolist()
        return [(places[0], places[-1] + 1)] if places else []


def test_pieces_hold_their_own_samples_only():
    block = torch.zeros(60 * RATE)
    block[20 * RATE : 21 * RATE] = 0.5
    pieces = list(cut(Sounding(EverythingConfig()), [(block.clone(), RATE) for _ in range(5)], 30.0))
    assert len(pieces) == 5
    for number, piece in enumerate(pieces):
        assert piece.start == pytest.approx(60 * number + 20 - 0.3)
        assert 1.3 * RATE <= len(piece.wave) <= 1.6 * RATE
        assert piece.wave.untyped_storage().nbytes() == piece.wave.nbytes
