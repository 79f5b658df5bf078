"""Checkpoints: replicas as safetensors in an object store; a checkpoint is valid once its `complete.json` exists.

Layout below the training's output:
`checkpoints/<number>/node-<n>/{model,optimizer}.safetensors`, written by each node, or, if the ranks' states differ,
`checkpoints/<number>/node-<n>/rank-<r>/{model,optimizer,state}.safetensors`, written by each rank;
`checkpoints/<number>/complete.json`, written by the coordinator when all nodes have reported: what was trained, and
each file's SHA-256;
`replicas/epoch-<e>/node-<n>.safetensors`, each node's weights at the end of an epoch, and
`snapshots/epoch-<e>.safetensors`, their average, written by the evaluator.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from storage.intact import readable
from storage.objects import ObjectMissingError, ObjectStore

COMPUTE = "compute"
"""Folder of a training's output with each node's device and precision."""
_RANK = re.compile(r"/rank-([0-9]+)/[^/]+$")


class CheckpointError(ValueError):
    """A checkpoint does not fit the run that wants to resume from it."""


def cpu_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state by name, on the CPU."""
    return {name: tensor.detach().clone().cpu().contiguous() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True)
class ReplicaState:
    """Everything that a replica needs to resume exactly."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    """State of its strategy."""


def pack_replica(folder: str, kept: ReplicaState) -> dict[str, bytes]:
    """Serialize a replica to objects: name to content."""
    parts = {"model": kept.weights, "optimizer": kept.optimizer}
    if kept.state:
        parts["state"] = kept.state
    return {f"{folder}/{name}.safetensors": save(tensors) for name, tensors in parts.items()}


def digests(objects: dict[str, bytes]) -> dict[str, str]:
    """SHA-256 of each object, by name."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in objects.items()}


def write_objects(store: ObjectStore, objects: dict[str, bytes]) -> None:
    """Write the result of `pack_replica` to a store."""
    for name, data in objects.items():
        store.write(name, data)


def load_replica(store: ObjectStore, files: dict[str, str]) -> ReplicaState:
    """Read a replica.

    Args:
        store: The training's output.
        files: Files of the replica, name to SHA-256.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, digest in files.items():
        try:
            data = store.read(name)
        except ObjectMissingError as error:
            raise CheckpointError(f"{store.join(name)} is missing: remove the checkpoint it belongs to") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{store.join(name)} is damaged: remove the checkpoint it belongs to")
        parts[name.rsplit("/", 1)[1]] = load(data)
    return ReplicaState(parts["model.safetensors"], parts["optimizer.safetensors"], parts.get("state.safetensors", {}))


def files_by_rank(files: dict[str, str]) -> list[dict[str, str]]:
    """Group a node's files by rank; a single group if the ranks have written one replica together."""
    lots: dict[int, dict[str, str]] = {}
    for name, digest in files.items():
        match = _RANK.search(name)
        lots.setdefault(int(match[1]) if match else 0, {})[name] = digest
    return [lots[rank] for rank in sorted(lots)]


def mean_weights(replicas: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of several sets of weights, accumulated in float64.

    Raises:
        CheckpointError: If there are none, or they are not of one model.
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
        raise CheckpointError("there is no model yet: train longer, or raise train.max_minutes or train.max_utterances")
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}


def snapshot_name(epoch: int) -> str:
    """Name of the object with the average of an epoch's replicas."""
    return f"snapshots/epoch-{epoch:04d}.safetensors"


def compute_name(node: int) -> str:
    """Name of the object in which a node records its device and precision."""
    return f"{COMPUTE}/node-{node:04d}.json"


def evaluation_name(epoch: int) -> str:
    """Name of the object with the evaluator's result for an epoch, which stays when the replicas are deleted."""
    return f"replicas/epoch-{epoch:04d}.json"


def read_weights(store: ObjectStore, name: str) -> dict[str, Tensor]:
    """Read weights by name.

    Raises:
        DamagedObjectError: If the object is not a safetensors file.
    """
    data = store.read(name)
    with readable(store.join(name)):
        return dict(load(data))


def write_weights(store: ObjectStore, name: str, weights: dict[str, Tensor]) -> None:
    """Write weights as safetensors."""
    store.write(name, save(weights))


def prune_snapshots(store: ObjectStore, wanted: set[int]) -> None:
    """Delete the averaged snapshots of all but the wanted epochs."""
    keep = {snapshot_name(epoch) for epoch in wanted}
    for name in store.list("snapshots"):
        if name not in keep:
            store.delete(name)


def best_epochs(history: list[dict[str, float]], count: int) -> list[int]:
    """Epochs with the lowest validation loss, best first; among equals the later first."""
    ranked = sorted(history, key=lambda entry: (entry["loss"], -entry["epoch"]))
    return [int(entry["epoch"]) for entry in ranked[:count]]
