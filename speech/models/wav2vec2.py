"""Configuration of wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477) and its kin, which read raw audio.

The others are HuBERT (arXiv:2106.07447), WavLM (arXiv:2110.13900), data2vec-audio (arXiv:2202.03555) and UniSpeech
(arXiv:2101.07597, arXiv:2110.05752).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from speech.models.config import ModelConfig
from speech.models.pretrained import PretrainedConfig

if TYPE_CHECKING:
    from speech.features.config import FeatureConfig
    from speech.models.networks.base import AcousticModel

_PREFIXES = ("wav2vec2.", "hubert.", "wavlm.", "data2vec_audio.", "unispeech.", "unispeech_sat.")
_RENAMED = {
    "feature_extractor.": "subsampling.",
    "feature_projection.": "subsampling.projection.",
    "encoder.pos_conv_embed.": "subsampling.positions.",
    "encoder.layers.": "layers.",
}
_WEIGHT_NORM = {"conv.weight_g": "conv.parametrizations.weight.original0"} | {
    "conv.weight_v": "conv.parametrizations.weight.original1"
}
"""Names of a normalized weight's length and direction: of older files, and now."""
_STRIDES = {"conv_stride": [5, 2, 2, 2, 2, 2, 2], "conv_kernel": [10, 3, 3, 3, 3, 2, 2]}
"""Of the published models, where a configuration has none: a frame every 320 samples."""
_SAMPLES = 160
"""Samples of a block of theirs, half as many as those of an output frame."""
_NOT_SUPPORTED = {"add_adapter": False, "adapter_attn_dim": None, "conv_pos_batch_norm": False}
"""Parts that some models have, and the values that mean that they are not there."""


class Wav2Vec2Config(PretrainedConfig):
    """Encoder of a pretrained wav2vec 2.0 model or of its kin, with an output layer of its own."""

    kind: Literal["wav2vec2"] = "wav2vec2"
    can_be_split: ClassVar[bool] = True
    features: ClassVar[str] = "waveform"
    model_types: ClassVar[dict[str, str]] = {
        "wav2vec2": "Wav2Vec2",
        "hubert": "Hubert",
        "wavlm": "WavLM",
        "data2vec-audio": "Data2VecAudio",
        "unispeech": "UniSpeech",
        "unispeech-sat": "UniSpeechSat",
    }
    subsamplings: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {
        "encoder": {
            "model_type": "wav2vec2",
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "conv_dim": [8, 8],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        }
    }
    subsampling: Literal[1, 2, 4, 8] = 2
    """Blocks of samples per output frame: 2, blocks of 10 ms."""

    @property
    @override
    def unsplit(self) -> str:
        if self.encoder.get("model_type") != "wavlm":
            return super().unsplit
        return (
            "WavLM cannot be split into stages, since all layers read the first one's relative positions: use another "
            "strategy than pipeline"
        )

    @property
    @override
    def num_features(self) -> int:
        return int(prod(self.encoder["conv_stride"])) // self.subsampling

    @override
    def check_inputs(self, features: FeatureConfig, sample_rate: int) -> None:
        super().check_inputs(features, sample_rate)
        if features.frame_ms != features.hop_ms:
            raise ValueError(f"features.frame_ms and hop_ms must be the same for model {self.kind}: remove both")
        samples = self.num_features if self.encoder else _SAMPLES
        if features.width != samples:
            raise ValueError(
                f"features.samples is {features.width}, but model {self.kind} reads blocks of {samples}: set "
                f"features.samples={samples}, and features.frame_ms and hop_ms to {1000 * samples / sample_rate:g}"
            )

    @override
    def check_preprocessor(self, features: FeatureConfig, preprocessor: Mapping[str, Any]) -> None:
        super().check_preprocessor(features, preprocessor)
        wanted = bool(preprocessor.get("do_normalize", getattr(features, "normalize", False)))
        if getattr(features, "normalize", wanted) != wanted:
            raise ValueError(
                f"features.normalize is {str(not wanted).lower()}, but the pretrained model's preprocessor_config.json "
                f"says do_normalize: {str(wanted).lower()}: set features.normalize={str(wanted).lower()}"
            )

    @override
    def _sizes(self, encoder: dict[str, Any]) -> dict[str, Any]:
        for name, absent in _NOT_SUPPORTED.items():
            if encoder.get(name, absent) != absent:
                raise ValueError(f"its config.json has {name}: {encoder[name]}, which is not supported")
        return {"dim": encoder["hidden_size"], "layers": encoder["num_hidden_layers"], "encoder": _STRIDES | encoder}

    @override
    def own_name(self, name: str) -> str | None:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        rest = name.removeprefix(prefix)
        for old, new in _WEIGHT_NORM.items():
            rest = f"{rest.removesuffix(old)}{new}" if rest.endswith(old) else rest
        if rest.startswith("encoder.layer_norm."):
            norm = "norm." if self.encoder.get("do_stable_layer_norm") else "subsampling.norm."
            return rest.replace("encoder.layer_norm.", norm)
        return next((new + rest.removeprefix(old) for old, new in _RENAMED.items() if rest.startswith(old)), None)

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.wav2vec2 import Wav2Vec2Encoder

        return Wav2Vec2Encoder(self, num_features, vocab_size)
