"""Augmentation: SpecAugment on features; speed, gain and noise on waveforms.

All draws come from one CPU generator, also for tensors on a GPU, and their number depends on the shape and the
configuration only: the same generator state gives the same augmentation on every device.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from speech.audio import resample
from speech.features.cmvn import frame_mask


class AugmentConfig(BaseModel):
    """How training data are varied."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    enabled: bool = True
    """Augment at all."""
    time_masks: int = Field(default=2, ge=0)
    """Number of time masks in an utterance; masks may overlap."""
    time_mask_frames: int = Field(default=25, ge=0)
    """Longest time mask, in frames."""
    time_mask_share: float = Field(default=0.2, ge=0, le=1)
    """Longest time mask, as a share of the utterance."""
    freq_masks: int = Field(default=2, ge=0)
    """Number of frequency masks in an utterance."""
    freq_mask_bins: int = Field(default=15, ge=0)
    """Widest frequency mask, in features."""
    speed_factors: tuple[float, ...] = ()
    """Each utterance is played at one of these speeds (pitch follows), such as 0.9, 1.0, 1.1; empty is none."""
    noise_snr_db: tuple[float, float] | None = None
    """Mix white or pink noise in, at a signal-to-noise ratio drawn from this range in dB."""
    gain_db: float = Field(default=0.0, ge=0)
    """Change the level by up to so many dB, louder or softer."""

    @field_validator("speed_factors")
    @classmethod
    def _check_speed(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        for factor in factors:
            if not 0.5 <= factor <= 2.0:
                raise ValueError(f"speed_factors: {factor} is not between 0.5 and 2")
        return factors

    @field_validator("noise_snr_db")
    @classmethod
    def _check_noise(cls, snr: tuple[float, float] | None) -> tuple[float, float] | None:
        if snr is not None and snr[0] > snr[1]:
            raise ValueError(f"noise_snr_db: the lower end {snr[0]} exceeds the upper end {snr[1]}: swap them")
        return snr


class SpecAugment:
    """Time and frequency masks on normalized features (Park et al. 2019, arXiv 1904.08779, section 2; no time warping).

    A time mask covers t frames from t0, t uniform in 0..T, where T is `time_mask_frames` or `time_mask_share` of the
    utterance, whichever is less, and t0 uniform in 0..length - t; a frequency mask likewise. Masked features become
    zero, which is the mean after CMVN.
    """

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config

    def __call__(self, feats: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Mask a batch.

        Args:
            feats: `[B, T, F]`, normalized.
            lengths: `[B]`, frames of each utterance.
            generator: on the CPU.

        Returns:
            A masked copy, padding unchanged; `feats` itself if the configuration masks nothing.
        """
        config = self.config
        if not config.enabled or config.time_masks + config.freq_masks == 0:
            return feats
        batch, num_frames, num_bins = feats.shape
        frames = lengths.to("cpu", torch.float64)
        longest = (frames * config.time_mask_share).floor().clamp(max=config.time_mask_frames)
        masked_time = _draw_spans(frames, longest, config.time_masks, num_frames, generator)
        bins = torch.full((batch,), num_bins, dtype=torch.float64)
        widest = bins.clamp(max=config.freq_mask_bins)
        masked_bins = _draw_spans(bins, widest, config.freq_masks, num_bins, generator)
        masked = masked_time.to(feats.device).unsqueeze(2) | masked_bins.to(feats.device).unsqueeze(1)
        masked &= frame_mask(lengths, num_frames, feats.device).unsqueeze(2)
        return feats.masked_fill(masked, 0.0)


def _draw_spans(sizes: Tensor, widest: Tensor, count: int, total: int, generator: torch.Generator) -> Tensor:
    """Draw `count` spans in each row of `sizes[b]` places, at most `widest[b]` wide: bool `[B, total]`."""
    draws = torch.rand(2, len(sizes), count, generator=generator, dtype=torch.float64)
    widths = (draws[0] * (widest.unsqueeze(1) + 1)).floor()
    starts = (draws[1] * (sizes.unsqueeze(1) - widths + 1)).floor()
    places = torch.arange(total, dtype=torch.float64)
    inside = (places >= starts.unsqueeze(2)) & (places < (starts + widths).unsqueeze(2))
    return inside.any(1)


def perturb_waves(
    waves: Tensor, lengths: Tensor, sample_rate: int, config: AugmentConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Change speed (Ko et al. 2015), add noise, change the gain; in this order, each if configured.

    Args:
        waves: `[B, N]` in [-1, 1].
        lengths: `[B]`, samples of each utterance.
        sample_rate: in Hz (noise is shaped relative to it).
        config: the augmentation.
        generator: on the CPU.

    Returns:
        Waves `[B, N']`, zero beyond each utterance, and their lengths `[B]`; the inputs if nothing is configured.
    """
    if not config.enabled or len(waves) == 0:
        return waves, lengths
    if config.speed_factors:
        waves, lengths = _change_speed(waves, lengths, config.speed_factors, generator)
    if config.noise_snr_db is not None:
        waves = _add_noise(waves, lengths, sample_rate, config.noise_snr_db, generator)
    if config.gain_db > 0:
        gains_db = (torch.rand(len(waves), 1, generator=generator) * 2 - 1) * config.gain_db
        waves = waves * torch.pow(10.0, gains_db / 20).to(waves)
    return waves, lengths


def _change_speed(
    waves: Tensor, lengths: Tensor, factors: tuple[float, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Play each utterance at a factor drawn from `factors`; those of one factor are resampled together."""
    choice = torch.randint(len(factors), (len(waves),), generator=generator)
    ratios = [Fraction(factor).limit_denominator(100) for factor in factors]
    new_lengths = lengths.clone()
    pieces: list[tuple[Tensor, Tensor]] = []
    for index in sorted(set(choice.tolist())):
        rows = (choice == index).nonzero().squeeze(1)
        up, down = ratios[index].denominator, ratios[index].numerator
        old = lengths[rows.to(lengths.device)]
        # Beyond its length an utterance must be silent, or the interpolation would draw the padding in.
        group = _silence_padding(waves[rows.to(waves.device), : int(old.max())], old)
        pieces.append((rows, resample(group, down, up)))
        new_lengths[rows.to(lengths.device)] = torch.div(old * up + down - 1, down, rounding_mode="floor")
    result = waves.new_zeros(len(waves), int(new_lengths.max()))
    for rows, piece in pieces:
        result[rows.to(waves.device), : piece.shape[1]] = piece[:, : result.shape[1]]
    return _silence_padding(result, new_lengths), new_lengths


def _add_noise(
    waves: Tensor, lengths: Tensor, sample_rate: int, snr_db: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Mix noise in, white or pink (half of the utterances each), at a ratio to the power of the whole utterance."""
    batch, num_samples = waves.shape
    draws = torch.rand(2, batch, 1, generator=generator)
    noise = torch.randn(batch, num_samples, generator=generator)
    pink = draws[0, :, 0] >= 0.5
    noise[pink] = _pink(noise[pink], sample_rate)
    noise = noise.to(waves)
    signal = _silence_padding(waves, lengths)
    ratio_db = snr_db[0] + (snr_db[1] - snr_db[0]) * draws[1]
    counts = lengths.to(waves.device).clamp(min=1).unsqueeze(1)
    noise = _silence_padding(noise, lengths)
    signal_power = signal.square().sum(1, keepdim=True) / counts
    noise_power = (noise.square().sum(1, keepdim=True) / counts).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (signal_power / noise_power).sqrt() * torch.pow(10.0, -ratio_db / 20).to(waves)
    return signal + noise * scale


def _pink(noise: Tensor, sample_rate: int) -> Tensor:
    """Shape white noise `[B, N]` to a power spectrum that falls with 1/f above 50 Hz."""
    num_samples = noise.shape[1]
    if noise.numel() == 0:
        return noise
    size = math.ceil(num_samples / 4096) * 4096  # a size with large prime factors would be slow to transform
    frequencies = torch.fft.rfftfreq(size, 1.0 / sample_rate).clamp(min=50.0)
    spectrum = torch.fft.rfft(noise, n=size) * frequencies.rsqrt()
    shaped: Tensor = torch.fft.irfft(spectrum, n=size)
    return shaped[:, :num_samples]


def _silence_padding(waves: Tensor, lengths: Tensor) -> Tensor:
    """A copy of `waves` `[B, N]` that is zero beyond each length."""
    return waves.masked_fill(~frame_mask(lengths, waves.shape[1], waves.device), 0.0)
