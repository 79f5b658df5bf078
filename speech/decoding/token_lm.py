"""Decoding with an n-gram language model of tokens, without a list of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder
from speech.decoding.beam import BeamDecoder
from speech.decoding.hot_words import HOT_WORDS_FILE, BiasedConfig
from speech.hmm.priors import StateOutputs
from speech.hypotheses import DecodeError
from speech.lm.kenlm import FlashlightLm, load_lm
from speech.tokens import Tokenizer


class TokensConfig(BiasedConfig):
    """The best token sequence over all its alignments, with a language model of tokens."""

    kind: Literal["tokens"] = "tokens"
    packages: ClassVar[tuple[str, ...]] = ("flashlight-text",)
    lm: str = ""
    """Language model of tokens, written as the tokenizer writes them (the space is ▁): an ARPA file (also .gz) or a
    KenLM binary. Empty: that of the pipeline's stage `lm`."""
    lm_weight: float = Field(default=1.0, ge=0)
    """Factor of the language model's log10 probabilities; 2.3 makes them natural logarithms."""
    beam: int = Field(default=64, ge=1)
    """Number of partial hypotheses that are kept after each frame."""
    beam_tokens: int = Field(default=20, ge=0)
    """Number of tokens tried in each frame, the most probable ones; 0 for all."""
    beam_threshold: float = Field(default=20.0, gt=0, le=1e6)
    """A partial hypothesis is dropped when its score is this much below the best one's."""
    nbest: int = Field(default=1, ge=1)
    """Number of hypotheses that are given of each utterance."""

    file_fields: ClassVar[dict[str, str]] = {"lm": "lm", **HOT_WORDS_FILE}
    lm_unit: ClassVar[str] = "token"
    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"lm_weight": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)}

    @override
    def lacking(self) -> str:
        return "" if self.lm else "decode.kind tokens needs a language model of tokens: give decode.lm (an ARPA file)"

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        return TokensDecoder(self, tokenizer, states)


class TokensDecoder(BeamDecoder):
    """Prefix beam search with a language model of the model's own tokens: of words, if tokens are words."""

    slow = True
    native = ("_lm",)
    cfg: TokensConfig  # type: ignore[assignment]

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        super().__init__(cfg, tokenizer, states)
        self._lm: FlashlightLm | None = None

    @override
    def with_config(self, cfg: DecodeConfig) -> TokensDecoder:
        made = TokensDecoder(cfg, self.tokenizer)
        if made.cfg.files() == self.cfg.files():
            made._lm = self._lm
        return made

    def prepare(self) -> None:
        """Read the language model and the hot words now, not at the first utterance.

        Raises:
            LmError: The language model cannot be read.
            DecodeError: The configuration names none, or the hot words cannot be read.
        """
        super().prepare()
        if self._lm is None:
            if lacking := self.cfg.lacking():
                raise DecodeError(lacking)
            self._lm = load_lm(self.cfg.lm, self.tokenizer.symbols)

    def _model(self) -> tuple[FlashlightLm, float]:
        self.prepare()
        assert self._lm is not None
        return self._lm, self.cfg.lm_weight
