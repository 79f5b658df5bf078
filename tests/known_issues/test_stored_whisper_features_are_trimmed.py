"""Trimming stored features of Whisper's kind failed: silence was as long as a frame of zeros gives, and too quiet."""

import pytest
import torch
from pydantic import TypeAdapter

from speech.features import FeatureChoice, build_features
from speech.frontend import FrontEnd

RATE = 16000


def trimmed_both_ways(wave, **options):
    cfg = TypeAdapter(FeatureChoice).validate_python({"kind": "whisper_logmel", "trim_db": 25} | options)
    frontend, lengths = FrontEnd(cfg, RATE), torch.tensor([len(wave)])
    stored, frames = build_features(cfg, RATE)(wave[None], lengths)
    return frontend.trimmed(wave[None], lengths), frontend.trimmed(stored, frames)


@pytest.mark.parametrize("tail", [False, True])
def test_stored_features_are_trimmed_as_those_of_waveforms(tail):
    wave = torch.zeros(3 * RATE)
    wave[RATE : 2 * RATE] = 0.2 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    (feats, counts, start), (stored, stored_counts, stored_start) = trimmed_both_ways(wave, tail=tail)
    assert torch.equal(counts, stored_counts)
    assert torch.equal(start, stored_start)
    torch.testing.assert_close(stored, feats)


def test_stored_features_cut_to_the_speech_get_its_silence_at_both_ends():
    wave = 0.2 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    _, (stored, counts, start) = trimmed_both_ways(wave)
    assert float(start) == pytest.approx(-0.05)
    own = stored[0, 5 : int(counts) - 5]
    torch.testing.assert_close(stored[0, 0], (own.max() - 2.0).expand(80))
    torch.testing.assert_close(stored[0, int(counts) - 1], stored[0, 0])


def test_nothing_stored_is_trimmed_to_silence():
    cfg = TypeAdapter(FeatureChoice).validate_python({"kind": "whisper_logmel", "trim_db": 25})
    feats, _, _ = FrontEnd(cfg, RATE).trimmed(torch.zeros(1, 0, 80), torch.tensor([0]))
    assert torch.isfinite(feats).all()
