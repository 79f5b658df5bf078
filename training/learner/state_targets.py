"""Tied states of forced alignments as targets of training: read from a file, looked up by utterance."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speech.hmm.alignments import AlignmentTable
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
    """

    def __init__(self, table: AlignmentTable, frame_factor: int = 1) -> None:
        self.table, self.frame_factor = table, frame_factor

    def states(self, name: str) -> Tensor:
        """States of an utterance's frames, int32 [frames]; none without an alignment."""
        if name not in self.table:
            return torch.zeros(0, dtype=torch.int32)
        return torch.from_numpy(np.array(self.table.pdfs(name)))

    def of(self, names: Sequence[str]) -> Mapping[str, Tensor | int]:
        """Fields `states`, `state_lengths` and `frame_factor` of a batch."""
        found = [self.states(name) for name in names]
        return {
            "states": padded_states(found),
            "state_lengths": torch.tensor([len(one) for one in found], dtype=torch.long),
            "frame_factor": self.frame_factor,
        }


def padded_states(found: Sequence[Tensor]) -> Tensor:
    """States of several utterances [B, most frames]."""
    if not found:
        return torch.zeros(0, 0, dtype=torch.int32)
    return torch.nn.utils.rnn.pad_sequence(list(found), batch_first=True, padding_value=NO_STATE)
