"""Text as numbers on disk: what the estimators count.

Each block of text becomes an array of word numbers, `<s> w w w </s> <s> w …`. Processes number the words of their block
by themselves; a second small array leads from a block's numbers to those of the vocabulary, in which words are numbered
by first appearance. So the result does not depend on how the text was cut into blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speech.lm.arrays import save_array
from speech.lm.base import LmError, batches
from speech.lm.processes import in_processes
from speech.lm.sources import Block, Text
from speech.lm.vocabulary import END, START, Vocabulary

_LINES = 100_000  # of a block of transcripts: about ten megabytes of text
Encoded = tuple[Path, list[str], Counter[str]]


@dataclass(frozen=True)
class EncodedText:
    """Text as numbers, in files of a scratch folder."""

    words: Vocabulary
    blocks: tuple[Path, ...]
    """One `.npy` for each block, beside it one `.words.npy` with the vocabulary's numbers of the block's."""
    counts: Counter[str]
    """Lines by what became of them (see `Block`), `tokens` and `types`."""

    def sentences(self) -> Iterator[NDArray[np.int32]]:
        """Yields each block's numbers, `[tokens]`."""
        for block in self.blocks:
            yield load_block(block)


def encode_text(text: Text, folder: Path) -> EncodedText:
    """Normalizes and numbers a text, in the text's number of processes.

    Args:
        text: What to read.
        folder: Scratch folder, which must exist.
    """
    return _merged(_encoded(text, folder), folder)


def encode_lines(lines: Iterable[str], folder: Path, block_lines: int = _LINES) -> EncodedText:
    """Numbers lines of words with spaces between them, as they are; an empty line is an empty sentence."""
    blocks = (Block(batch, Counter(lines=len(batch), kept=len(batch))) for batch in batches(lines, block_lines))
    return _merged((encode_block(block, _path(folder, number)) for number, block in enumerate(blocks)), folder)


def load_block(path: Path) -> NDArray[np.int32]:
    """One block's numbers in the vocabulary, `[tokens]`."""
    words = np.load(path.with_suffix(".words.npy"), allow_pickle=False)
    return words[np.load(path, allow_pickle=False)]  # type: ignore[no-any-return]


def encode_block(block: Block, path: Path) -> Encoded:
    """Writes a block's own numbers; returns the path, the block's words in order of appearance, and its counts.

    Raises:
        LmError: A line holds a word that has a meaning in language models.
    """
    counts = Counter(block.counts)
    inner = f" {END} {START} ".join(block.lines)
    # An empty line leaves two spaces in a row.
    tokens = f"{START} {inner} {END}".split() if block.lines else []
    index = {word: number for number, word in enumerate(dict.fromkeys(tokens))}
    ids = np.fromiter(map(index.__getitem__, tokens), np.int32, len(tokens))
    starts = int(np.count_nonzero(ids == 0))  # the first token is <s>
    ends = int(np.count_nonzero(ids == index.get(END, -1)))
    if (starts, ends) != (len(block.lines), len(block.lines)) or "<unk>" in index:
        raise LmError(
            "the text holds <s>, </s> or <unk>, which mean something in a language model: take them out of it"
        )
    counts["tokens"] += len(tokens) - 2 * len(block.lines)
    save_array(path, ids)
    return path, list(index), counts


def _encoded(text: Text, folder: Path) -> Iterator[Encoded]:
    number = 0
    for block in text.prepared():
        yield encode_block(block, _path(folder, number))
        number += 1
    pieces = (
        (text.clean, data, counts, _path(folder, at)) for at, (data, counts) in enumerate(text.raw_blocks(), number)
    )
    yield from in_processes(_clean_and_encode, pieces, text.workers)


def _clean_and_encode(
    clean: Callable[[bytes, Counter[str]], Block], data: bytes, counts: Counter[str], path: Path
) -> Encoded:
    return encode_block(clean(data, counts), path)


def _merged(encoded: Iterable[Encoded], folder: Path) -> EncodedText:
    """Numbers the words of all blocks, and writes where each block's numbers lead."""
    words, blocks, counts = Vocabulary(), [], Counter[str]()
    for path, types, block_counts in encoded:
        save_array(path.with_suffix(".words.npy"), words.merge(types))
        blocks.append(path)
        counts += block_counts
    if not counts["kept"]:
        raise LmError(f"there is no text for a language model: {dict(counts)}; name text in lm.text.paths")
    counts["types"] = len(words) - 3
    return EncodedText(words, tuple(blocks), counts)


def _path(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05}.npy"
