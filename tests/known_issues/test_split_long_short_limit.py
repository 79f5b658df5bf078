"""A limit below 0.15 s left no room for a 50 ms search window; a limit below one sample caused an endless loop."""

import pytest
import torch

from speech.vad import EverythingConfig, build_vad, cut


@pytest.mark.parametrize("max_seconds", [0.1, 0.01, 0.00001])
def test_short_limits_split_recordings(max_seconds):
    wave = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    pieces = cut(build_vad(EverythingConfig()), [(wave, 8000)], max_seconds)
    assert torch.equal(torch.cat([piece.wave for piece in pieces]), wave)
