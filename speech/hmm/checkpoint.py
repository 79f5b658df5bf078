"""Checkpoints of training: model, alignments and speakers' transforms after an iteration; safetensors and JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from speech.files import DAMAGED
from speech.hmm.model import HmmModel, ModelError, write_json, write_tensors
from speech.hmm.steps import AlignedShard
from speech.hmm.viterbi import StatePath


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training stage.

    Attributes:
        stage: Its name.
        iteration: Number of finished iterations.
        model: The model.
        aligned: The alignments in use, and what could not be aligned.
        adaptations: Transforms by speaker.
        variance: Of the features, `[D]`.
        finished: Whether the stage is finished.
    """

    stage: str
    iteration: int
    model: HmmModel
    aligned: AlignedShard
    adaptations: Mapping[str, Tensor] = field(default_factory=dict)
    variance: Tensor | None = None
    finished: bool = False


def save_checkpoint(folder: Path, state: Checkpoint) -> None:
    """Write a checkpoint into a folder of its own, then name it in `state.json`; older ones are removed."""
    name = f"{state.iteration}{'-finished' if state.finished else ''}"
    target = folder / name
    state.model.save(target)
    write_tensors(target / "alignments.safetensors", pack_alignments(state.aligned.alignments))
    write_tensors(target / "speakers.safetensors", dict(state.adaptations))
    facts: dict[str, Any] = {
        "stage": state.stage,
        "iteration": state.iteration,
        "finished": state.finished,
        "checkpoint": name,
        "utterances": list(state.aligned.alignments),
        "failures": dict(state.aligned.failures),
        "retried": state.aligned.retried,
    }
    write_json(folder / "state.json", facts)
    for other in folder.iterdir():
        if other.is_dir() and other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint of a stage, or None if there is none.

    Raises:
        ModelError: It is damaged.
    """
    if not (folder / "state.json").exists():
        return None
    try:
        facts = json.loads((folder / "state.json").read_text())
        target = folder / facts["checkpoint"]
        alignments = unpack_alignments(facts["utterances"], load_file(target / "alignments.safetensors"))
        speakers = load_file(target / "speakers.safetensors")
        aligned = AlignedShard(alignments, facts["failures"], facts["retried"])
        state = (facts["stage"], facts["iteration"])
        finished = bool(facts["finished"])
    except DAMAGED as error:
        raise ModelError(f"the checkpoint in {folder} is damaged ({error!r}): delete the folder") from error
    return Checkpoint(*state, HmmModel.load(target), aligned, speakers, None, finished)


def pack_alignments(alignments: Mapping[str, StatePath]) -> dict[str, Tensor]:
    """Alignments one after the other in five arrays; the order is the mapping's."""
    paths = list(alignments.values())
    empty = np.zeros(0, dtype=np.int32)
    sizes = [[len(path.phones), path.num_frames] for path in paths]
    return {
        "sizes": torch.tensor(sizes, dtype=torch.int32).reshape(-1, 2),
        "scores": torch.tensor([path.score for path in paths], dtype=torch.float64),
        "phones": _joined([path.phones for path in paths], np.int16),
        "words": _joined([path.words for path in paths], np.int16),
        "durations": _joined([np.diff(path.starts) for path in paths] or [empty], np.int32),
        "states": _joined([path.states for path in paths], np.int8),
    }


def _joined(parts: list[Any], kind: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype=kind)]).astype(kind))


def unpack_alignments(names: list[str], arrays: Mapping[str, Tensor]) -> dict[str, StatePath]:
    """The inverse of `pack_alignments`.

    Raises:
        ValueError: The arrays do not fit together.
    """
    values = {name: tensor.numpy() for name, tensor in arrays.items()}
    sizes = values["sizes"].reshape(-1, 2)
    ends = np.cumsum(sizes, axis=0, dtype=np.int64)
    lengths = [len(values["phones"]), len(values["states"])]
    if sizes.min(initial=0) < 0 or (ends[-1].tolist() if len(ends) else [0, 0]) != lengths:
        raise ValueError(f"alignments of {lengths} phones and frames have other sizes")
    alignments: dict[str, StatePath] = {}
    for name, (phones, frames), (end, last), score in zip(
        names, sizes.tolist(), ends.tolist(), values["scores"].tolist(), strict=True
    ):
        part = slice(end - phones, end)
        starts = np.concatenate([[0], np.cumsum(values["durations"][part])]).astype(np.int32)
        states = values["states"][last - frames : last]
        alignments[name] = StatePath(values["phones"][part], values["words"][part], starts, states, score)
    return alignments
