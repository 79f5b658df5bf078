"""Objects that nodes and evaluator write: replicas, averages, and the choice of the best epochs."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from storage.objects import ObjectStore
from training.config import AdamWConfig
from training.learner.checkpoint import (
    CheckpointError,
    ReplicaState,
    best_epochs,
    cpu_weights,
    digests,
    load_replica,
    mean_weights,
    pack_replica,
    prune_snapshots,
    read_weights,
    snapshot_name,
    write_objects,
    write_weights,
)
from training.learner.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors

FOLDER = "checkpoints/000001/node-000"


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    url = str(tmp_path / "output") if request.param == "file" else f"memory://{tmp_path.name}"
    yield ObjectStore(url)
    ObjectStore(url).delete_tree("")


class Learner:
    """A model and an optimizer that has made `steps` steps."""

    def __init__(self, steps=0, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        self.optimizer = build_optimizer(AdamWConfig(lr=0.1), self.model)
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()
        return self

    def save(self, store):
        kept = ReplicaState(cpu_weights(self.model), optimizer_tensors(self.optimizer))
        objects = pack_replica(FOLDER, kept)
        write_objects(store, objects)
        return digests(objects)

    def load(self, store, files):
        kept = load_replica(store, files)
        self.model.load_state_dict(kept.weights)
        load_optimizer_tensors(self.optimizer, kept.optimizer)
        return self

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def test_a_replica_continues_bit_for_bit(store):
    learner = Learner(3)
    files = learner.save(store)
    assert set(files) == {f"{FOLDER}/model.safetensors", f"{FOLDER}/optimizer.safetensors"}
    other = Learner(seed=5).load(store, files)
    assert torch.equal(other.train(4).weights, learner.train(4).weights)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_files_are_detected_and_named(store, file, damage):
    files = Learner(5).save(store)
    name = f"{FOLDER}/{file}"
    data = store.read(name)
    if damage == "missing":
        store.delete(name)
    else:
        store.write(name, data[:-7] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{FOLDER}/{file} is {'missing' if damage == 'missing' else 'damaged'}"):
        Learner().load(store, files)


def test_copied_state_does_not_change_with_further_training():
    """A thread writes the checkpoint while training continues: it must have copies."""
    learner = Learner(2)
    weights, state = cpu_weights(learner.model), optimizer_tensors(learner.optimizer)
    before = {name: tensor.clone() for name, tensor in {**weights, **state}.items()}
    learner.train(3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in {**weights, **state}.items())


def constant(value):
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), -value)}


def test_the_average_is_the_mean():
    mean = mean_weights(constant(value) for value in [6.0, 1.0, 2.0])
    assert torch.equal(mean["weight"], torch.full((2, 2), 3.0))
    assert torch.equal(mean["bias"], torch.full((2,), -3.0))
    assert mean["weight"].dtype == torch.float32


def test_average_of_one_replica_equals_it_exactly():
    weights = cpu_weights(nn.Linear(7, 5))
    assert save(mean_weights([weights])) == save(weights)


def test_the_order_of_replicas_does_not_change_the_average():
    replicas = [cpu_weights(nn.Linear(7, 5)) for _ in range(3)]
    assert save(mean_weights(replicas)) == save(mean_weights(replicas[::-1]))


def test_average_of_no_or_different_models_is_refused():
    with pytest.raises(CheckpointError, match="there is no model yet"):
        mean_weights([])
    with pytest.raises(CheckpointError, match="not of one model"):
        mean_weights([constant(1.0), {"weight": torch.zeros(2, 2)}])


def test_the_best_epochs_are_those_of_lowest_loss():
    history = [{"epoch": e, "loss": loss, "wer": 0.0} for e, loss in enumerate([3.0, 1.0, 2.0, 1.0])]
    assert best_epochs(history, 1) == [3]
    assert best_epochs(history, 3) == [3, 1, 2]
    assert best_epochs(history, 9) == [3, 1, 2, 0]


def test_snapshots_that_are_not_needed_are_deleted(store):
    for epoch in range(4):
        write_weights(store, snapshot_name(epoch), constant(float(epoch)))
    prune_snapshots(store, {1, 3})
    assert store.list("snapshots") == ["snapshots/epoch-0001.safetensors", "snapshots/epoch-0003.safetensors"]
    assert load(store.read("snapshots/epoch-0003.safetensors"))["weight"][0, 0] == 3.0
    assert read_weights(store, snapshot_name(1))["bias"][0] == -1.0
