"""Configuration of Whisper's encoder (Radford et al. 2022, arXiv:2212.04356)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from speech.models.config import ModelConfig
from speech.models.pretrained import PretrainedConfig

if TYPE_CHECKING:
    from speech.features.config import FeatureConfig
    from speech.models.networks.base import AcousticModel

_POSITIONS = 1500
"""Output frames of 30 s."""


class WhisperConfig(PretrainedConfig):
    """Encoder of a pretrained Whisper model, with an output layer of its own."""

    kind: Literal["whisper"] = "whisper"
    can_be_split: ClassVar[bool] = True
    features: ClassVar[str] = "whisper_logmel"
    model_types: ClassVar[dict[str, str]] = {"whisper": "Whisper"}
    free_fields: ClassVar[frozenset[str]] = PretrainedConfig.free_fields | {"silence", "silence_s"}
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {
        "encoder": {"model_type": "whisper", "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    }
    subsampling: Literal[1, 2, 4, 8] = 2
    """Feature frames per output frame: 2."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of the front end's output, of what each layer adds, and before the output layer; Whisper was
    trained without."""

    silence: Literal["none", "encoder", "all"] = "none"
    """What hears silence behind each utterance up to 30 s, as in Whisper's training: nothing (`none`), the encoder, or
    all, what reads the encoder's frames included, as in `transformers`."""
    silence_s: float = Field(default=30.0, ge=1.0, le=30.0)
    """Seconds of this silence; 30 s in all at most, as in Whisper's training. Less takes less time."""

    @property
    @override
    def max_frames(self) -> int:
        return 2 * self.positions

    @property
    @override
    def min_frames(self) -> int:
        return 0 if self.silence == "none" else min(self.silence_frames, self.max_frames)

    @property
    def silence_frames(self) -> int:
        """Feature frames of silence behind an utterance, up to the end of the positions: an even number."""
        return 0 if self.silence == "none" else 2 * round(50 * self.silence_s)

    @property
    def output_silence(self) -> int:
        """Those of them that have output frames."""
        return self.silence_frames if self.silence == "all" else 0

    @property
    @override
    def unsplit(self) -> str:
        if self.silence == "none":
            return super().unsplit
        return (
            f"with model.silence={self.silence}, Whisper cannot be split into stages, whose numbers of frames would "
            "differ: use another strategy than pipeline, or set model.silence=none"
        )

    @property
    @override
    def num_features(self) -> int:
        return int(self.encoder["num_mel_bins"])

    @property
    def positions(self) -> int:
        """Output frames of the longest utterance."""
        return int(self.encoder.get("max_source_positions", _POSITIONS))

    @override
    def check_inputs(self, features: FeatureConfig, sample_rate: int) -> None:
        super().check_inputs(features, sample_rate)
        for name, value in (("frame_ms", 25.0), ("hop_ms", 10.0)):
            if getattr(features, name) != value:
                raise ValueError(f"features.{name} must be {value:g} for model {self.kind}: remove it")
        if self.silence != "none" and not getattr(features, "tail", False):
            raise ValueError(
                f"features.tail is false, but model.silence is {self.silence}, and frames at the end of the speech "
                "reach into the silence: set features.tail=true"
            )
        mels = self.encoder.get("num_mel_bins", features.width)
        if mels != features.width:
            raise ValueError(
                f"features.num_mels is {features.width}, but the pretrained model reads {mels}: set "
                f"features.num_mels={mels}"
            )

    @override
    def _sizes(self, encoder: dict[str, Any]) -> dict[str, Any]:
        encoder = {"num_mel_bins": 80, **encoder}
        return {"dim": encoder["d_model"], "layers": encoder["encoder_layers"], "encoder": encoder}

    @override
    def own_name(self, name: str) -> str | None:
        part, separator, rest = name.removeprefix("model.").partition("encoder.")
        if part or not separator:
            return None
        first = rest.partition(".")[0]
        if first in ("conv1", "conv2"):
            return f"subsampling.{rest}"
        if first == "embed_positions":
            return "subsampling.positions"
        return rest if first == "layers" else rest.replace("layer_norm.", "norm.") if first == "layer_norm" else None

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.whisper import WhisperEncoder

        return WhisperEncoder(self, num_features, vocab_size)
