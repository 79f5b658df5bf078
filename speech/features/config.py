"""Configuration of the acoustic features."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FeatureConfig(BaseModel):
    """How a waveform becomes feature frames (definitions and defaults are Kaldi's, energy is not used)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    kind: Literal["logmel", "mfcc"] = "logmel"
    """Log-mel filter-bank energies, or mel-frequency cepstral coefficients."""
    num_mels: int = Field(default=80, ge=3)
    """Number of mel filters (Kaldi computes MFCC from 23, or 40 for its `hires` setup)."""
    num_ceps: int = Field(default=13, ge=1)
    """Number of cepstral coefficients, at most `num_mels`; only for "mfcc"."""
    frame_ms: float = Field(default=25.0, gt=0)
    """Length of a frame in milliseconds."""
    hop_ms: float = Field(default=10.0, gt=0)
    """Distance between the starts of two frames in milliseconds."""
    low_freq: float = Field(default=20.0, ge=0)
    """Lower edge of the first filter in Hz."""
    high_freq: float = 0.0
    """Upper edge of the last filter in Hz; 0 or less is an offset from the Nyquist frequency."""
    dither: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise added to each frame, on the scale of 16-bit samples; 0 is none, Kaldi takes 1."""
    preemphasis: float = Field(default=0.97, ge=0, le=1)
    """Coefficient of the first-order pre-emphasis filter."""
    cepstral_lifter: float = Field(default=22.0, ge=0)
    """Length of the cepstral lifter; 0 is none; only for "mfcc"."""
    cmvn: Literal["none", "global", "speaker", "utterance"] = "global"
    """Over what mean and variance are normalized: the training set, each speaker, or each utterance."""
    stored: bool = False
    """Compute the features once and store them in shards, instead of on the fly while training."""
