"""The CTC loss, what it cannot align, and validation that is the same whenever one asks."""

import numpy as np
import pytest
import torch

from training.data import Batch
from training.validation import ctc_losses, needed_frames


def token_batch(tokens, lengths):
    none = torch.zeros(0)
    tokens, lengths = torch.tensor(tokens), torch.tensor(lengths)
    return Batch(np.arange(len(tokens)), [], [], [], none, none, tokens, lengths, 1.0)


def test_needed_frames_counts_a_blank_between_equal_tokens():
    batch = token_batch([[1, 2, 3, 0], [1, 1, 1, 0], [2, 0, 0, 0], [3, 3, 2, 2]], [3, 3, 1, 4])
    assert needed_frames(batch.tokens, batch.token_lengths).tolist() == [3, 5, 1, 6]


def test_ctc_is_the_sum_over_all_alignments():
    """Two frames, one token: of the paths (a, a), (a, blank), (blank, a)."""
    probabilities = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]])
    loss, unalignable = ctc_losses(probabilities.log(), torch.tensor([2]), token_batch([[1]], [1]))
    assert loss.item() == pytest.approx(-np.log(0.4 * 0.7 + 0.4 * 0.3 + 0.6 * 0.7))
    assert unalignable == 0


def test_the_frame_limit_of_ctc_is_exact():
    uniform = torch.full((2, 3, 3), 1 / 3).log()
    batch = token_batch([[1, 1], [1, 2]], [2, 2])
    loss, unalignable = ctc_losses(uniform, torch.tensor([2, 2]), batch)
    assert unalignable == 1
    assert loss[0] == 0.0
    assert loss[1] > 0
    assert ctc_losses(uniform, torch.tensor([3, 2]), batch)[1] == 0
