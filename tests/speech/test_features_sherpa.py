"""Features of sherpa-onnx: agreement with the library that computes them there, mirrored ends, frames of a batch."""

import math

import numpy as np
import pytest
import torch

from speech.features import FEATURES, SherpaLogMelConfig, build_features

RATE = 16000
TRACED = sorted(kind for kind, config in FEATURES.items() if not config.adapted)


def noise(size, seed=0):
    return 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def theirs(wave):
    """What sherpa-onnx computes for samples in ±1, by the library that it contains."""
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.samp_freq, options.frame_opts.dither, options.frame_opts.snip_edges = RATE, 0.0, False
    options.mel_opts.num_bins, options.mel_opts.high_freq = 80, -400.0
    computer = knf.OnlineFbank(options)
    computer.accept_waveform(RATE, wave.tolist())
    computer.input_finished()
    return torch.from_numpy(np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]))


def ours(wave):
    feats, frames = build_features(SherpaLogMelConfig(), RATE)(wave[None], torch.tensor([len(wave)]))
    return feats[0, : int(frames[0])]


@pytest.mark.parametrize("size", [80, 100, 400, 401, 3999, 16000])
def test_features_are_those_of_sherpa_onnx_even_of_utterances_shorter_than_a_frame(size):
    wave = noise(size)
    assert ours(wave).shape == (math.floor(size / 160 + 0.5), 80)
    torch.testing.assert_close(ours(wave), theirs(wave), atol=2e-3, rtol=0)


def test_faint_filters_are_floored_as_they_are_there():
    wave = torch.cat([noise(4000), torch.zeros(4000), 1e-5 * noise(4000)])
    floor = math.log(torch.finfo(torch.float32).eps)
    assert (ours(wave)[30:48] == ours(wave)[30, 0]).all()
    assert float(ours(wave).min()) == pytest.approx(floor, abs=1e-4)
    torch.testing.assert_close(ours(wave), theirs(wave), atol=2e-3, rtol=0)


def test_padding_of_a_batch_changes_no_frame():
    bank = build_features(SherpaLogMelConfig(), RATE)
    waves = [noise(size, size) for size in (3000, 79, 5000)]
    batch = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True, padding_value=math.nan)
    feats, frames = bank(batch, torch.tensor([len(wave) for wave in waves]))
    assert frames.tolist() == [19, 0, 31]
    for row, wave in enumerate(waves):
        own = ours(wave)
        torch.testing.assert_close(feats[row, : len(own)], own, atol=0, rtol=0)
        assert (feats[row, len(own) :] == 0).all()


@pytest.mark.parametrize("kind", TRACED)
@pytest.mark.parametrize("level_db", [0.0, -20.0])
def test_traceable_computation_gives_the_same_features(kind, level_db):
    bank = build_features(FEATURES[kind](**FEATURES[kind].tiny, level_db=level_db), 8000)
    waves, lengths = torch.stack([noise(4000, 1), noise(4000, 2)]), torch.tensor([4000, 2500])
    for own, other in zip(bank(waves, lengths), bank.traceable(waves, lengths), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-5)
