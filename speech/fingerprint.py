"""Acoustic fingerprints: the same recording is known again after re-encoding, padding, another rate or another gain.

Every 6.5 ms one 32-bit word says how the energy of 33 bands changes from band to band and from frame to frame, after
Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System", ISMIR 2002, equation 1:

    F(n, m) = 1 if E(n, m) - E(n, m+1) - (E(n-1, m) - E(n-1, m+1)) > 0

with bands of equal width in log frequency between 300 and 1,900 Hz, which all speech codecs and rates keep. Ours
differ in the window (128 ms instead of 370 ms: with longer ones two takes of an isolated digit look alike) and in
leaving out frames that are all but silent, where the bits would be noise. Changes of speed, and other takes of the
same sentence, are other recordings.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.audio import resample

RATE = 4000
WINDOW, HOP = 512, 26
"""Samples at `RATE`: 128 ms, and 6.5 ms between words."""
BANDS = 33
_LOW_HZ, _HIGH_HZ = 300.0, 1900.0
_SILENCE = 1e-4
"""Frames whose energy is less than this share of the loudest one's (40 dB) have no word."""
NO_WORD = 0
_MARGIN = 0.25

Words = NDArray[np.uint32]
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth's multiplicative hash


@lru_cache(maxsize=1)
def _bands() -> tuple[Tensor, Tensor]:
    """Window [WINDOW], and the share of each spectral line in each band [WINDOW // 2 + 1, BANDS]."""
    edges = np.geomspace(_LOW_HZ, _HIGH_HZ, BANDS + 1)
    lines = np.fft.rfftfreq(WINDOW, 1 / RATE)
    width = lines[1]
    # a line is a short piece of the frequency axis: bands narrower than a line share it
    low, high = lines[:, None] - width / 2, lines[:, None] + width / 2
    overlap = np.minimum(high, edges[None, 1:]) - np.maximum(low, edges[None, :-1])
    return torch.hann_window(WINDOW), torch.from_numpy(np.clip(overlap / width, 0, None)).float()


def fingerprint(wave: Tensor, rate: int) -> Words:
    """The words of a recording.

    Args:
        wave: Mono samples [num_samples].
        rate: Hz.

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
    """A few words by which a recording is looked up: those with the smallest hashes, so that copies choose alike.

    Broder, "On the resemblance and containment of documents", 1997: bottom-k sampling.

    Returns:
        The words and their positions, each [at most size].
    """
    kept, places = np.unique(words[words != NO_WORD], return_index=True)
    positions = np.flatnonzero(words != NO_WORD)[places].astype(np.int32)
    chosen = np.argsort(hash_words(kept), kind="stable")[:size]
    return kept[chosen], positions[chosen]


def hash_words(words: Words) -> NDArray[np.uint64]:
    """A hash of each word that orders them at random."""
    mixed = words.astype(np.uint64) * _HASH
    return mixed ^ (mixed >> np.uint64(29))


def bit_errors(first: Words, second: Words, offset: int) -> tuple[float, float]:
    """How far two recordings differ where one lies over the other.

    Args:
        first: Words of one.
        second: Words of the other.
        offset: Position in `first` of the second's first word; may be negative.

    Returns:
        Share of differing bits among the words that both have, and the share of the shorter one's words that both have.
    """
    begin, end = max(offset, 0), min(len(first), len(second) + offset)
    one, two = first[begin:end], second[begin - offset : end - offset]
    both = (one != NO_WORD) & (two != NO_WORD)
    common = int(both.sum())
    if end <= begin or common == 0:
        return 1.0, 0.0
    differing = int(np.bitwise_count(one[both] ^ two[both]).sum())
    shorter = min(int((first != NO_WORD).sum()), int((second != NO_WORD).sum()))
    return differing / (32 * common), common / shorter


def certain_limit(limit: float, words: float) -> float:
    """The share of differing bits that two recordings have to stay below to be one, if they have few words in common.

    The share is less certain the fewer words it is over, and they overlap: two takes of a digit by one speaker, 0.4 s
    long, may differ in 15 % of the bits only. The limit is lower by `_MARGIN` / √words: by 0.03 at half a second, by
    less than 0.01 from four seconds on.

    Args:
        limit: Of long recordings.
        words: That both have.
    """
    return limit - _MARGIN / math.sqrt(max(words, 1.0))
