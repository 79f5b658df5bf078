"""Tied states of forced alignments as targets of training: read from a file, looked up by utterance."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recognition.data.segments import SegmentConfig, parse_id
from speech.alignments import AlignmentTable
from speech.objectives.base import NO_STATE
from storage.objects import ObjectStore


def read_alignments(store: ObjectStore, name: str) -> AlignmentTable:
    """Read the alignments of the set `train` or `valid`.

    Raises:
        ObjectMissingError: There are none.
        AlignmentsError: The file holds something else, or it is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="starling-alignments-") as local:
        return AlignmentTable.read(store.fetch(f"{name}.parquet", Path(local)))


class StateTargets:
    """The states of each utterance of a set.

    Args:
        table: Alignments.
        frame_factor: Aligned frames to an output frame.
        segments: How the set was cut, if it holds segments of utterances.
    """

    def __init__(self, table: AlignmentTable, frame_factor: int = 1, segments: SegmentConfig | None = None) -> None:
        self.table, self.frame_factor, self.segments = table, frame_factor, segments

    def states(self, name: str) -> Tensor:
        """States of an utterance's or segment's frames, int32 [frames]; none without an alignment."""
        utterance, number = (name, 0) if self.segments is None else parse_id(name)
        if utterance not in self.table:
            return torch.zeros(0, dtype=torch.int32)
        whole = torch.from_numpy(np.array(self.table.pdfs(utterance)))
        return whole if self.segments is None else self._segment(whole, number, self.segments)

    def _segment(self, whole: Tensor, number: int, segments: SegmentConfig) -> Tensor:
        """What a segment sees of an utterance's states; its context has none."""
        span = number * segments.frames, (number + 1) * segments.frames
        first, end = segments.seen(span, len(whole))
        states = whole[first:end].clone()
        states[: span[0] - first] = NO_STATE
        states[span[1] - first :] = NO_STATE
        return states


def padded_states(states: Sequence[Tensor]) -> Tensor:
    """States of several utterances [B, most frames]."""
    if not states:
        return torch.zeros(0, 0, dtype=torch.int32)
    return torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True, padding_value=NO_STATE)
