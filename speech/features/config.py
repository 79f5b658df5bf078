"""What all kinds of acoustic features have in common: their configuration, and how a kind is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from configurable.choices import Choice
from configurable.former_fields import former_fields
from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class FeatureConfig(Choice, ABC):
    """The features that a model receives; definitions and defaults are Kaldi's.

    Order of processing: feature extraction, normalization, deltas, splicing, stride.

    Attributes:
        adapted: Whether they are those of the speaker-adapted GMM-HMM, which one waveform does not determine.
        has_levels: Whether the energy of a frame can be told from them, which `cmvn_gate_db` and `trim_db` need.
        tiny: Fields of small features at 8 kHz: the tests of all kinds compute them.
    """

    adapted: ClassVar[bool] = False
    has_levels: ClassVar[bool] = True
    tiny: ClassVar[dict[str, Any]] = {}

    frame_ms: float = Field(default=25.0, gt=0, le=1000)
    """Length of a frame in milliseconds."""
    hop_ms: float = Field(default=10.0, gt=0, le=1000)
    """Distance between the starts of two frames in milliseconds."""
    dither: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise added to each frame, on the scale of 16-bit samples; 0 adds none, Kaldi uses
    1."""
    level_db: float = Field(default=0.0, ge=-60, le=0)
    """Scale each utterance so that its loudest frames have this level in dB of full scale (for example -20): quiet
    recordings look like loud ones; 0 leaves levels as they are."""
    cmvn: Literal["none", "global", "speaker", "utterance", "sliding"] = "global"
    """Normalization of mean and variance: none, over the training set, each speaker, each utterance, or a sliding
    window."""
    cmvn_variance: bool = True
    """Whether to normalize the variance as well as the mean."""
    cmvn_window: int = Field(default=600, ge=2)
    """Size of the window of `sliding`, in frames."""
    cmvn_center: bool = True
    """Whether the window of `sliding` is centred at the frame; otherwise it ends there (for streaming recognition)."""
    cmvn_gate_db: float = Field(default=0.0, ge=0)
    """Compute means and variances from speech only: from frames within this many dB of the utterance's loudest ones
    (for example 20), so that pauses do not affect them; 0 uses all frames. With `sliding`, the window counts only such
    frames."""
    cmvn_floor: float = Field(default=0.0, ge=0)
    """Floor of each feature in standard deviations below its mean (for example 4), so that digital silence and faint
    noise look the same; 0 disables it."""
    trim_db: float = Field(default=0.0, ge=0)
    """Recognition trims the silence before the first and after the last frame within this many dB of the loudest ones
    (for example 25) to a few frames, and gives tightly cut clips as many; 0 disables it. Validation hears the same,
    training the whole utterance."""
    delta_order: int = Field(default=0, ge=0, le=4)
    """Order of the deltas to append: 1 for deltas, 2 for deltas and delta-deltas."""
    splice_left: int = Field(default=0, ge=0)
    """Number of preceding frames to splice to each frame."""
    splice_right: int = Field(default=0, ge=0)
    """Number of following frames to splice to each frame."""
    stride: int = Field(default=1, ge=1)
    """Keep every n-th frame, starting with the first (after splicing)."""
    stored: bool = False
    """Compute the features once and store them in shards, instead of on the fly during training. Stored features are
    neither normalized nor spliced; they rule out augmentation of waveforms."""

    _former_fields = former_fields(cmvn_min_window=100, delta_window=2)

    @model_validator(mode="after")
    def _check_statistics(self) -> FeatureConfig:
        for option in ("cmvn_gate_db", "trim_db"):
            if getattr(self, option) and not self.has_levels:
                raise ValueError(f"{option} needs the level of frames, and features {self.kind} have none: remove it")
        for option in ("cmvn_gate_db", "cmvn_floor"):
            if getattr(self, option) and self.cmvn == "none":
                raise ValueError(f"{option} needs CMVN statistics, and cmvn is 'none': remove it or change cmvn")
        for option in ("cmvn_gate_db", "level_db"):
            if getattr(self, option) and self.cmvn == "sliding" and not self.cmvn_center:
                raise ValueError(
                    f"{option} needs the loudest frames of the whole utterance, but cmvn_center: false is for "
                    "streaming recognition: remove one of them"
                )
        return self

    @property
    def whole_utterance(self) -> str:
        """What makes a frame depend on its whole utterance, with the remedy; empty if nothing does."""
        if self.cmvn in ("utterance", "speaker") or (self.cmvn == "sliding" and self.cmvn_center):
            of = {"utterance": "the utterance", "speaker": "the speaker", "sliding": "a window with later frames"}
            return (
                f"features.cmvn={self.cmvn} normalizes by all frames of {of[self.cmvn]}: set features.cmvn=global, or "
                "features.cmvn=sliding with features.cmvn_center=false"
            )
        for option in ("level_db", "trim_db"):
            if getattr(self, option):
                return f"features.{option} needs the loudest frames of the whole utterance: set features.{option}=0"
        return ""

    @property
    def in_shards(self) -> bool:
        """Whether training reads them from shards, and has no waveforms."""
        return self.stored or self.adapted

    @property
    def components(self) -> tuple[FeatureConfig, ...]:
        """The features that are side by side in a frame: these alone, unless several kinds are appended."""
        return (self,)

    @property
    @abstractmethod
    def width(self) -> int:
        """Features of a frame, before deltas and splicing."""

    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        """Constant tensors that the formulas need beside filters, by name; they are buffers of the `FilterBank`.

        Args:
            sample_rate: Sample rate of the waveforms, Hz.

        Raises:
            FeatureError: Options contradict each other.
        """
        return {}

    def waves_before(self, bank: FilterBank, waves: Tensor, lengths: Tensor) -> Tensor:
        """What is done to whole waveforms before they are cut into frames; nothing by default.

        Args:
            bank: The filters.
            waves: `[B, N]`; what stands beyond an utterance may have any values.
            lengths: `[B]`, samples of each utterance.

        Returns:
            `[B, N]`, or longer: `num_frames` frames fit into it.
        """
        return waves

    def lead(self, bank: FilterBank) -> int:
        """Samples of a frame before the multiple of the hop that it stands for; 0 by default.

        If there are some, utterances are extended at both ends (`waves_before`) by what those frames read there.
        """
        return 0

    def num_frames(self, bank: FilterBank, lengths: Tensor) -> Tensor:
        """Numbers of frames `[B]` of utterances of `lengths` samples; by default, frames lie entirely inside them."""
        frames = torch.div(lengths - bank.frame_length, bank.hop_length, rounding_mode="floor") + 1
        return frames.clamp(min=0)

    def finished(self, feats: Tensor, num_frames: Tensor) -> Tensor:
        """What is done to an utterance's features at last, which depends on all its frames; nothing by default.

        Args:
            feats: `[B, T, width]`, zero in the padding.
            num_frames: `[B]`, frames of each utterance.
        """
        return feats

    def silence(self, bank: FilterBank, feats: Tensor, num_frames: Tensor) -> Tensor:
        """What a frame of digital silence beside each utterance looks like: `[B or 1, 1, width]`.

        Args:
            bank: The filters.
            feats: `[B, T, width]`, the utterances' features, not normalized.
            num_frames: `[B]`, frames of each utterance.
        """
        return bank.of_zeros(feats)

    @abstractmethod
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        """Frames of samples `[..., frame_length]` to features `[..., width]`.

        Args:
            bank: The filters, if the kind has any, and the steps that kinds share.
            frames: As cut from the waveforms.
        """

    @abstractmethod
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        """Natural logarithm of the energy of each frame of speech, for features `[..., width]`: `[...]`."""

    @property
    def frame_factor(self) -> int:
        """Factor by which deltas and splicing multiply the number of features per frame."""
        return (self.delta_order + 1) * (self.splice_left + 1 + self.splice_right)


class FilterBankConfig(FeatureConfig):
    """Features that are computed from the energies of a bank of filters."""

    tiny: ClassVar[dict[str, Any]] = {"num_mels": 15}

    num_mels: int = Field(default=80, ge=3)
    """Number of filters (Kaldi's MFCC use 23, its `hires` setup 40)."""
    low_freq: float = Field(default=20.0, ge=0)
    """Lower edge of the first filter in Hz."""
    high_freq: float = 0.0
    """Upper edge of the last filter in Hz; 0 or less is an offset from the Nyquist frequency."""
    preemphasis: float = Field(default=0.97, ge=0, le=1)
    """Coefficient of the first-order pre-emphasis filter."""
    scale: Literal["mel", "linear"] = "mel"
    """Scale on which the filters are equally wide: mel, or linear in Hz."""

    @property
    @override
    def width(self) -> int:
        return self.num_mels

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        # unless a kind differs, the features are logarithms of the filters' energies
        return bank.level(feats)


class FrameEnergyConfig(FilterBankConfig):
    """Features that may include the frame's energy."""

    use_energy: bool = False
    """Add the frame's log energy as the first feature (`fbank`), or put it in place of the first coefficient (`mfcc`,
    `plp`)."""

    _former_energy_fields = former_fields(energy_floor=0.0)
