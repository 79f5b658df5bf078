"""Checkpoints of training: model, alignments and speakers' transforms after an iteration.

    sat/state.json                    the last checkpoint's folder, with stage and iteration
    sat/12/model.{json,safetensors}   the model
    sat/12/aligned                    alignments and transforms (`speech.hmm.serialization`)

The first is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from configurable.files import replace_file
from speech.files import DAMAGED
from speech.hmm.model import HmmModel, ModelError, write_json
from speech.hmm.serialization import dump_value, load_value
from speech.hmm.steps import AlignedShard

_ALIGNED = "aligned"


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
    replace_file(target / _ALIGNED, dump_value((state.aligned, dict(state.adaptations))))
    facts: dict[str, Any] = {
        "stage": state.stage,
        "iteration": state.iteration,
        "finished": state.finished,
        "checkpoint": name,
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
        aligned, adaptations = load_value((target / _ALIGNED).read_bytes())
        state = (facts["stage"], facts["iteration"])
        finished = bool(facts["finished"])
    except DAMAGED as error:
        raise ModelError(f"the checkpoint in {folder} is damaged ({error!r}): delete the folder") from error
    return Checkpoint(*state, HmmModel.load(target), aligned, adaptations, None, finished)
