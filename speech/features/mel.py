"""Constants of feature extraction: window, filter bank, cosine transform, lifter.

Definitions are those of the HTK Book (Young et al. 2006, sections 5.2 to 5.6) as Kaldi implements them. All are
computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FeatureError(ValueError):
    """A feature configuration that is inconsistent or not possible at the sample rate."""


def povey_window(size: int) -> Tensor:
    """Kaldi's default window, a Hann window to the power 0.85 that is zero at both ends: float64 `[size]`."""
    return torch.hann_window(size, periodic=False, dtype=torch.float64).pow(0.85)


def hz_to_mel(hz: Tensor) -> Tensor:
    """Frequency in Hz to mel: 1127 ln(1 + f / 700)."""
    return 1127.0 * torch.log1p(hz / 700.0)


def mel_filter_bank(
    num_mels: int, fft_size: int, sample_rate: int, low_freq: float, high_freq: float, scale: str = "mel"
) -> Tensor:
    """Triangular filters, equally spaced and overlapping by half on the mel scale (or in Hz).

    Args:
        num_mels: number of filters.
        fft_size: size of the Fourier transform.
        sample_rate: in Hz.
        low_freq: lower edge of the first filter in Hz.
        high_freq: upper edge of the last one in Hz; 0 or less is an offset from the Nyquist frequency.
        scale: "mel", or "linear" for filters of equal width in Hz.

    Returns:
        float64 `[fft_size // 2 + 1, num_mels]`; the row of the Nyquist frequency is zero, as Kaldi leaves it out.

    Raises:
        FeatureError: the edges are out of range for the sample rate, or a filter is narrower than an FFT bin.
    """
    nyquist, high = sample_rate / 2, _upper_edge(sample_rate, high_freq)
    if not 0 <= low_freq < high <= nyquist:
        raise FeatureError(
            f"the filters from low_freq={low_freq} to high_freq={high_freq} ({high} Hz) do not fit into "
            f"0 to {nyquist} Hz, half the sample rate: change features.low_freq or features.high_freq"
        )
    warp = hz_to_mel if scale == "mel" else torch.clone
    edges = warp(torch.tensor([low_freq, high], dtype=torch.float64))
    step = (edges[1] - edges[0]) / (num_mels + 1)
    left = edges[0] + step * torch.arange(num_mels, dtype=torch.float64)
    bins = warp(torch.arange(fft_size // 2, dtype=torch.float64) * sample_rate / fft_size).unsqueeze(1)
    rising, falling = (bins - left) / step, (left + 2 * step - bins) / step
    weights = torch.minimum(rising, falling).clamp(min=0)
    if not (weights.sum(0) > 0).all():
        raise FeatureError(
            f"{num_mels} filters between {low_freq} and {high} Hz are narrower than the resolution of "
            f"{sample_rate / fft_size:g} Hz: lower features.num_mels or raise features.frame_ms"
        )
    return torch.cat([weights, weights.new_zeros(1, num_mels)])


def _upper_edge(sample_rate: int, high_freq: float) -> float:
    return high_freq if high_freq > 0 else sample_rate / 2 + high_freq


def filter_centres(num_mels: int, sample_rate: int, low_freq: float, high_freq: float, scale: str = "mel") -> Tensor:
    """Frequencies in Hz at which the filters of `mel_filter_bank` are one: float64 `[num_mels]`."""
    edges = torch.tensor([low_freq, _upper_edge(sample_rate, high_freq)], dtype=torch.float64)
    shares = torch.arange(1, num_mels + 1, dtype=torch.float64) / (num_mels + 1)
    if scale == "linear":
        return edges[0] + shares * (edges[1] - edges[0])
    low, high = hz_to_mel(edges)
    return 700.0 * torch.expm1((low + shares * (high - low)) / 1127.0)


def equal_loudness(hz: Tensor) -> Tensor:
    """Sensitivity of hearing at about 40 dB (Hermansky 1990, equation 4, in the form that HTK and Kaldi use)."""
    squared = hz.square()
    return (squared / (squared + 1.6e5)).square() * (squared + 1.44e6) / (squared + 9.61e6)


def dct_matrix(num_mels: int, num_ceps: int) -> Tensor:
    """Orthonormal discrete cosine transform, type II: float64 `[num_mels, num_ceps]`."""
    angles = math.pi / num_mels * (torch.arange(num_mels, dtype=torch.float64) + 0.5)
    matrix = torch.cos(torch.outer(angles, torch.arange(num_ceps, dtype=torch.float64))) * math.sqrt(2.0 / num_mels)
    matrix[:, 0] = math.sqrt(1.0 / num_mels)
    return matrix


def lifter_weights(num_ceps: int, lifter: float) -> Tensor:
    """Weights 1 + Q/2 sin(pi i / Q) of the cepstral coefficients i, or ones if Q is 0: float64 `[num_ceps]`."""
    index = torch.arange(num_ceps, dtype=torch.float64)
    return 1.0 + 0.5 * lifter * torch.sin(math.pi * index / lifter) if lifter > 0 else torch.ones_like(index)
