"""Finds duplicates among millions of texts or recordings in bounded memory, by sorted keys and an inverted index.

The word index is an external sort in two steps. Entries (word, recording, position) are spilled to files by word, which
yields pairs of recordings that share a word; these pairs are spilled to files by recording, which yields the pairs that
share several words at one offset. Memory is limited to one file, and time is nearly linear: each recording with a
frequent word is linked only to the next few longer ones, and to the shortest one that has the word. So all copies of a
recording are connected in a chain, and a recording that is contained in many longer ones is linked to each of them.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Labels = NDArray[np.int32]

_ENTRY = np.dtype([("word", "<u4"), ("recording", "<u4"), ("position", "<i4")])
_PAIR = np.dtype([("first", "<u4"), ("second", "<u4"), ("offset", "<i4")])
MATCH = np.dtype([("first", "<u4"), ("second", "<u4"), ("offset", "<i4"), ("votes", "<u4")])
"""Two recordings, first < second; the offset of the second within the first; the number of words that agree on it."""
_LINKS = 2
"""Number of the next recordings with the same word to which an entry is linked, besides the first one."""
_JITTER = 2
"""Offsets that differ by at most this count as equal: copies are not aligned to the grid of words."""


def text_keys(texts: Iterable[str]) -> Keys:
    """128-bit keys of texts (BLAKE2b), [num_texts, 2]: equal for equal texts, practically never for different ones."""
    data = bytearray()
    for text in texts:
        data += hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64, copy=False)


def repeated_texts(texts: Callable[[], Iterable[list[str]]], count: int, limit: int = 3) -> list[str]:
    """Find texts that occur more than once, exactly, with 8 bytes of memory per text.

    Args:
        texts: Returns an iterable over all texts in lists, on every call.
        count: Number of texts.
        limit: Maximum number of texts to return.
    """
    hashes = np.fromiter((hash(text) for part in texts() for text in part), dtype=np.int64, count=count)
    hashes.sort()
    suspects = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    repeated: list[str] = []
    # count a limited number of suspects at a time (all texts may be repeated), exactly (hashes may collide)
    for begin in range(0, len(suspects), 1000):
        some, seen = set(suspects[begin : begin + 1000].tolist()), Counter[str]()
        for part in texts():
            seen.update(text for text in part if hash(text) in some)
        repeated += [text for text, number in seen.items() if number > 1]
        if len(repeated) >= limit:
            break
    return repeated[:limit]


class SeenTexts:
    """A set of texts, stored as 128-bit keys in a hash table: 27 to 54 bytes per text, whatever its length.

    Open addressing with linear probing; a set of strings takes four times as much.
    """

    def __init__(self) -> None:
        self._high, self._low = array("q", bytes(8 << 10)), array("q", bytes(8 << 10))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Add a text; returns whether it is new."""
        high, low = hash(text) | 1, hash(f"{text}\n")  # two keyed hashes; 0 marks an empty slot
        place = self._place(high, low)
        if self._high[place]:
            return False
        self._high[place], self._low[place] = high, low
        self._count += 1
        if self._count * 5 > len(self._high) * 3:
            self._grow()
        return True

    def _place(self, high: int, low: int) -> int:
        """The slot of a key, or the empty slot where it belongs."""
        mask = len(self._high) - 1
        place = low & mask
        while (stored := self._high[place]) and (stored != high or self._low[place] != low):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old = self._high, self._low
        self._high, self._low = (array("q", bytes(16 * len(part))) for part in old)
        for high, low in zip(*old, strict=True):
            if high:
                place = self._place(high, low)
                self._high[place], self._low[place] = high, low


def equal_labels(keys: Keys) -> Labels:
    """Label each row by the first row with the same key.

    Args:
        keys: [num_rows, 2].
    """
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys stay in row order
    fresh = np.ones(len(order), dtype=bool)
    for column in (0, 1):
        values = keys[:, column][order]
        same = values[1:] == values[:-1]
        fresh[1:] = ~same if column == 0 else fresh[1:] | ~same
    heads = order[fresh].astype(np.int32)
    labels = np.empty(len(order), dtype=np.int32)
    labels[order] = heads[np.cumsum(fresh) - 1]
    return labels


def join_labels(labels: Labels, first: NDArray[np.integer], second: NDArray[np.integer]) -> Labels:
    """Merge the labels of pairs of rows: label each row by the first row to which it is connected."""
    joined = labels.copy()
    while len(first):
        heads_of_first, heads_of_second = joined[first], joined[second]
        low = np.minimum(heads_of_first, heads_of_second)
        hooked = joined.copy()
        for heads in (heads_of_first, heads_of_second):
            np.minimum.at(hooked, heads, low)
        while not np.array_equal(shorter := hooked[hooked], hooked):
            hooked = shorter
        if np.array_equal(hooked, joined):
            break
        joined = hooked
    return joined


class _Spill:
    """Rows partitioned into files by a key, so that each file fits in memory."""

    def __init__(self, folder: Path, dtype: np.dtype[np.void], parts: int, buffered: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._dtype, self._parts, self._buffered = folder, dtype, parts, buffered
        self._key = str((dtype.names or ("",))[0])
        self._rows: list[NDArray[np.void]] = []
        self._count = 0

    def add(self, rows: NDArray[np.void]) -> None:
        self._rows.append(rows)
        self._count += len(rows)
        if self._count >= self._buffered:
            self._flush()

    def _flush(self) -> None:
        if not self._count:
            return
        rows = np.concatenate(self._rows)
        self._rows, self._count = [], 0
        # multiplicative hashing spreads neighbouring keys over the parts
        mixed = rows[self._key].astype(np.uint64) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
        part = ((mixed * np.uint64(self._parts)) >> np.uint64(32)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=self._parts))
        for number, piece in enumerate(np.split(rows[order], ends[:-1])):
            if len(piece):
                with (self._folder / f"{number:04d}.bin").open("ab") as file:
                    file.write(piece.tobytes())

    def drain(self) -> Iterator[NDArray[np.void]]:
        """Yield the rows, file by file, and delete each file after reading it."""
        self._flush()
        for number in range(self._parts):
            path = self._folder / f"{number:04d}.bin"
            if path.exists():
                yield np.fromfile(path, dtype=self._dtype)
                path.unlink()


class WordIndex:
    """An inverted index on disk from words to recordings.

    Args:
        folder: An empty folder for its files, 12 bytes per entry; the caller removes it.
        parts: Number of files for the entries; the largest must fit in memory.
        buffered: Number of entries buffered in memory before they are written.
    """

    def __init__(self, folder: Path, parts: int = 128, buffered: int = 1 << 20) -> None:
        self._entries = _Spill(folder / "words", _ENTRY, parts, buffered)
        self._pairs = _Spill(folder / "pairs", _PAIR, parts, buffered)

    def add(self, recording: int, words: NDArray[np.uint32], positions: NDArray[np.int32]) -> None:
        """Add some words of a recording.

        Args:
            recording: Number of the recording.
            words: [num_words].
            positions: Positions of the words in the recording, [num_words].
        """
        rows = np.empty(len(words), dtype=_ENTRY)
        rows["word"], rows["recording"], rows["position"] = words, recording, positions
        self._entries.add(rows)

    def matches(self, rank: NDArray[np.uint32] | None = None) -> Iterator[NDArray[np.void]]:
        """Yield pairs of recordings that share words at one offset, as arrays of `MATCH`; consumes the index.

        Args:
            rank: Rank of each recording by length; by default its number.
        """
        for entries in self._entries.drain():
            for rows in _pairs_of(entries, entries["recording"] if rank is None else rank[entries["recording"]]):
                self._pairs.add(rows)
        for pairs in self._pairs.drain():
            yield _votes_of(pairs)


def _pairs_of(entries: NDArray[np.void], rank: NDArray[np.uint32]) -> Iterator[NDArray[np.void]]:
    """Pairs of recordings that share a word: each with the next few by rank, and with the first that has the word."""
    entries = entries[np.argsort(_joined(entries["word"], rank), kind="stable")]
    numbers = np.arange(len(entries))
    fresh = np.ones(len(entries), dtype=bool)
    fresh[1:] = entries["word"][1:] != entries["word"][:-1]
    head = np.maximum.accumulate(np.where(fresh, numbers, 0))
    far = np.flatnonzero(numbers - head > _LINKS)
    links = [(numbers[:-lag], numbers[lag:]) for lag in range(1, _LINKS + 1)]
    for left, right in [*links, (head[far], far)]:
        lefts, rights = entries[left], entries[right]
        linked = (lefts["word"] == rights["word"]) & (lefts["recording"] != rights["recording"])
        lefts, rights = lefts[linked], rights[linked]
        swap = lefts["recording"] > rights["recording"]
        rows = np.empty(len(lefts), dtype=_PAIR)
        rows["first"] = np.where(swap, rights["recording"], lefts["recording"])
        rows["second"] = np.where(swap, lefts["recording"], rights["recording"])
        rows["offset"] = (lefts["position"] - rights["position"]) * np.where(swap, -1, 1)
        yield rows


def _votes_of(pairs: NDArray[np.void]) -> NDArray[np.void]:
    """Count runs of similar offsets for each pair of recordings."""
    both = _joined(pairs["first"], pairs["second"])
    order = np.lexsort((pairs["offset"], both))
    both, offsets = both[order], pairs["offset"][order]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (both[1:] != both[:-1]) | (offsets[1:] - offsets[:-1] > _JITTER)
    starts = np.flatnonzero(fresh)
    votes = np.diff(np.append(starts, len(order)))
    matches = np.empty(len(starts), dtype=MATCH)
    matches["first"], matches["second"] = both[starts] >> np.uint64(32), both[starts] & np.uint64(0xFFFFFFFF)
    matches["offset"], matches["votes"] = offsets[starts + votes // 2], votes
    return matches


def _joined(high: NDArray[np.uint32], low: NDArray[np.uint32]) -> NDArray[np.uint64]:
    joined: NDArray[np.uint64] = (high.astype(np.uint64) << np.uint64(32)) | low
    return joined
