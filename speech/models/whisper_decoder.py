"""Configuration of Whisper's decoder (Radford et al. 2022, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from speech.models.decoder_networks import DecoderNetworkConfig

if TYPE_CHECKING:
    from speech.models.networks.decoder import DecoderNetwork

_FIXED = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}
"""What is the same in all published models."""


class WhisperDecoderConfig(DecoderNetworkConfig):
    """Decoder of a pretrained Whisper model; its sizes are those of the model's `config.json`."""

    kind: Literal["whisper"] = "whisper"
    tiny: ClassVar[dict[str, Any]] = DecoderNetworkConfig.tiny | {"positions": 16}
    dim: int = Field(default=512, ge=8)
    """Width of a token's vector."""
    layers: int = Field(default=6, ge=1)
    """Decoder layers."""
    heads: int = Field(default=8, ge=1)
    """Attention heads per layer."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of the embeddings and of each module's output; Whisper was trained without."""
    positions: int = Field(default=448, ge=2)
    """Tokens of a text at most, those that precede it included."""
    language: str = "en"
    """Code of the language that is written, or `auto`: recognition takes the most probable one of each utterance, and
    training the one that the data name. Ignored by models for English only."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """Whether the text is in the language of the speech, or in English."""
    prompt: str = ""
    """What was said or written before, such as names: texts continue it."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and number of each head that follows the speech, for words' times; by default those of the upper half of
    the layers."""

    @model_validator(mode="after")
    def _check_alignment_heads(self) -> Self:
        for layer, head in self.alignment_heads:
            if not (0 <= layer < self.layers and 0 <= head < self.heads):
                raise ValueError(f"alignment_heads names head {head} of layer {layer}, which is not there")
        return self

    def described(self, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Self:
        """This configuration with the sizes of a published model.

        Args:
            config: Its `config.json`.
            generation: Its `generation_config.json`; may be empty.

        Raises:
            ValueError: It is no Whisper model, or has what published ones have not.
        """
        if config.get("model_type") != "whisper":
            raise ValueError(f"model_type is {config.get('model_type')!r}, not 'whisper'")
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                raise ValueError(f"{name} is {config[name]!r}, but Whisper models have {value!r}")
        try:
            dim, hidden = int(config["d_model"]), int(config["decoder_ffn_dim"])
            sizes = {
                "layers": config["decoder_layers"],
                "heads": config["decoder_attention_heads"],
                "positions": config["max_target_positions"],
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a size of the decoder is missing or no number: {error}") from error
        if dim < 1 or hidden % dim:
            raise ValueError(f"decoder_ffn_dim is {hidden}, which is no multiple of d_model, {dim}")
        heads = generation.get("alignment_heads") or ()
        sizes |= {"dim": dim, "feed_forward": hidden // dim, "alignment_heads": heads}
        return type(self).model_validate({**self.model_dump(), **sizes})

    @property
    def asked(self) -> dict[str, str]:
        """What the tokens that precede a text ask for, as `WhisperTokens` has it."""
        return {"language": self.language, "task": self.task, "prompt": self.prompt}

    @property
    @override
    def tells_languages(self) -> bool:
        return self.language == "auto"

    @override
    def build(self, encoder_width: int, vocab_size: int) -> DecoderNetwork:
        from speech.models.networks.whisper_decoder import WhisperDecoder

        return WhisperDecoder(self, encoder_width, vocab_size)
