"""What a language model predicts: words, characters, or the tokens of an acoustic model."""

from __future__ import annotations

from dataclasses import dataclass

from speech.lm.base import LmError, Unit
from speech.tokens import SPACE_SYMBOL, Tokenizer


@dataclass(frozen=True)
class Units:
    """Cuts normalized lines into units.

    Raises:
        LmError: Tokens are wanted, but there is no tokenizer.
    """

    unit: Unit = "word"
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.unit == "token" and self.tokenizer is None:
            raise LmError("lm.unit token needs the tokenizer of the acoustic model: use word or character without one")

    def __call__(self, line: str) -> list[str]:
        """The units of a line; between the characters of two words stands "▁", as in the character tokenizer.

        Raises:
            TokenError: The tokenizer lacks a character or word.
        """
        words = line.split()
        if self.unit == "word":
            return words
        if self.unit == "character":
            return list(SPACE_SYMBOL.join(words))
        assert self.tokenizer is not None
        return [self.tokenizer.symbols[token] for token in self.tokenizer.encode(" ".join(words))]
