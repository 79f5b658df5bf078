"""A batch in which no utterance has a token stopped training."""

import numpy as np
import torch

from recognition.data.dataset import Batch
from speech.objectives import Ctc, CtcConfig


def test_batch_of_empty_transcripts_needs_no_frames():
    none = torch.zeros(0)
    lengths = torch.zeros(2, dtype=torch.long)
    batch = Batch(np.arange(2), [], [], [], none, none, torch.zeros(2, 0, dtype=torch.long), lengths, 1.0)
    losses, unalignable = Ctc(CtcConfig()).losses(torch.full((2, 3, 4), 0.25).log(), torch.tensor([3, 0]), batch)
    assert unalignable == 0
    torch.testing.assert_close(losses, torch.tensor([-3 * np.log(0.25), 0.0], dtype=torch.float32))
