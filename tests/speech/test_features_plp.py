"""PLP against its definition: known all-pole models, and a slow computation with numpy, written from the formulas."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from speech.features import PlpConfig, build_features
from speech.features.mel import equal_loudness, filter_centres, hz_to_mel, mel_filter_bank
from speech.features.plp import correlation_matrix, linear_prediction, prediction_cepstrum

RATE = 16000


def all_pole(poles, size=4096):
    """Coefficients of A(z) with some poles and their conjugates, and the power spectrum 1 / |A|² up to π."""
    coefficients = np.real(np.poly([*poles, *np.conj(poles)]))
    response = np.fft.rfft(coefficients, 2 * size)
    return coefficients[1:], 1.0 / np.abs(response) ** 2


def test_recursion_recovers_a_known_model():
    coefficients, power = all_pole([0.9 * np.exp(0.6j), 0.7 * np.exp(1.9j), 0.5 * np.exp(2.6j)])
    autocorrelation = torch.from_numpy(3.0 * np.fft.irfft(power)[: len(coefficients) + 1])
    predictor, error = linear_prediction(autocorrelation)
    assert predictor.numpy() == pytest.approx(coefficients, abs=1e-6)
    assert float(error) == pytest.approx(3.0)


def test_cepstrum_equals_that_of_the_models_log_spectrum():
    coefficients, power = all_pole([0.8 * np.exp(0.4j), 0.6 * np.exp(2.2j)])
    expected = np.fft.irfft(np.log(power) / 2)[1:5] * 2  # causal: minimum phase
    assert prediction_cepstrum(torch.from_numpy(coefficients), 4).numpy() == pytest.approx(expected, abs=1e-9)


def test_flat_spectrum_has_zero_prediction_coefficients():
    autocorrelation = torch.full((5, 23), 7.0, dtype=torch.float64) @ correlation_matrix(23, 12)
    assert autocorrelation[0, 0] == pytest.approx(7.0)
    assert autocorrelation[:, 1:].abs().max() < 1e-12
    coefficients, error = linear_prediction(autocorrelation)
    assert coefficients.abs().max() < 1e-12
    assert error.tolist() == pytest.approx([7.0] * 5)


def test_filters_are_one_at_their_centres():
    centres = filter_centres(23, RATE, 20.0, 0.0)
    steps = hz_to_mel(centres).diff()
    assert steps.numpy() == pytest.approx(np.full(22, float(steps[0])))
    filters = mel_filter_bank(23, 1 << 16, RATE, 20.0, 0.0)
    peaks = filters.argmax(0).double() * RATE / (1 << 16)
    assert (peaks - centres).abs().max() < RATE / (1 << 16)
    linear = filter_centres(3, RATE, 0.0, 0.0, "linear")
    assert linear.tolist() == pytest.approx([2000.0, 4000.0, 6000.0])


def test_equal_loudness_curve_peaks_at_middle_frequencies():
    curve = equal_loudness(torch.tensor([100.0, 1000.0, 4000.0], dtype=torch.float64))
    # (f² / (f² + 1.6e5))² (f² + 1.44e6) / (f² + 9.61e6), by hand for 1 kHz
    assert float(curve[1]) == pytest.approx((1e6 / 1.16e6) ** 2 * 2.44e6 / 10.61e6)
    assert curve[0] < curve[1] < curve[2]


def reference_plp(frame, config):
    """PLP of one frame [samples], step by step."""
    frame = frame.astype(np.float64) * 32768
    size = len(frame)
    frame = frame - frame.mean()
    emphasized = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85
    power = np.abs(np.fft.rfft(emphasized * window, 512)) ** 2
    energies = power @ mel_filter_bank(config.num_mels, 512, RATE, 20.0, 0.0).numpy()
    mel = 1127 * np.log1p(20 / 700), 1127 * np.log1p(8000 / 700)
    loud = []
    for band, energy in enumerate(energies, start=1):
        hz = 700 * (np.exp((mel[0] + band * (mel[1] - mel[0]) / (config.num_mels + 1)) / 1127) - 1)
        weight = (hz**2 / (hz**2 + 1.6e5)) ** 2 * (hz**2 + 1.44e6) / (hz**2 + 9.61e6)
        loud.append((weight * energy) ** (1 / 3))
    half = np.array([loud[0], *loud, loud[-1]])
    autocorrelation = np.fft.irfft(half)[: config.lpc_order + 1]
    toeplitz = autocorrelation[np.abs(np.subtract.outer(*[np.arange(config.lpc_order)] * 2))]
    a = np.linalg.solve(toeplitz, -autocorrelation[1:])
    error = autocorrelation[0] + a @ autocorrelation[1:]
    spectrum = np.fft.fft([1, *a], 1 << 14)
    cepstrum = np.fft.ifft(-np.log(np.abs(spectrum) ** 2)).real[1 : config.num_ceps]
    feats = np.array([math.log(error), *cepstrum])
    return feats * (1 + 11 * np.sin(np.pi * np.arange(config.num_ceps) / 22))


@pytest.mark.parametrize("config", [PlpConfig(), PlpConfig(num_mels=30, num_ceps=9, lpc_order=10)])
def test_features_follow_the_formulas(config):
    rng = np.random.default_rng(1)
    wave = np.convolve(rng.normal(size=RATE // 2), [1, 0.9, 0.7, 0.2], mode="same").astype(np.float32) * 0.05
    feats, counts = build_features(config, RATE)(torch.from_numpy(wave)[None], torch.tensor([len(wave)]))
    assert feats.shape == (1, int(counts[0]), config.num_ceps)
    for frame in (0, 17, int(counts[0]) - 1):
        expected = reference_plp(wave[160 * frame : 160 * frame + 400], config)
        assert feats[0, frame].numpy() == pytest.approx(expected, rel=1e-3, abs=2e-3)


def test_energy_is_the_first_feature():
    wave = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 4000)).astype(np.float32) * 0.1)
    plain, _ = build_features(PlpConfig(), RATE)(wave, torch.tensor([4000]))
    energy, _ = build_features(PlpConfig(use_energy=True), RATE)(wave, torch.tensor([4000]))
    assert torch.equal(plain[..., 1:], energy[..., 1:])
    frame = wave[0, :400].double() * 32768
    assert float(energy[0, 0, 0]) == pytest.approx(float((frame - frame.mean()).square().sum().log()), rel=1e-4)


def test_features_of_digital_silence_are_finite():
    feats, _ = build_features(PlpConfig(), RATE)(torch.zeros(1, 4000), torch.tensor([4000]))
    assert feats.isfinite().all()


def test_levels_distinguish_speech_from_pauses():
    rng = np.random.default_rng(3)
    loud, quiet = rng.normal(size=8000) * 0.1, rng.normal(size=8000) * 1e-4
    wave = torch.from_numpy(np.concatenate([quiet, loud, quiet]).astype(np.float32))[None]
    bank = build_features(PlpConfig(cmvn_gate_db=20), RATE)
    feats, counts = bank(wave, torch.tensor([24000]))
    mask = bank.speech_frames(feats, counts)
    assert mask is not None
    assert mask[0, 55:95].all()
    assert not mask[0, :45].any()


def test_more_coefficients_than_the_model_has_are_refused():
    with pytest.raises(ValidationError, match=r"num_ceps=14 exceeds lpc_order \+ 1.*lower num_ceps or raise lpc_order"):
        PlpConfig(num_ceps=14)
