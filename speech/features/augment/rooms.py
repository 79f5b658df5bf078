"""Simulated impulse responses of rooms; each is a pure function of its number, configuration and sample rate.

The direct sound is the first sample, so that a reverberated utterance keeps its timing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import torch
from speech.features.augment.base import between
from speech.features.augment.config import ReverbConfig
from speech.features.augment.draws import uniforms

if TYPE_CHECKING:
    from torch import Tensor


SPEED_OF_SOUND = 343.0
"""Metres per second."""
_SMALLEST, _LARGEST = (3.0, 2.5, 2.4), (9.0, 7.0, 3.5)  # rooms, metres
_WALL = 0.3  # nearest that speaker and microphone come to a wall, metres
_UNSHARED = 32_768  # values that one thread adds up (at::internal::GRAIN_SIZE)
_MAX_IMAGES = 60_000  # of one octant: then the tail is a matter of statistics, and of time


def decay_response(rt60: float, direct_db: float, sample_rate: int, generator: torch.Generator) -> Tensor:
    """Direct sound and, behind it, Gaussian noise whose power falls by 60 dB in `rt60` seconds.

    The statistical model of late reverberation: Polack 1988; h(t) = n(t) e^(-3 ln(10) t / RT60).

    Args:
        rt60: reverberation time in seconds.
        direct_db: energy of the direct sound relative to that of the tail.
        sample_rate: in Hz.
        generator: of the noise.

    Returns:
        float32 `[rt60 * sample_rate]`, the first sample 1.
    """
    num_samples = max(2, int(rt60 * sample_rate))
    times = torch.arange(1, num_samples) / sample_rate
    tail = torch.randn(num_samples - 1, generator=generator) * torch.exp(-3 * math.log(10) * times / rt60)
    # in parts that torch does not share among threads: the sum's rounding would depend on their number
    energy = torch.stack([part.sum() for part in torch.split(tail.square(), _UNSHARED)]).sum()
    tail = tail * (10 ** (-direct_db / 20) / energy.sqrt().clamp(min=1e-12))
    return torch.cat([torch.ones(1), tail])


def image_response(
    room: NDArray[np.float64], source: NDArray[np.float64], microphone: NDArray[np.float64], rt60: float, rate: int
) -> Tensor:
    """Impulse response of a shoebox room by the image method (J. Acoust. Soc. Am. 65, 1979, p. 943).

    All walls reflect alike; how much follows from the reverberation time by Eyring's formula. Each reflection changes
    the sign (Lehmann & Johansson 2008): with equal signs the sum would drift away from zero and need a high-pass.

    Args:
        room: length, width and height in metres, `[3]`.
        source: place of the speaker in metres from a corner, `[3]`.
        microphone: place of the microphone, `[3]`.
        rt60: reverberation time in seconds.
        rate: sample rate in Hz.

    Returns:
        float32 `[at most rt60 * rate]`, from the arrival of the direct sound on, which is 1.
    """
    volume = float(room.prod())
    surface = 2.0 * float(room[0] * room[1] + room[1] * room[2] + room[0] * room[2])
    reflection = math.exp(-0.0805 * volume / (surface * rt60))
    num_samples = max(2, int(rt60 * rate))
    direct = float(np.linalg.norm(source - microphone))
    reach = direct + rt60 * SPEED_OF_SOUND
    orders = np.minimum(np.ceil(reach / (2 * room)).astype(int), _limits(room, reach))
    response = np.zeros(num_samples)
    squares, bounces = zip(*(_axis(room[k], source[k], microphone[k], int(orders[k])) for k in range(3)), strict=True)
    distances = np.sqrt(squares[0][:, None, None] + squares[1][None, :, None] + squares[2][None, None, :]).ravel()
    counts = (bounces[0][:, None, None] + bounces[1][None, :, None] + bounces[2][None, None, :]).ravel()
    delays = np.rint((distances - direct) * (rate / SPEED_OF_SOUND)).astype(np.int64)
    heard = (delays >= 0) & (delays < num_samples)
    amplitudes = (-reflection) ** counts[heard] * (direct / np.maximum(distances[heard], 1e-3))
    response += np.bincount(delays[heard], amplitudes, minlength=num_samples)
    return torch.from_numpy(response).float()


def _limits(room: NDArray[np.float64], reach: float) -> NDArray[np.int64]:
    """Image orders along each axis that keep the number of images within bounds, nearest images first."""
    images = float((reach / room).prod())
    radius = reach * min(1.0, (_MAX_IMAGES / max(images, 1.0)) ** (1 / 3))
    limits: NDArray[np.int64] = np.maximum(1, np.ceil(radius / (2 * room))).astype(np.int64)
    return limits


def _axis(size: float, source: float, microphone: float, order: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Squared distances to the images along one axis, and how many reflections each has had."""
    numbers = np.arange(-order, order + 1)
    there = np.concatenate([2 * numbers * size + source, 2 * numbers * size - source]) - microphone
    return there**2, np.concatenate([np.abs(2 * numbers), np.abs(2 * numbers - 1)])


def simulate(config: ReverbConfig, number: int, sample_rate: int) -> Tensor:
    """The simulated impulse response of a number: float32 `[num_samples]`, the first sample that of direct sound."""
    draws = uniforms([number], f"room {config.kind}", 12)[0]
    rt60 = float(between(config.rt60_s, draws[0]))
    if config.kind == "decay":
        generator = torch.Generator().manual_seed(number)
        return decay_response(rt60, float(between(config.direct_db, draws[1])), sample_rate, generator)
    shares = draws[2:11].numpy().reshape(3, 3)
    room = np.asarray(_SMALLEST) + shares[0] * (np.asarray(_LARGEST) - np.asarray(_SMALLEST))
    source, microphone = (_WALL + share * (room - 2 * _WALL) for share in shares[1:])
    return image_response(room, source, microphone, rt60, sample_rate)
