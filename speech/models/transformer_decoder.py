"""Configuration of our own Transformer decoder (Vaswani et al. 2017, arXiv:1706.03762)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from speech.models.decoder_networks import DecoderNetworkConfig

if TYPE_CHECKING:
    from speech.models.networks.decoder import DecoderNetwork


class TransformerDecoderConfig(DecoderNetworkConfig):
    """Transformer decoder with normalization before each module and sinusoidal positions."""

    kind: Literal["transformer"] = "transformer"
    language: Literal["none", "auto"] = "none"
    """`auto` puts a token of the language before each text: in training that of the data, in recognition one that is
    given, or the most probable one."""

    @property
    @override
    def tells_languages(self) -> bool:
        return self.language == "auto"

    @override
    def build(self, encoder_width: int, vocab_size: int) -> DecoderNetwork:
        from speech.models.networks.transformer_decoder import TransformerDecoder

        return TransformerDecoder(self, encoder_width, vocab_size)
