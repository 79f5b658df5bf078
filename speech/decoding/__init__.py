"""Decoding of a model's log posteriors to hypotheses.

    decoder = build_decoder(BeamConfig(beam=16), tokenizer)
    hypotheses = decoder.decode(log_probs, lengths)

To add a decoder, add a file with the decoder and its configuration, and a line in `DECODERS`.
"""

from __future__ import annotations

from typing import Annotated

from configurable.choices import OneOf
from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.decoding.base import DecodeConfig, Decoder
from speech.decoding.beam import BeamConfig, BeamDecoder
from speech.decoding.graph import GraphConfig, GraphDecoder
from speech.decoding.greedy import GreedyConfig, GreedyDecoder
from speech.decoding.token_lm import TokensConfig, TokensDecoder
from speech.decoding.transducer import TransducerDecodeConfig, TransducerSearch
from speech.decoding.words import WordsConfig, WordsDecoder
from speech.hmm.priors import StateOutputs
from speech.hypotheses import Alternative, DecodeError, Hypothesis
from speech.tokens import Tokenizer

__all__ = [
    "DECODERS",
    "Alternative",
    "AttentionDecodeConfig",
    "AttentionSearch",
    "BeamConfig",
    "BeamDecoder",
    "DecodeChoice",
    "DecodeConfig",
    "DecodeError",
    "Decoder",
    "GraphConfig",
    "GraphDecoder",
    "GreedyConfig",
    "GreedyDecoder",
    "Hypothesis",
    "TokensConfig",
    "TokensDecoder",
    "TransducerDecodeConfig",
    "TransducerSearch",
    "WordsConfig",
    "WordsDecoder",
    "build_decoder",
]

DECODERS: dict[str, type[DecodeConfig]] = {
    "greedy": GreedyConfig,
    "beam": BeamConfig,
    "tokens": TokensConfig,
    "words": WordsConfig,
    "graph": GraphConfig,
    "attention": AttentionDecodeConfig,
    "transducer": TransducerDecodeConfig,
}
DecodeChoice = Annotated[DecodeConfig, OneOf(DECODERS, "greedy")]
"""A field that takes the configuration of any decoder."""


def build_decoder(cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
    """Builds the configured decoder.

    Args:
        cfg: Its configuration.
        tokenizer: The model's tokens.
        states: The model's tied states, if its outputs are these.
    """
    return cfg.build(tokenizer, states)
