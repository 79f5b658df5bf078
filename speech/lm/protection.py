"""Keeps the test set out of the text: lines that share a sequence of words with protected transcripts are found.

A language model that has read the test set's sentences predicts them too well, and the error rate means nothing. Books
and crawled pages often hold what test sets were read from. A sequence of eight words that comes twice by chance is
rare; shorter transcripts cannot be protected this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_PRIME = 0x9E3779B97F4A7C15  # odd, bits well mixed: the golden ratio's 64 bits


class Protection:
    """Finds lines that share a word sequence with protected transcripts.

    Sequences are compared by 64-bit hashes of their words' numbers: with 10^8 words of text and 10^5 protected
    sequences, one line in a million such texts is dropped by mistake.

    Args:
        transcripts: Normalized transcripts of the test and validation sets.
        length: Number of words in a sequence.
    """

    def __init__(self, transcripts: Iterable[str], length: int = 8) -> None:
        self.length = length
        lines = [transcript.split() for transcript in transcripts]
        self.too_short = sum(len(words) < length for words in lines)
        words = dict.fromkeys(word for line in lines if len(line) >= length for word in line)
        self._index = {word: number for number, word in enumerate(words, 1)}
        self._hashes = np.unique(_hashes(*self._numbered(lines), length)[0])

    def __len__(self) -> int:
        """Number of different protected sequences."""
        return len(self._hashes)

    def found(self, lines: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each line holds a protected sequence, `[lines]`."""
        hit = np.zeros(len(lines), dtype=np.bool_)
        if len(self._hashes):
            hashes, owners = _hashes(*self._numbered([line.split() for line in lines]), self.length)
            places = np.minimum(self._hashes.searchsorted(hashes), len(self._hashes) - 1)
            hit[owners[self._hashes[places] == hashes]] = True
        return hit

    def _numbered(self, lines: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Numbers of all words, 0 for those that no protected transcript has, and the line of each, `[words]`."""
        get = self._index.get
        lengths = np.fromiter(map(len, lines), np.int64, len(lines))
        numbers = np.fromiter((get(word, 0) for line in lines for word in line), np.uint64, int(lengths.sum()))
        return numbers, np.repeat(np.arange(len(lines)), lengths)


def _hashes(
    numbers: NDArray[np.uint64], owners: NDArray[np.int64], length: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the sequences that lie in one line, and their lines."""
    count = max(len(numbers) - length + 1, 0)
    starts = np.flatnonzero(owners[:count] == owners[length - 1 :])
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ numbers[starts + offset]) * np.uint64(_PRIME)
        hashes ^= hashes >> np.uint64(29)
    return hashes, owners[starts]
