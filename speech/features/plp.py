"""Perceptual linear prediction (Hermansky 1990, JASA 87) as Kaldi's `compute-plp-feats` defines it.

The filters' energies are weighted by an equal-loudness curve and compressed by a power of about 1/3. Their inverse
Fourier transform is an autocorrelation, to which an all-pole model is fitted; its cepstrum is the features.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from configurable.former_fields import former_fields
from configurable.lazy import torch
from speech.features.cepstra import CepstraConfig
from speech.features.mel import equal_loudness, filter_centres, lifter_weights

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank

_COMPRESSION = 1 / 3
"""Power that the energies are raised to: loudness is the cube root of intensity (Hermansky 1990)."""
_LEAST = 1e-5
"""Floor of 1 - k² in Durbin's recursion, for reflection coefficients k of 1."""


class PlpConfig(CepstraConfig):
    """Perceptual linear prediction cepstra."""

    kind: Literal["plp"] = "plp"
    num_mels: int = Field(default=23, ge=3)
    """Number of filters."""
    num_ceps: int = Field(default=13, ge=2)
    """Number of cepstral coefficients, at most `lpc_order` + 1."""
    lpc_order: int = Field(default=12, ge=1, le=1000)
    """Order of the all-pole model."""

    _former_plp_fields = former_fields(compression=1 / 3)

    @model_validator(mode="after")
    def _check_order(self) -> PlpConfig:
        if self.num_ceps > self.lpc_order + 1:
            raise ValueError(
                f"num_ceps={self.num_ceps} exceeds lpc_order + 1, as a model of order {self.lpc_order} gives "
                f"{self.lpc_order + 1} coefficients: lower num_ceps or raise lpc_order"
            )
        return self

    @override
    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        centres = filter_centres(self.num_mels, sample_rate, self.low_freq, self.high_freq, self.scale)
        angles = math.pi / (self.num_mels + 1) * torch.arange(1, self.num_mels + 1, dtype=torch.float64)
        return {
            "curve": equal_loudness(centres),
            "correlations": correlation_matrix(self.num_mels, self.lpc_order),
            "lifter": lifter_weights(self.num_ceps, self.cepstral_lifter),
            "spectrum": 2.0 * torch.cos(torch.outer(torch.arange(1, self.num_ceps, dtype=torch.float64), angles)),
        }

    @override
    def cepstra(self, bank: FilterBank, centred: Tensor) -> Tensor:
        loudness = bank.energies(centred).clamp_(min=bank.epsilon).mul_(bank.get_buffer("curve"))
        autocorrelation = torch.matmul(loudness.pow_(_COMPRESSION), bank.get_buffer("correlations"))
        coefficients, error = linear_prediction(autocorrelation)
        cepstra = prediction_cepstrum(coefficients, self.num_ceps - 1)
        # Kaldi floors the logarithm, not the energy
        gain = error.log().clamp(min=bank.epsilon).unsqueeze(-1)
        return torch.cat([gain, cepstra], dim=-1) * bank.get_buffer("lifter")

    @override
    def smoothed(self, bank: FilterBank, cepstra: Tensor) -> Tensor:
        plain = cepstra / bank.get_buffer("lifter")
        loudness = plain[..., :1] + torch.matmul(plain[..., 1:], bank.get_buffer("spectrum"))
        return loudness / _COMPRESSION - bank.get_buffer("curve").log()


def correlation_matrix(num_mels: int, order: int) -> Tensor:
    """Inverse Fourier transform of an even spectrum, whose first and last value are repeated at its ends.

    Returns:
        float64 `[num_mels, order + 1]`: energies of the filters to the autocorrelation at lags 0 to `order`.
    """
    lags = torch.arange(order + 1, dtype=torch.float64)
    points = torch.arange(num_mels + 2, dtype=torch.float64)
    weights = torch.full((num_mels + 2,), 2.0, dtype=torch.float64)
    weights[0] = weights[-1] = 1.0
    basis = (
        weights.unsqueeze(1) * torch.cos(math.pi / (num_mels + 1) * torch.outer(points, lags)) / (2 * (num_mels + 1))
    )
    basis[1] += basis[0]
    basis[-2] += basis[-1]
    return basis[1:-1]


def linear_prediction(autocorrelation: Tensor) -> tuple[Tensor, Tensor]:
    """The all-pole model 1 / (1 + Σ a_j z^-j) of an autocorrelation, by Durbin's recursion.

    Args:
        autocorrelation: `[..., order + 1]`, lags from 0.

    Returns:
        The coefficients a `[..., order]`, and the energy of the prediction error `[...]`.
    """
    error = autocorrelation[..., 0]
    coefficients = autocorrelation[..., :0]
    for lag in range(1, autocorrelation.shape[-1]):
        past = autocorrelation[..., 1:lag].flip(-1)
        reflection = (autocorrelation[..., lag] + (coefficients * past).sum(-1)) / error
        error = error * (1.0 - reflection.square()).clamp(min=_LEAST)
        turned = reflection.unsqueeze(-1)
        coefficients = torch.cat([coefficients - turned * coefficients.flip(-1), -turned], dim=-1)
    return coefficients, error


def prediction_cepstrum(coefficients: Tensor, count: int) -> Tensor:
    """The cepstrum of an all-pole model without gain: coefficients a `[..., order]` to c_1 to c_count `[..., count]`.

    c_n = -a_n - Σ_j (n - j) a_j c_(n-j) / n, over j from 1 to n - 1 (Atal 1974, JASA 55).
    """
    cepstrum: list[Tensor] = []
    for n in range(1, count + 1):
        value = -coefficients[..., n - 1]
        for j in range(1, n):
            value = value - (n - j) / n * coefficients[..., j - 1] * cepstrum[n - j - 1]
        cepstrum.append(value)
    return torch.stack(cepstrum, dim=-1)
