"""Cross-entropy of each frame with its tied state from a forced alignment: hybrid training (Bourlard and Morgan 1994).

Frame i of the output stands for aligned frame i * `frame_factor`, as in a subsampling network's first frame stands for
the first. The number of frames may differ by a few, since features treat the edges of an utterance in different ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside
from speech.objectives.base import (
    NO_STATE,
    FrameTargets,
    Objective,
    ObjectiveConfig,
    Targets,
    smoothed_log_probs,
)

if TYPE_CHECKING:
    from torch import Tensor

SLACK = 5
"""Aligned frames by which an utterance's alignment may differ from its output in length."""


class FrameCrossEntropyConfig(ObjectiveConfig):
    """Cross-entropy with the tied states of forced alignments, frame by frame."""

    kind: Literal["frame_cross_entropy"] = "frame_cross_entropy"
    alignments: str = ""
    """Folder or URL of the alignments: `train.parquet` and `valid.parquet`. Empty: those of the stage `align`."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's probability that is spread over all states (Szegedy et al. 2016)."""

    @property
    @override
    def alignments_folder(self) -> str:
        return self.alignments

    @override
    def build(self) -> Objective:
        return FrameCrossEntropy(self)


class FrameCrossEntropy(Objective):
    """The negative log probability of each frame's state; frames without one do not count."""

    cfg: FrameCrossEntropyConfig

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        states, unalignable = self._states(outputs, frames, targets)
        counted = states != NO_STATE
        chosen = smoothed_log_probs(outputs, states.clamp(min=0), self.cfg.label_smoothing)
        return -chosen.masked_fill(~counted, 0.0).sum(dim=1), unalignable

    def _states(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        """The state of each output frame [batch, frames], and how many utterances have none that fit."""
        assert isinstance(targets, FrameTargets)
        factor, num_frames, frames = targets.frame_factor, outputs.shape[1], frames.cpu()
        states = targets.states[:, ::factor]
        missing = num_frames - states.shape[1]
        states = torch.nn.functional.pad(states, (0, max(0, missing)), value=NO_STATE)[:, :num_frames]
        lengths = targets.state_lengths
        differ = (torch.div(lengths + factor - 1, factor, rounding_mode="floor") - frames).abs()
        wrong = (lengths == 0) | (differ > max(1, SLACK // factor))
        states = states.masked_fill(wrong[:, None] | (torch.arange(num_frames) >= frames[:, None]), NO_STATE)
        return beside(states, outputs).long(), int(wrong.sum())

    @override
    def items(self, targets: Targets) -> int:
        assert isinstance(targets, FrameTargets)
        return int((targets.states[:, :: targets.frame_factor] != NO_STATE).sum())

    @override
    def figures(self, outputs: Tensor, frames: Tensor, targets: Targets) -> dict[str, tuple[float, int]]:
        states, _ = self._states(outputs, frames, targets)
        counted = states != NO_STATE
        right = (outputs.argmax(dim=2) == states) & counted
        return {"frame_accuracy": (float(right.sum()), int(counted.sum()))}
