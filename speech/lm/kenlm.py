"""Models in ARPA files and KenLM's binary files, queried by the KenLM in flashlight-text's wheel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typing_extensions import override

from speech.lm.base import LanguageModel, LmError
from speech.lm.vocabulary import END_ID, Vocabulary


class KenlmModel(LanguageModel):
    """A model that KenLM queries.

    Args:
        path: An ARPA file or a binary file.
        words: The words that will be asked for: the library does not list those of the file.

    Raises:
        LmError: KenLM cannot read the file.
    """

    def __init__(self, path: Path | str, words: Iterable[str]) -> None:
        from speech.decoding.language_model import LanguageModelError, load_lm

        self.words = Vocabulary(words)
        try:
            self._model: Any = load_lm(str(path), list(self.words))
        except LanguageModelError as error:
            raise LmError(str(error)) from error
        self.start = self._model.start(False)

    @override
    def score(self, state: Any, word: int) -> tuple[Any, float]:
        after, log_prob = self._model.finish(state) if word == END_ID else self._model.score(state, word)
        return after, float(log_prob)
