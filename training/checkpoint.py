"""Checkpoints: safetensors and a JSON state in an object store, valid only once the state is there.

Layout below the training's output: `checkpoints/step-<n>/{model,optimizer}.safetensors`, then `state.json` with their
SHA-256; and `snapshots/epoch-<n>.safetensors`, the weights at an epoch's end that the final model may average.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from storage.objects import ObjectMissingError, ObjectStore
from training.optim import load_optimizer_tensors, optimizer_tensors

_FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """A checkpoint does not fit the run that wants to resume from it."""


@dataclass
class TrainState:
    """Where training stands; everything beside weights and optimizer that a resume needs.

    Random numbers need no state: every step seeds its generators from (seed, step).
    """

    step: int = 0
    """Optimizer steps made."""
    epoch: int = 0
    """Epoch under way (0 is the first)."""
    cursor: int = 0
    """Batches of that epoch that are done."""
    elapsed: float = 0.0
    """Seconds of training, over all restarts."""
    utterances: int = 0
    """Utterances trained on."""
    audio_seconds: float = 0.0
    """Seconds of audio trained on."""
    unalignable: int = 0
    """Utterances whose tokens do not fit their frames; their loss counts as zero."""
    loss_sum: float = 0.0
    """Sum of this epoch's losses."""
    loss_tokens: int = 0
    """Tokens that `loss_sum` is over."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Validation results, one an epoch: epoch, loss, wer."""


def _state_name(step: int) -> str:
    return f"checkpoints/step-{step:09d}/state.json"


def cpu_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name, on the CPU."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def save_checkpoint(
    store: ObjectStore, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, run: str, keep: int
) -> None:
    """Write a checkpoint, state last, then delete the oldest ones.

    Args:
        store: The training's output.
        model: Whose weights.
        optimizer: Whose state.
        state: Where training stands.
        run: Identity of the run (its configuration's digest); a resume must have the same.
        keep: Checkpoints to keep.
    """
    name = _state_name(state.step)
    folder = name.rsplit("/", 1)[0]
    digests = {}
    for file, tensors in zip(_FILES, (cpu_weights(model), optimizer_tensors(optimizer)), strict=True):
        data = save(tensors)
        digests[file] = hashlib.sha256(data).hexdigest()
        store.write(f"{folder}/{file}", data)
    store.write_json(name, {"run": run, "sha256": digests, "state": asdict(state)})
    steps = checkpoint_steps(store)
    # those beyond this step were damaged, or training would have resumed from them: they must not crowd out sound ones
    kept = [step for step in steps if step <= state.step][-keep:]
    for old in sorted({*steps} - {*kept}):
        # the state goes first: a checkpoint without it does not exist
        store.delete(_state_name(old))
        store.delete_tree(_state_name(old).rsplit("/", 1)[0])


def checkpoint_steps(store: ObjectStore) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    names = [name for name in store.list("checkpoints") if name.endswith("/state.json")]
    return sorted(int(name.split("/")[-2].removeprefix("step-")) for name in names)


def load_checkpoint(
    store: ObjectStore, model: nn.Module, optimizer: torch.optim.Optimizer, run: str
) -> TrainState | None:
    """Resume from the newest intact checkpoint; damaged ones are passed over.

    Returns:
        The state that it was written at, or None without any intact checkpoint.

    Raises:
        CheckpointError: If the checkpoint is of another run.
    """
    for step in reversed(checkpoint_steps(store)):
        found = _read_intact(store, step)
        if found is None:
            continue
        document, data = found
        if document["run"] != run:
            raise CheckpointError(
                f"{store.join(_state_name(step))} belongs to another configuration: remove the folder, or train with "
                "--from train"
            )
        model.load_state_dict(load(data["model.safetensors"]))
        load_optimizer_tensors(optimizer, load(data["optimizer.safetensors"]))
        return TrainState(**document["state"])
    return None


def _read_intact(store: ObjectStore, step: int) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """A checkpoint's state document and files, or None if anything is missing or damaged."""
    name = _state_name(step)
    folder = name.rsplit("/", 1)[0]
    try:
        document: dict[str, Any] = store.read_json(name)
        data = {file: store.read(f"{folder}/{file}") for file in _FILES}
        whole = all(hashlib.sha256(data[file]).hexdigest() == document["sha256"][file] for file in _FILES)
        whole = whole and {"run", "state"} <= document.keys()
    except (ObjectMissingError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return (document, data) if whole else None


def save_snapshot(store: ObjectStore, model: nn.Module, epoch: int) -> None:
    """Keep the weights at an epoch's end."""
    store.write(f"snapshots/epoch-{epoch:04d}.safetensors", save(cpu_weights(model)))


def prune_snapshots(store: ObjectStore, wanted: set[int]) -> None:
    """Delete the snapshots of all but the wanted epochs."""
    keep = {f"snapshots/epoch-{epoch:04d}.safetensors" for epoch in wanted}
    for name in store.list("snapshots"):
        if name not in keep:
            store.delete(name)


def best_epochs(history: list[dict[str, float]], count: int) -> list[int]:
    """Epochs with the lowest validation loss, best first; of equals the later."""
    ranked = sorted(history, key=lambda entry: (entry["loss"], -entry["epoch"]))
    return [int(entry["epoch"]) for entry in ranked[:count]]


def average_snapshots(store: ObjectStore, epochs: list[int]) -> dict[str, Tensor]:
    """The mean of several epochs' weights, accumulated in float64.

    Raises:
        CheckpointError: If no epoch is given.
    """
    if not epochs:
        raise CheckpointError("no epoch has ended yet, so there is no model: train longer or raise train.max_minutes")
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for epoch in sorted(epochs):
        for name, tensor in load(store.read(f"snapshots/epoch-{epoch:04d}.safetensors")).items():
            dtypes[name] = tensor.dtype
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(epochs)).to(dtypes[name]) for name, tensor in total.items()}
