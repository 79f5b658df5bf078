"""What all kinds of acoustic features have in common: their configuration, and how a kind is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from speech.choices import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


def leave_out_defaults(value: dict[str, Any], model: BaseModel, fields: tuple[str, ...]) -> dict[str, Any]:
    """A model's serialization without those of `fields` that have their default value.

    Stage outputs are addressed by the serialized configuration: a field that came later must not move the outputs of
    those who do not use it.
    """
    known = type(model).model_fields
    unused = {name for name in fields if getattr(model, name) == known[name].get_default(call_default_factory=True)}
    return {name: item for name, item in value.items() if name not in unused}


class FeatureConfig(Choice):
    """How a waveform becomes the frames that a model reads (definitions and defaults are Kaldi's).

    In this order: features of a kind, normalization, deltas, splicing, stride.
    """

    num_mels: int = Field(default=80, ge=3)
    """Number of filters (Kaldi computes MFCC from 23, or 40 for its `hires` setup)."""
    frame_ms: float = Field(default=25.0, gt=0)
    """Length of a frame in milliseconds."""
    hop_ms: float = Field(default=10.0, gt=0)
    """Distance between the starts of two frames in milliseconds."""
    low_freq: float = Field(default=20.0, ge=0)
    """Lower edge of the first filter in Hz."""
    high_freq: float = 0.0
    """Upper edge of the last filter in Hz; 0 or less is an offset from the Nyquist frequency."""
    dither: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise added to each frame, on the scale of 16-bit samples; 0 is none, Kaldi takes 1."""
    preemphasis: float = Field(default=0.97, ge=0, le=1)
    """Coefficient of the first-order pre-emphasis filter."""
    scale: Literal["mel", "linear"] = "mel"
    """Filters are equally wide on the mel scale, or in Hz."""
    cmvn: Literal["none", "global", "speaker", "utterance", "sliding"] = "global"
    """Over what mean and variance are normalized: the training set, each speaker, each utterance, or a window that
    slides over the utterance."""
    cmvn_variance: bool = True
    """Normalize the variance, too; else the mean only."""
    cmvn_window: int = Field(default=600, ge=2)
    """Frames of the window of "sliding"."""
    cmvn_min_window: int = Field(default=100, ge=1)
    """Frames that the window has at the start of an utterance, with `cmvn_center: false`."""
    cmvn_center: bool = True
    """The window of "sliding" surrounds the frame; else it ends there (recognition may run along with the audio)."""
    cmvn_gate_db: float = Field(default=0.0, ge=0)
    """Means and variances are those of speech: of frames within this many dB of the utterance's loudest ones, such
    as 20, so that pauses do not move them; 0 takes all frames. A window of "sliding" then counts such frames only."""
    cmvn_floor: float = Field(default=0.0, ge=0)
    """No feature is further below its mean than this many standard deviations, 4 for example, so that a pause looks the
    same whether it is digital silence or faint noise; 0 is no floor."""
    trim_db: float = Field(default=0.0, ge=0)
    """Recognition leaves out what comes before the first and after the last frame within this many dB of the loudest
    ones, 25 for example, but for 80 ms of silence; 0 leaves in all. Training hears everything."""
    delta_order: int = Field(default=0, ge=0, le=4)
    """Differences that are appended: 1 is deltas, 2 also deltas of deltas."""
    delta_window: int = Field(default=2, ge=1)
    """A delta is a regression over this many frames to either side."""
    splice_left: int = Field(default=0, ge=0)
    """Frames before each frame that are put in front of it."""
    splice_right: int = Field(default=0, ge=0)
    """Frames after each frame that are appended to it."""
    stride: int = Field(default=1, ge=1)
    """Keep every n-th frame, the first one included (after splicing)."""
    stored: bool = False
    """Compute the features once and store them in shards, instead of on the fly while training. What is stored is
    neither normalized nor spliced; augmentation of waveforms is impossible then."""

    @model_validator(mode="after")
    def _check_statistics(self) -> FeatureConfig:
        for option in ("cmvn_gate_db", "cmvn_floor"):
            if getattr(self, option) and self.cmvn == "none":
                raise ValueError(f"{option} is about statistics, and cmvn 'none' has none: leave it out")
        if self.cmvn_gate_db and self.cmvn == "sliding" and not self.cmvn_center:
            raise ValueError(
                "cmvn_gate_db looks for the loudest frames of the whole utterance, and cmvn_center: false is for "
                "recognition that runs along with the audio: leave one of them out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"kind": self.kind} | leave_out_defaults(handler(self), self, _LATER)

    @property
    def width(self) -> int:
        """Features of a frame, before deltas and splicing."""
        return self.num_mels

    def tables(self) -> dict[str, Tensor]:
        """Constant tensors that the formulas need beside the filters, by name; they are buffers of the `FilterBank`.

        Raises:
            FeatureError: Options contradict each other.
        """
        return {}

    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        """Frames of samples `[..., frame_length]` to features `[..., width]`.

        Args:
            bank: The filters, and the steps that kinds share.
            frames: As cut from the waveforms.
        """
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        """Natural logarithm of the energy of each frame of speech, for features `[..., width]`: `[...]`.

        By default the features are logarithms of the filters' energies.
        """
        return bank.level(feats)

    @property
    def frame_factor(self) -> int:
        """How many times wider deltas and splicing make a frame."""
        return (self.delta_order + 1) * (self.splice_left + 1 + self.splice_right)


_LATER = (
    "scale",
    "cmvn_variance",
    "cmvn_window",
    "cmvn_min_window",
    "cmvn_center",
    "cmvn_gate_db",
    "cmvn_floor",
    "trim_db",
    "delta_order",
    "delta_window",
    "splice_left",
    "splice_right",
    "stride",
)


class FrameEnergyConfig(FeatureConfig):
    """Features that can have the frame's energy among them."""

    use_energy: bool = False
    """The frame's log energy is one more feature before the filters' ("fbank"), or replaces the first coefficient
    ("mfcc")."""
    energy_floor: float = Field(default=0.0, ge=0)
    """Smallest energy of a frame with `use_energy`, on the scale of squared 16-bit samples; 0 is none."""
