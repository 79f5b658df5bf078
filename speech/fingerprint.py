"""Acoustic fingerprints that survive re-encoding, padding, resampling and changes of gain.

A 32-bit word every 6.5 ms encodes how the energies of 33 bands change from band to band and from frame to frame, after
Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System", ISMIR 2002, equation 1:

    F(n, m) = 1 if E(n, m) - E(n, m+1) - (E(n-1, m) - E(n-1, m+1)) > 0

with bands of equal width in log frequency between 300 and 1,900 Hz, a range that all speech codecs and sample rates
preserve. Two differences from the paper: the window is 128 ms instead of 370 ms (with longer windows, two takes of an
isolated digit look alike), and nearly silent frames, whose bits would be noise, are left out. A change of speed, or
another take of the same sentence, counts as a different recording.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import torch
from speech.audio import resample

if TYPE_CHECKING:
    from torch import Tensor

RATE = 4000
WINDOW, HOP = 512, 26
"""Samples at `RATE`: 128 ms, and 6.5 ms between words."""
BANDS = 33  # a word has a bit for each pair of neighbours
_LOW_HZ, _HIGH_HZ = 300.0, 1900.0
_SILENCE = 1e-4
"""Frames more than 40 dB below the loudest one have no word (ratio of energies)."""
NO_WORD = 0
_MARGIN = 0.25
"""Reduction of the limit of differing bits at one common word; n words have 1 / √n of it."""

Words = NDArray[np.uint32]
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth's multiplicative hash


@lru_cache(maxsize=1)
def _bands() -> tuple[Tensor, Tensor]:
    """Window [WINDOW], and the weight of each spectral line in each band [WINDOW // 2 + 1, BANDS]."""
    edges = np.geomspace(_LOW_HZ, _HIGH_HZ, BANDS + 1)
    lines = np.fft.rfftfreq(WINDOW, 1 / RATE)
    width = lines[1]
    # each spectral line covers an interval of frequencies; bands narrower than that share a line
    low, high = lines[:, None] - width / 2, lines[:, None] + width / 2
    overlap = np.minimum(high, edges[None, 1:]) - np.maximum(low, edges[None, :-1])
    return torch.hann_window(WINDOW), torch.from_numpy(np.clip(overlap / width, 0, None)).float()


def fingerprint(wave: Tensor, rate: int) -> Words:
    """Compute the words of a recording.

    Args:
        wave: Mono samples [num_samples].
        rate: Sample rate in Hz.

    Returns:
        uint32 [num_words], one every `HOP` samples at `RATE`; `NO_WORD` where the recording is silent.
    """
    window, bands = _bands()
    low = resample(wave.detach().to(torch.float32), rate, RATE)
    padded = torch.nn.functional.pad(low, (WINDOW // 2, WINDOW // 2 + HOP))
    spectra = torch.fft.rfft(padded.unfold(0, WINDOW, HOP) * window)
    energy = (spectra.real.square() + spectra.imag.square()) @ bands
    slope = energy[:, :-1] - energy[:, 1:]
    bits = (slope[1:] - slope[:-1]).numpy() > 0
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)[:, 0]
    total = energy.sum(dim=1).numpy()
    silent = total[1:] <= _SILENCE * max(float(total.max(initial=0.0)), 1e-12)
    return np.where(silent, np.uint32(NO_WORD), words)


def sketch(words: Words, size: int) -> tuple[Words, NDArray[np.int32]]:
    """Select the words with the smallest hashes for look-up, so that copies of a recording select the same ones.

    Broder, "On the resemblance and containment of documents", 1997: bottom-k sampling.

    Returns:
        The words and their positions, each [at most size].
    """
    kept, places = np.unique(words[words != NO_WORD], return_index=True)
    positions = np.flatnonzero(words != NO_WORD)[places].astype(np.int32)
    chosen = np.argsort(hash_words(kept), kind="stable")[:size]
    return kept[chosen], positions[chosen]


def hash_words(words: Words) -> NDArray[np.uint64]:
    """Hash each word, for a pseudo-random order."""
    mixed = words.astype(np.uint64) * _HASH
    return mixed ^ (mixed >> np.uint64(29))


def bit_errors(first: Words, second: Words, offset: int) -> tuple[float, float]:
    """Compare two recordings where they overlap at a given offset.

    Args:
        first: Words of one recording.
        second: Words of the other recording.
        offset: Position in `first` of the first word of `second`; may be negative.

    Returns:
        Share of differing bits in the common words, and the common words' share of the shorter recording's words.
    """
    begin, end = max(offset, 0), min(len(first), len(second) + offset)
    first_part, second_part = first[begin:end], second[begin - offset : end - offset]
    both = (first_part != NO_WORD) & (second_part != NO_WORD)
    common = int(both.sum())
    if end <= begin or common == 0:
        return 1.0, 0.0
    differing = int(np.bitwise_count(first_part[both] ^ second_part[both]).sum())
    shorter = min(int((first != NO_WORD).sum()), int((second != NO_WORD).sum()))
    return differing / (32 * common), common / shorter


def word_offset(first: Words, second: Words) -> int | None:
    """Offset at which most of the words that two recordings share agree.

    Returns:
        Position in `first` of the first word of `second`; None if they share no word.
    """
    places = [np.unique(words, return_index=True) for words in (first, second)]
    common, *at = np.intersect1d(places[0][0], places[1][0], assume_unique=True, return_indices=True)
    real = common != NO_WORD
    if not real.any():
        return None
    offsets = places[0][1][at[0][real]] - places[1][1][at[1][real]]
    values, counts = np.unique(offsets, return_counts=True)
    return int(values[counts.argmax()])


def certain_limit(limit: float, words: float) -> float:
    """Limit of the share of differing bits for a match, lowered if the recordings have few words in common.

    The fewer words, the less reliable the share, and neighbouring words overlap: two takes of a digit by one speaker,
    0.4 s long, may differ in only 15 % of the bits. The limit is lowered by `_MARGIN` / √words: by 0.03 at half a
    second, by less than 0.01 from four seconds on.

    Args:
        limit: Limit for long recordings.
        words: Number of common words.
    """
    return limit - _MARGIN / math.sqrt(max(words, 1.0))
