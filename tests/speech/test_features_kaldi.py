"""Kinds of features: agreement with kaldi-native-fbank, and what every feature extractor must do."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.audio import decode_audio
from speech.features import (
    FbankConfig,
    FberConfig,
    FeatureConfig,
    LogMelConfig,
    MfccConfig,
    build_features,
)

CONFIGS = [
    LogMelConfig(),
    LogMelConfig(num_mels=40, high_freq=-400.0, preemphasis=0.0),
    LogMelConfig(num_mels=23, frame_ms=20.0, hop_ms=7.5, low_freq=0.0, high_freq=3500.0),
    MfccConfig(num_mels=23),
    MfccConfig(num_mels=40, num_ceps=40, cepstral_lifter=0.0, high_freq=-400.0),
    MfccConfig(num_mels=23, use_energy=True),
    FbankConfig(num_mels=40),
    FbankConfig(num_mels=23, use_energy=True),
]


def name(config):
    energy = "e" if getattr(config, "use_energy", False) else ""
    return f"{config.kind}{config.num_mels}{energy}"


def kaldi_features(config, wave, rate):
    """The same features by kaldi-native-fbank, `[T, F]`."""
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.MfccOptions() if config.kind == "mfcc" else knf.FbankOptions()
    frame = options.frame_opts
    frame.samp_freq, frame.dither, frame.preemph_coeff = rate, 0.0, config.preemphasis
    frame.frame_length_ms, frame.frame_shift_ms = config.frame_ms, config.hop_ms
    options.mel_opts.num_bins = config.num_mels
    options.mel_opts.low_freq, options.mel_opts.high_freq = config.low_freq, config.high_freq
    options.use_energy = getattr(config, "use_energy", False)
    options.energy_floor = 0.0
    if config.kind == "mfcc":
        options.num_ceps, options.cepstral_lifter = config.num_ceps, config.cepstral_lifter
    else:
        options.use_log_fbank = getattr(config, "log_energies", True)
    computer = knf.OnlineMfcc(options) if config.kind == "mfcc" else knf.OnlineFbank(options)
    computer.accept_waveform(rate, (wave * 32768).tolist())
    computer.input_finished()
    frames = [computer.get_frame(i) for i in range(computer.num_frames_ready)]
    return torch.from_numpy(np.stack(frames)) if frames else torch.empty(0, 0)


def ours(config, wave, rate):
    frames, lengths = build_features(config, rate)(wave.unsqueeze(0), torch.tensor([len(wave)]))
    assert lengths.tolist() == [frames.shape[1]]
    return frames[0]


def resolvable(config, wave, rate):
    """Which frames hold no filter more than about 70 dB below the frame's strongest, where float32 gives out."""
    fields = {name: getattr(config, name) for name in LogMelConfig.model_fields if name != "kind"}
    logmel = ours(LogMelConfig(**fields), wave, rate)
    return logmel.amin(1) > logmel.amax(1) - 16.0


def synthetic(rate):
    generator = torch.Generator().manual_seed(1)
    time = torch.arange(rate) / rate
    noise = 0.02 * torch.randn(rate, generator=generator)
    return {
        "tone": 0.3 * torch.sin(2 * math.pi * 440 * time) + noise,
        "two tones on an offset": 0.2 + 0.2 * torch.sin(2 * math.pi * 300 * time) * time + noise,
        "sweep": 0.5 * torch.sin(2 * math.pi * (100 + 1500 * time) * time) + noise,
        "white noise": 0.1 * torch.randn(rate, generator=generator),
        "loud noise": (torch.randn(rate, generator=generator)).clamp(-1, 1),
        "steps of 16 bits": (torch.randn(rate, generator=generator) * 3).round() / 32768,
        "silence": torch.zeros(rate),
    }


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kind}{c.num_mels}{'e' * getattr(c, 'use_energy', False)}"
)
@pytest.mark.parametrize("rate", [16000, 8000])
def test_features_of_synthetic_signals_agree_with_kaldi(config, rate):
    for name, wave in synthetic(rate).items():
        expected, actual = kaldi_features(config, wave, rate), ours(config, wave, rate)
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@functools.cache
def real_speech(folder):
    """Some recordings of each corpus: waves and rates."""
    paths = sorted(folder.glob("LibriSpeech/dev-clean-5/*/*/*.flac"))[::16]
    paths += sorted(folder.glob("fsdd/recordings/*.flac"))[::400]
    paths += sorted(folder.glob("LibriSpeech/train-clean-5/*/*/*.opus"))[::400]
    return [decode_audio(path) for path in paths]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kind}{c.num_mels}{'e' * getattr(c, 'use_energy', False)}"
)
@pytest.mark.variants(3)
def test_features_of_real_speech_agree_with_kaldi(config, shared_data):
    differences, clear = [], []
    for wave, rate in real_speech(shared_data):
        expected, actual = kaldi_features(config, wave, rate), ours(config, wave, rate)
        assert actual.shape == expected.shape
        differences.append((actual - expected).abs())
        clear.append(resolvable(config, wave, rate))
    difference = torch.cat(differences)
    assert difference[torch.cat(clear)].max() < 1e-3
    # The rest are filters whose energy is lost in the rounding of a float32 Fourier transform, Kaldi's or ours.
    assert torch.cat(clear).float().mean() > 0.5
    assert (difference < 1e-3).float().mean() > 0.9995
    assert difference.mean() < 2e-5
    assert difference.max() < 0.1


LINEAR = FbankConfig(num_mels=40, log_energies=False)


def test_linear_energies_of_real_speech_agree_with_kaldi(shared_data):
    for wave, rate in real_speech(shared_data):
        expected, actual = kaldi_features(LINEAR, wave, rate), ours(LINEAR, wave, rate)
        loudest = expected.amax(1, keepdim=True).clamp(min=1.0)
        torch.testing.assert_close(actual / loudest, expected / loudest, atol=1e-3, rtol=0)


def test_energy_ratios_of_real_speech_agree_with_kaldis_energies(shared_data):
    config = FberConfig(num_mels=40)
    for wave, rate in real_speech(shared_data):
        energies = kaldi_features(LINEAR, wave, rate).double()
        sums = energies.sum(1, keepdim=True)
        actual = ours(config, wave, rate)
        torch.testing.assert_close(actual[sums[:, 0] > 1], (energies / sums)[sums[:, 0] > 1].float(), atol=1e-3, rtol=0)
        torch.testing.assert_close(actual.sum(1), torch.ones(len(actual)))


class FeatureContract:
    """What every feature extractor must do."""

    config: FeatureConfig
    rate = 16000

    @pytest.fixture
    def features(self):
        return build_features(self.config, self.rate)

    def wave(self, num_samples, seed=0):
        return torch.randn(num_samples, generator=torch.Generator().manual_seed(seed)) * 0.1

    @settings(max_examples=25)
    @given(lengths=st.lists(st.integers(0, 6000), min_size=1, max_size=5), padding=st.integers(0, 900))
    def test_a_batch_equals_its_utterances(self, lengths, padding):
        features = build_features(self.config, self.rate)
        batch = torch.full((len(lengths), max(lengths) + padding), math.nan)  # padding must never be looked at
        for row, (out, length) in enumerate(zip(batch, lengths, strict=True)):
            out[:length] = self.wave(length, row)
        frames, counts = features(batch, torch.tensor(lengths))
        assert frames.shape[2] == features.dim
        for row, (length, count) in enumerate(zip(lengths, counts.tolist(), strict=True)):
            assert count == max(0, (length - features.frame_length) // features.hop_length + 1)
            alone, _ = features(self.wave(length, row).unsqueeze(0), torch.tensor([length]))
            assert torch.equal(frames[row, :count], alone[0])
            assert not frames[row, count:].any()

    def test_padded_batch_path_for_gpus_gives_the_same(self, features):
        lengths = torch.tensor([16000, 4321, 100])
        batch = torch.full((3, 16000), math.nan)
        for row, length in enumerate(lengths.tolist()):
            batch[row, :length] = self.wave(length, row)
        expected, counts = features(batch, lengths)
        actual = features._together(batch, counts, expected.shape[1])
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)

    def test_chunk_size_does_not_change_features(self, features, monkeypatch):
        wave = self.wave(16000 * 4)
        whole, _ = features(wave.unsqueeze(0), torch.tensor([len(wave)]))
        for chunk in (1, 100):
            monkeypatch.setattr("speech.features.kaldi._CPU_CHUNK_FRAMES", chunk)
            parts, _ = features(wave.unsqueeze(0), torch.tensor([len(wave)]))
            torch.testing.assert_close(whole, parts, atol=1e-4, rtol=1e-4)

    def test_shapes_types_and_state_are_correct(self, features):
        frames, counts = features(self.wave(16000).unsqueeze(0).double(), torch.tensor([16000]))
        assert frames.dtype == torch.float32
        assert frames.shape == (1, 98, features.dim)
        assert counts.tolist() == [98]
        assert not features.state_dict()
        assert not frames.requires_grad

    def test_batch_too_short_for_a_frame_has_none(self, features):
        frames, counts = features(torch.zeros(2, 10), torch.tensor([10, 0]))
        assert frames.shape == (2, 0, features.dim)
        assert counts.tolist() == [0, 0]

    def test_empty_batch_is_accepted(self, features):
        frames, counts = features(torch.zeros(0, 16000), torch.zeros(0, dtype=torch.long))
        assert frames.shape == (0, 98, features.dim)
        assert counts.shape == (0,)

    def test_input_is_not_modified(self, features):
        wave = self.wave(4000).unsqueeze(0)
        before = wave.clone()
        features(wave, torch.tensor([4000]))
        assert torch.equal(wave, before)

    def test_features_of_silence_are_finite(self, features):
        frames, counts = features(torch.zeros(1, 1600), torch.tensor([1600]))
        heard, same = features(self.wave(1600).unsqueeze(0), torch.tensor([1600]))
        assert torch.isfinite(frames).all()
        assert (frames.shape, counts.tolist()) == (heard.shape, same.tolist())
        assert counts.min() > 0
        torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))  # every frame is like the others
        assert (heard - frames).abs().mean() > 0.05 * heard.abs().mean()

    def test_wrong_shapes_are_refused(self, features):
        with pytest.raises(ValueError, match=r"\[B, N\]"):
            features(torch.zeros(1600), torch.tensor([1600]))
        with pytest.raises(ValueError, match=r"1600 samples"):
            features(torch.zeros(1, 1600), torch.tensor([3200]))

    def test_features_ignore_mixed_precision(self, features):
        wave, lengths = self.wave(4000).unsqueeze(0), torch.tensor([4000])
        expected, _ = features(wave, lengths)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(features(wave, lengths)[0], expected)

    def test_dither_changes_features_slightly(self):
        config = self.config.model_copy(update={"dither": 1.0})
        wave, lengths = self.wave(16000).unsqueeze(0), torch.tensor([16000])
        torch.manual_seed(0)
        dithered, _ = build_features(config, self.rate)(wave, lengths)
        plain, _ = build_features(self.config, self.rate)(wave, lengths)
        assert 0 < ((dithered - plain).abs() / plain.abs().clamp(min=1)).mean() < 0.1

    @pytest.mark.gpu
    def test_gpu_equals_cpu(self, features):
        waves, lengths = torch.stack([self.wave(20000, row) for row in range(4)]), torch.tensor([20000, 9999, 400, 3])
        expected, counts = features(waves, lengths)
        actual, gpu_counts = features.cuda()(waves.cuda(), lengths.cuda())
        assert actual.is_cuda
        assert gpu_counts.tolist() == counts.tolist()
        torch.testing.assert_close(actual.cpu(), expected, atol=1e-3, rtol=1e-4)


class TestLogMel(FeatureContract):
    config = LogMelConfig()

    def test_tone_has_most_energy_in_its_filter(self, features):
        time = torch.arange(16000) / 16000
        for frequency in (300.0, 1000.0, 3000.0):
            frames, _ = features(torch.sin(2 * math.pi * frequency * time).unsqueeze(0), torch.tensor([16000]))
            loudest = int(frames[0].mean(0).argmax())
            step = 1127 * math.log((1 + 8000 / 700) / (1 + 20 / 700)) / 81
            expected = (1127 * math.log(1 + frequency / 700) - 1127 * math.log(1 + 20 / 700)) / step - 1
            assert abs(loudest - expected) <= 1

    def test_doubled_amplitude_adds_log_4(self, features):
        wave, lengths = self.wave(16000).unsqueeze(0), torch.tensor([16000])
        difference = features(2 * wave, lengths)[0] - features(wave, lengths)[0]
        torch.testing.assert_close(difference, torch.full_like(difference, math.log(4)), atol=1e-4, rtol=0)


class TestMfcc(FeatureContract):
    config = MfccConfig(num_mels=23)

    def test_loudness_changes_only_the_first_coefficient(self, features):
        wave, lengths = self.wave(16000).unsqueeze(0), torch.tensor([16000])
        difference = (features(2 * wave, lengths)[0] - features(wave, lengths)[0])[0]
        assert difference[:, 1:].abs().max() < 1e-3
        torch.testing.assert_close(difference[:, 0], torch.full((98,), math.log(4) * math.sqrt(23)), atol=1e-3, rtol=0)


class TestMfccWithEnergy(FeatureContract):
    config = MfccConfig(num_mels=23, use_energy=True)


class TestFilterBank(FeatureContract):
    config = FbankConfig(num_mels=40, use_energy=True)

    def test_first_feature_is_the_log_energy_of_the_frame(self, features):
        wave = self.wave(4000)
        frames, _ = features(wave.unsqueeze(0), torch.tensor([4000]))
        blocks = (wave * 32768).unfold(0, 400, 160)
        energy = (blocks - blocks.mean(1, keepdim=True)).square().sum(1).log()
        torch.testing.assert_close(frames[0, :, 0], energy, atol=1e-4, rtol=0)
        logmel, _ = build_features(LogMelConfig(num_mels=40), self.rate)(wave.unsqueeze(0), torch.tensor([4000]))
        assert torch.equal(frames[..., 1:], logmel)


class TestLinearEnergies(FeatureContract):
    config = FbankConfig(num_mels=20, log_energies=False, scale="linear")

    def test_logarithm_of_linear_energies_is_log_mel(self, features):
        wave, lengths = self.wave(4000).unsqueeze(0), torch.tensor([4000])
        logs, _ = build_features(LogMelConfig(num_mels=20, scale="linear"), self.rate)(wave, lengths)
        torch.testing.assert_close(features(wave, lengths)[0].log(), logs, atol=1e-4, rtol=0)


class TestEnergyRatio(FeatureContract):
    config = FberConfig(num_mels=30)

    def test_energy_shares_sum_to_one_at_any_level(self, features):
        wave, lengths = self.wave(4000).unsqueeze(0), torch.tensor([4000])
        shares, _ = features(wave, lengths)
        assert (shares > 0).all()
        torch.testing.assert_close(shares.sum(2), torch.ones(1, 23))
        torch.testing.assert_close(features(wave * 0.1, lengths)[0], shares, atol=1e-6, rtol=1e-4)
        logs, _ = build_features(self.config.model_copy(update={"log_energies": True}), self.rate)(wave, lengths)
        torch.testing.assert_close(logs.exp(), shares)

    def test_silence_has_equal_energy_shares(self, features):
        shares, _ = features(torch.zeros(1, 400), torch.tensor([400]))
        torch.testing.assert_close(shares, torch.full((1, 1, 30), 1 / 30))
