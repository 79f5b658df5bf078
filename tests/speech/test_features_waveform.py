"""Blocks of samples as features, for networks that read raw audio."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from speech.features import FeatureChoice, FeatureError, build_features
from speech.features.waveform import WaveformConfig
from speech.frontend import FrontEnd

RATE = 8000
BLOCKS = WaveformConfig(samples=80, cmvn="none")


def voice(samples, seed=0):
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def test_blocks_joined_are_the_waveform_up_to_the_last_whole_block():
    waves, lengths = torch.nn.utils.rnn.pad_sequence([voice(850), voice(400, 1)], batch_first=True), [850, 400]
    feats, frames = build_features(BLOCKS, RATE)(waves, torch.tensor(lengths))
    assert frames.tolist() == [10, 5]
    assert torch.equal(feats[0].flatten(), waves[0, :800])
    assert torch.equal(feats[1, :5].flatten(), waves[1, :400])
    assert not feats[1, 5:].any()


def test_longer_blocks_overlap():
    wave = voice(800)
    config = WaveformConfig(samples=200, frame_ms=25.0, cmvn="none")
    feats, frames = build_features(config, RATE)(wave[None], torch.tensor([800]))
    assert frames.tolist() == [8]
    assert torch.equal(feats[0, 3], wave[240:440])


def test_wrong_number_of_samples_is_refused_with_the_right_one():
    with pytest.raises(FeatureError, match=r"10 ms at 8000 Hz are 80 samples: set features\.samples to 80"):
        build_features(WaveformConfig(), RATE)
    assert build_features(WaveformConfig(), 16000).dim == 160


def test_options_of_filters_are_refused():
    with pytest.raises(ValidationError, match="num_mels"):
        TypeAdapter(FeatureChoice).validate_python({"kind": "waveform", "num_mels": 40})


def test_silence_around_raw_speech_is_trimmed():
    frontend = FrontEnd(BLOCKS.model_copy(update={"trim_db": 30.0}), RATE)
    wave = torch.cat([torch.zeros(8000), voice(4000), torch.zeros(4000)])
    feats, frames, starts = frontend.trimmed(wave[None], torch.tensor([len(wave)]))
    assert frames.tolist() == [50 + 10]  # five blocks of silence before and after
    assert starts.item() == pytest.approx(0.95)
    torch.testing.assert_close(feats[0, 5:55].flatten(), wave[8000:12000])
