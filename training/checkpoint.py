"""Checkpoints: replicas as safetensors in an object store; a set of them counts once its `complete.json` is there.

Layout below the training's output:
`checkpoints/<number>/node-<n>/{model,optimizer}.safetensors`, written by each node;
`checkpoints/<number>/complete.json`, written by the store when all nodes have: what was trained, each file's SHA-256;
`replicas/epoch-<e>/node-<n>.safetensors`, each node's weights at an epoch's end, and `snapshots/epoch-<e>.safetensors`,
their average, written by the evaluator.
"""

import hashlib
from collections.abc import Iterable

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from storage.objects import ObjectMissingError, ObjectStore

_FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """A checkpoint does not fit the run that wants to resume from it."""


def cpu_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state by name, on the CPU."""
    return {name: tensor.detach().clone().cpu().contiguous() for name, tensor in model.state_dict().items()}


def save_replica(
    store: ObjectStore, folder: str, weights: dict[str, Tensor], optimizer: dict[str, Tensor]
) -> dict[str, str]:
    """Write a replica and its optimizer.

    Returns:
        Name of each object to its SHA-256.
    """
    digests = {}
    for file, tensors in zip(_FILES, (weights, optimizer), strict=True):
        data = save(tensors)
        store.write(f"{folder}/{file}", data)
        digests[f"{folder}/{file}"] = hashlib.sha256(data).hexdigest()
    return digests


def load_replica(store: ObjectStore, files: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read what `save_replica` wrote: weights, and the optimizer's state.

    Args:
        store: The training's output.
        files: What `save_replica` returned.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, digest in files.items():
        try:
            data = store.read(name)
        except ObjectMissingError as error:
            raise CheckpointError(f"{store.join(name)} is missing: remove the checkpoint it belongs to") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{store.join(name)} is damaged: remove the checkpoint it belongs to")
        found[name.rsplit("/", 1)[1]] = load(data)
    return found["model.safetensors"], found["optimizer.safetensors"]


def mean_weights(replicas: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, accumulated in float64.

    Raises:
        CheckpointError: If there is none, or they are not of one model.
    """
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for weights in replicas:
        count += 1
        if total and total.keys() != weights.keys():
            raise CheckpointError("replicas have different parameters: they are not of one model")
        for name, tensor in weights.items():
            dtypes[name] = tensor.dtype
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    if not count:
        raise CheckpointError("no epoch has ended yet, so there is no model: train longer or raise train.max_minutes")
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}


def snapshot_name(epoch: int) -> str:
    """Where the average of the replicas of an epoch is."""
    return f"snapshots/epoch-{epoch:04d}.safetensors"


def evaluation_name(epoch: int) -> str:
    """Where the evaluator keeps what it found for an epoch: its replicas are deleted then."""
    return f"replicas/epoch-{epoch:04d}.json"


def read_weights(store: ObjectStore, name: str) -> dict[str, Tensor]:
    """Weights by name."""
    return dict(load(store.read(name)))


def write_weights(store: ObjectStore, name: str, weights: dict[str, Tensor]) -> None:
    """Publish weights."""
    store.write(name, save(weights))


def prune_snapshots(store: ObjectStore, wanted: set[int]) -> None:
    """Delete the averaged snapshots of all but the wanted epochs."""
    keep = {snapshot_name(epoch) for epoch in wanted}
    for name in store.list("snapshots"):
        if name not in keep:
            store.delete(name)


def best_epochs(history: list[dict[str, float]], count: int) -> list[int]:
    """Epochs with the lowest validation loss, best first; of equals the later."""
    ranked = sorted(history, key=lambda entry: (entry["loss"], -entry["epoch"]))
    return [int(entry["epoch"]) for entry in ranked[:count]]
