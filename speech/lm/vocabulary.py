"""The words of a language model and their numbers: <unk> is 0, <s> is 1, </s> is 2, as in KenLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
UNKNOWN_ID, START_ID, END_ID = 0, 1, 2
SPECIAL = (UNKNOWN, START, END)


class Vocabulary:
    """Words by number and numbers by word; a word that is not in it has the number of <unk>.

    Args:
        words: The words; the special ones are put first and may be left out.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._index = {word: number for number, word in enumerate(dict.fromkeys((*SPECIAL, *words)))}
        self._words = list(self._index)

    def __len__(self) -> int:
        return len(self._words)

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __contains__(self, word: str) -> bool:
        return word in self._index

    def __getitem__(self, number: int) -> str:
        return self._words[number]

    def index(self, word: str) -> int:
        """The number of a word."""
        return self._index.get(word, UNKNOWN_ID)

    def indices(self, words: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of words, `[num_words]`."""
        get = self._index.get
        return np.fromiter((get(word, UNKNOWN_ID) for word in words), np.int64, len(words))

    def merge(self, words: Sequence[str]) -> NDArray[np.int32]:
        """Adds the words that are missing, and returns the numbers of all of them, `[num_words]`."""
        for word in words:
            if self._index.setdefault(word, len(self._words)) == len(self._words):
                self._words.append(word)
        return self.indices(words).astype(np.int32)
