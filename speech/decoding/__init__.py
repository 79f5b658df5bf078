"""Decoding: from a model's log posteriors to hypotheses.

    decoder = build_decoder(DecodeConfig(kind="beam"), tokenizer)
    hypotheses = decoder.decode(log_probs, lengths)

A new kind of decoder is one file beside `greedy.py` and one line in `DECODERS`.
"""

from __future__ import annotations

from speech.decoding.base import DecodeConfig, DecodeError, Decoder, Hypothesis
from speech.decoding.beam import BeamDecoder
from speech.decoding.greedy import GreedyDecoder
from speech.tokens import Tokenizer

__all__ = [
    "DECODERS",
    "BeamDecoder",
    "DecodeConfig",
    "DecodeError",
    "Decoder",
    "GreedyDecoder",
    "Hypothesis",
    "build_decoder",
]

DECODERS: dict[str, type[Decoder]] = {"greedy": GreedyDecoder, "beam": BeamDecoder}


def build_decoder(cfg: DecodeConfig, tokenizer: Tokenizer) -> Decoder:
    """Makes the decoder that the configuration asks for."""
    return DECODERS[cfg.kind](cfg, tokenizer)
