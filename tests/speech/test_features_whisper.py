"""Whisper's features and normalized waveforms equal those of the library that the models were published with."""

import math

import pytest
import torch

from speech.features import WaveformConfig, WhisperLogMelConfig, build_features
from speech.features.mel import FeatureError
from speech.features.whisper_logmel import followed_by_silence

RATE = 16000
LENGTHS = (3 * RATE + 77, 481, 160, 100, 30 * RATE, 30 * RATE - 10)


def speechlike(lengths=LENGTHS):
    """Noise that grows from faint to loud, as a batch with noise in place of padding, and one by one."""
    generator = torch.Generator().manual_seed(0)
    waves = [torch.randn(size, generator=generator) * torch.linspace(1e-3, 0.1, size) for size in lengths]
    batch = torch.randn(len(waves), max(lengths), generator=generator) * 10
    for row, wave in zip(batch, waves, strict=True):
        row[: len(wave)] = wave
    return waves, batch


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_equal_those_of_whispers_extractor(num_mels):
    library = pytest.importorskip("transformers")
    extractor = library.WhisperFeatureExtractor(feature_size=num_mels)
    waves, batch = speechlike()
    feats, frames = build_features(WhisperLogMelConfig(num_mels=num_mels), RATE)(batch, torch.tensor(LENGTHS))
    assert frames.tolist() == [300, 3, 1, 0, 3000, 2999]
    for row, (wave, count) in enumerate(zip(waves, frames.tolist(), strict=True)):
        wanted = extractor(wave.numpy(), sampling_rate=RATE, return_tensors="pt").input_features[0].T[:count]
        torch.testing.assert_close(feats[row, :count], wanted, atol=1e-4, rtol=0)
        assert not feats[row, count:].any()


def test_features_followed_by_silence_equal_those_of_whispers_extractor():
    library = pytest.importorskip("transformers")
    lengths = (*LENGTHS, 30 * RATE - 170, 3 * RATE, 3 * RATE + 1)
    waves, batch = speechlike(lengths)
    waves[2] *= 0
    batch[2, : lengths[2]] = 0
    feats, frames = build_features(WhisperLogMelConfig(tail=True), RATE)(batch, torch.tensor(lengths))
    assert frames.tolist() == [302, 5, 3, 2, 3000, 3000, 3000, 302, 302]
    feats[0, 302:] = math.inf  # what stands in the padding must not matter
    padded = followed_by_silence(feats, frames, 3000)
    assert padded.shape == (len(lengths), 3000, 80)
    for row, wave in zip(padded, waves, strict=True):
        wanted = library.WhisperFeatureExtractor()(wave.numpy(), sampling_rate=RATE, return_tensors="pt")
        torch.testing.assert_close(row, wanted.input_features[0].T, atol=1e-4, rtol=0)


def test_features_with_a_tail_begin_with_those_without():
    _, batch = speechlike(LENGTHS)
    without, few = build_features(WhisperLogMelConfig(), RATE)(batch, torch.tensor(LENGTHS))
    feats, frames = build_features(WhisperLogMelConfig(tail=True), RATE)(batch, torch.tensor(LENGTHS))
    assert (frames >= few).all()
    for row, count in enumerate(few.tolist()):
        torch.testing.assert_close(feats[row, :count], without[row, :count], atol=1e-5, rtol=0)
    longer = torch.randn(1, 31 * RATE)
    assert build_features(WhisperLogMelConfig(tail=True), RATE)(longer, torch.tensor([31 * RATE]))[1].tolist() == [3100]
    assert build_features(WhisperLogMelConfig(tail=True), RATE).num_frames(torch.tensor([0, 1])).tolist() == [0, 2]


def test_normalized_waveforms_equal_those_of_wav2vec2s_extractor():
    library = pytest.importorskip("transformers")
    extractor = library.Wav2Vec2FeatureExtractor(do_normalize=True)
    waves, batch = speechlike(LENGTHS[:3])
    feats, frames = build_features(WaveformConfig(normalize=True), RATE)(batch, torch.tensor(LENGTHS[:3]))
    for row, (wave, count) in enumerate(zip(waves, frames.tolist(), strict=True)):
        wanted = extractor(wave.numpy(), sampling_rate=RATE, return_tensors="pt").input_values[0]
        torch.testing.assert_close(feats[row, :count].flatten(), wanted[: 160 * count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config", [WhisperLogMelConfig(), WhisperLogMelConfig(tail=True), WaveformConfig(normalize=True)], ids=str
)
def test_an_utterances_features_do_not_depend_on_its_batch(config):
    extract = build_features(config, RATE)
    waves, batch = speechlike((5000, 3000, 170))
    together, frames = extract(batch, torch.tensor([5000, 3000, 170]))
    padded = config.waves_before(extract, batch, torch.tensor([5000, 3000, 170]))
    on_gpu = extract._together(padded, frames, together.shape[1])
    for row, wave in enumerate(waves):
        alone, (count,) = extract(wave[None], torch.tensor([len(wave)]))
        torch.testing.assert_close(together[row, :count], alone[0], atol=1e-5, rtol=1e-5)
        finished = config.finished(on_gpu, frames)
        torch.testing.assert_close(finished[row, :count], alone[0], atol=1e-5, rtol=1e-5)


def test_waveforms_are_as_they_are_unless_they_are_to_be_normalized():
    waves, batch = speechlike((5000,))
    feats, _ = build_features(WaveformConfig(), RATE)(batch, torch.tensor([5000]))
    assert torch.equal(feats[0].flatten(), waves[0][: 31 * 160])


def test_digital_silence_has_finite_features():
    for config in (WhisperLogMelConfig(), WaveformConfig(normalize=True)):
        feats, _ = build_features(config, RATE)(torch.zeros(1, 4000), torch.tensor([4000]))
        assert torch.isfinite(feats).all()


def test_filters_narrower_than_the_resolution_are_refused():
    with pytest.raises(FeatureError, match=r"1000 filters .* lower features\.num_mels"):
        build_features(WhisperLogMelConfig(num_mels=1000), RATE)
