"""Configuration of augmentation: one model for each part, and one that joins them in a training configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import (
    BaseModel,
    Field,
    field_validator,
    model_validator,
)

from configurable.configuration import Configuration
from configurable.former_fields import former_fields

Range = tuple[float, float]


def _ascending(name: str, ends: Range) -> None:
    if ends[0] > ends[1]:
        raise ValueError(f"{name}: the lower end {ends[0]} exceeds the upper end {ends[1]}: swap them")


class SpeedConfig(Configuration):
    """Speed perturbation."""

    factors: tuple[float, ...] = Field(min_length=1)
    """Each utterance is played at one of these speeds; pitch follows."""


class ReverbConfig(Configuration):
    """Reverberation by measured or simulated impulse responses."""

    kind: Literal["decay", "image"] = "decay"
    """Simulation: `decay` is noise under an exponential envelope behind the direct sound, `image` a shoebox room by
    the image method."""
    rt60_s: Range = (0.15, 0.6)
    """Reverberation time (decay by 60 dB) of the simulated rooms, seconds."""
    direct_db: Range = (0.0, 12.0)
    """Energy of the direct sound relative to the rest, for `decay`."""
    rooms: int = Field(default=200, ge=1)
    """Simulated impulse responses to choose from."""
    files: tuple[str, ...] = ()
    """Measured impulse responses instead of simulated ones: audio files, folders, or tables of them."""
    probability: float = Field(default=0.5, ge=0, le=1)
    """Share of the utterances that are reverberated."""

    @model_validator(mode="after")
    def _check(self) -> ReverbConfig:
        _ascending("rt60_s", self.rt60_s)
        _ascending("direct_db", self.direct_db)
        if not 0.05 <= self.rt60_s[0] <= self.rt60_s[1] <= 2.0:
            raise ValueError(f"rt60_s: {list(self.rt60_s)} is not between 0.05 and 2 seconds")
        return self


class NoiseConfig(Configuration):
    """Additive noise, generated or recorded."""

    snr_db: Range = (5.0, 20.0)
    """Signal-to-noise ratio over the whole utterance, dB."""
    generated: tuple[Literal["white", "pink"], ...] = ("white", "pink")
    """Generated noises."""
    files: tuple[str, ...] = ()
    """Recorded noises: audio files, folders, or tables of them (CSV, TSV, JSON lines)."""
    file_share: float = Field(default=1.0, ge=0, le=1)
    """Share of recorded noises, where there are `files`; the rest is generated."""
    probability: float = Field(default=1.0, ge=0, le=1)
    """Share of the utterances that noise is added to."""

    @model_validator(mode="after")
    def _check(self) -> NoiseConfig:
        _ascending("snr_db", self.snr_db)
        if not self.generated and not (self.files and self.file_share == 1.0):
            raise ValueError("generated: it is empty, and files do not make all of the noise: name white, pink or both")
        return self


class GainConfig(Configuration):
    """Change of level."""

    db: float = Field(gt=0)
    """Louder or softer by up to this many dB."""


class PauseConfig(Configuration):
    """Pauses before, within and after utterances."""

    probability: float = Field(default=0.25, ge=0, le=1)
    """Share of the utterances that get pauses."""
    edge_s: Range = (0.0, 0.5)
    """Seconds of the pause before an utterance; the one after it is drawn independently from the same range."""
    inner_s: Range = (0.0, 0.25)
    """Seconds of the pause in the quietest place of its middle half."""
    kinds: tuple[Literal["zeros", "noise", "room"], ...] = Field(default=("zeros", "noise", "room"), min_length=1)
    """Digital silence, white or pink noise, or room tone: noise that sounds like the utterance's quietest part."""
    level_db: Range = (-50.0, -10.0)
    """Level of `noise` relative to the utterance's."""
    first_epoch: int = Field(default=1, ge=1)
    """The first epoch with pauses, from 1: on little speech, CTC learns where tokens are sooner without them."""

    @model_validator(mode="after")
    def _check(self) -> PauseConfig:
        for name in ("edge_s", "inner_s", "level_db"):
            _ascending(name, getattr(self, name))
        for name in ("edge_s", "inner_s"):
            low, high = getattr(self, name)
            if not 0 <= low <= high <= 10:
                raise ValueError(f"{name}: {[low, high]} is not between 0 and 10 seconds")
        return self


class TimeWarpConfig(Configuration):
    """SpecAugment's time warping."""

    frames: int = Field(ge=1)
    """A point of the utterance is moved by up to this many frames."""


class MaskConfig(Configuration):
    """SpecAugment's masks."""

    time_masks: int = Field(default=2, ge=0)
    """Number of time masks in an utterance."""
    time_mask_frames: int = Field(default=25, ge=0)
    """Longest time mask, in frames."""
    time_mask_share: float = Field(default=0.2, ge=0, le=1)
    """Longest time mask, as a share of the utterance."""
    freq_masks: int = Field(default=2, ge=0)
    """Number of frequency masks in an utterance."""
    freq_mask_bins: int = Field(default=15, ge=0)
    """Widest frequency mask, in features."""


class AugmentConfig(Configuration):
    """How training data are varied: speed, reverberation, noise, gain, pauses; on features, time warp and masks."""

    enabled: bool = True
    """Augment at all."""
    time_masks: int = Field(default=2, ge=0)
    """Number of time masks in an utterance; masks may overlap."""
    time_mask_frames: int = Field(default=25, ge=0)
    """Longest time mask, in frames."""
    time_mask_share: float = Field(default=0.2, ge=0, le=1)
    """Longest time mask, as a share of the utterance."""
    freq_masks: int = Field(default=2, ge=0)
    """Number of frequency masks in an utterance."""
    freq_mask_bins: int = Field(default=15, ge=0)
    """Widest frequency mask, in features."""
    speed_factors: tuple[float, ...] = ()
    """Each utterance is played at one of these speeds (pitch follows), such as 0.9, 1.0, 1.1; empty is none."""
    gain_db: float = Field(default=0.0, ge=0)
    """Change the level by up to this many dB, louder or softer."""
    noise: NoiseConfig | None = None
    """Mix noise in: recorded, white or pink."""
    reverb: ReverbConfig | None = None
    """Reverberate."""
    pauses: PauseConfig | None = None
    """Put pauses before, within and after some utterances."""
    time_warp_frames: int = Field(default=0, ge=0)
    """Move a point of the utterance by up to this many frames, stretching one side and squeezing the other; 0: none."""

    _former = former_fields("write `noise: {snr_db: [5, 20]}`", noise_snr_db=None)

    @field_validator("speed_factors")
    @classmethod
    def _check_speed(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        for factor in factors:
            if not 0.5 <= factor <= 2.0:
                raise ValueError(f"speed_factors: {factor} is not between 0.5 and 2")
        return factors

    def parts(self) -> dict[str, BaseModel]:
        """The wanted augmentations by their names in the registry, in the order in which they are applied."""
        if not self.enabled:
            return {}
        parts: dict[str, BaseModel | None] = {
            "speed": SpeedConfig(factors=self.speed_factors) if self.speed_factors else None,
            "reverb": self.reverb,
            "noise": self.noise,
            "gain": GainConfig(db=self.gain_db) if self.gain_db > 0 else None,
            "pauses": self.pauses,
            "time_warp": TimeWarpConfig(frames=self.time_warp_frames) if self.time_warp_frames else None,
            "masks": self._masks() if self.time_masks + self.freq_masks else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def before_pauses(self) -> AugmentConfig:
        """The augmentation of the epochs before `pauses.first_epoch`."""
        return self.model_copy(update={"pauses": None})

    def _masks(self) -> MaskConfig:
        return MaskConfig(**{name: getattr(self, name) for name in MaskConfig.model_fields})

    def wave_fields(self) -> list[str]:
        """Fields of this configuration that change waveforms, for messages."""
        fields = ("speed_factors", "reverb", "noise", "gain_db", "pauses") if self.enabled else ()
        return [name for name in fields if getattr(self, name)]

    def refuse_waves(self, why: str, remedy: str = "") -> None:
        """Check that nothing here changes waveforms, where there are stored features only.

        Args:
            why: The setting because of which there are stored features.
            remedy: Another remedy than to leave the fields out.

        Raises:
            ValueError: something does; the message names it.
        """
        if fields := self.wave_fields():
            raise ValueError(
                f"{why} leaves no waveforms to change while training, but train.augment has "
                f"{', '.join(fields)}: leave {'it' if len(fields) == 1 else 'them'} out{remedy and ', or '}{remedy}"
            )

    def refuse_insertions(self) -> None:
        """Check that nothing here moves frames where their labels cannot follow; they follow speed and time warping.

        Raises:
            ValueError: something does; the message names it.
        """
        if "pauses" in self.parts():
            raise ValueError(
                "aligned states cannot follow pauses of train.augment: give data.pauses instead, which is there when "
                "states are aligned (speed and time warping are fine), or use another objective"
            )

    def with_files(self, change: Callable[[str], str]) -> AugmentConfig:
        """This configuration with other paths of files."""
        given = {name: part for name in ("noise", "reverb") if (part := getattr(self, name)) is not None}
        changed = {
            name: part.model_copy(update={"files": tuple(change(file) for file in part.files)})
            for name, part in given.items()
        }
        return self.model_copy(update=changed)

    def file_lists(self) -> list[str]:
        """Files, folders and tables that noises and impulse responses are read from."""
        if not self.enabled:
            return []
        return [*(self.noise.files if self.noise else ()), *(self.reverb.files if self.reverb else ())]
