"""Checkpoints: all or nothing, the newest intact one, of this run only; and the average of epochs."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from storage.objects import ObjectStore
from training.checkpoint import (
    CheckpointError,
    TrainState,
    average_snapshots,
    best_epochs,
    checkpoint_steps,
    load_checkpoint,
    prune_snapshots,
    save_checkpoint,
    save_snapshot,
)
from training.config import OptimizerConfig
from training.optim import build_optimizer


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
        self.optimizer = build_optimizer(OptimizerConfig(lr=0.1), self.model)
        self.state = TrainState()
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()
            self.state.step += 1
        return self

    def save(self, store, run="r", keep=2):
        save_checkpoint(store, self.model, self.optimizer, self.state, run, keep)

    def load(self, store, run="r"):
        found = load_checkpoint(store, self.model, self.optimizer, run)
        self.state = found or self.state
        return found

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def part(step, name):
    return f"checkpoints/step-{step:09d}/{name}"


def test_a_learner_continues_bit_for_bit(store):
    learner = Learner(3)
    learner.state.history.append({"epoch": 0, "loss": 1.25, "wer": 0.5})
    learner.state.elapsed = 12.75
    learner.save(store)
    other = Learner(seed=5)
    assert other.load(store) == learner.state
    assert torch.equal(other.train(4).weights, learner.train(4).weights)


def test_without_a_checkpoint_there_is_nothing_to_resume(store):
    before = (learner := Learner(1)).weights
    assert learner.load(store) is None
    assert torch.equal(learner.weights, before)


def test_the_newest_is_taken_and_old_ones_are_pruned(store):
    learner = Learner()
    for _ in range(4):
        learner.train(5).save(store, keep=2)
    assert checkpoint_steps(store) == [15, 20]
    assert {name.split("/")[1] for name in store.list("checkpoints")} == {"step-000000015", "step-000000020"}
    assert Learner().load(store).step == 20


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_newest_one_is_passed_over(store, file, damage):
    learner = Learner(5)
    learner.save(store)
    good = learner.weights
    learner.train(5).save(store)
    data = store.read(part(10, file))
    if damage == "missing":
        store.delete(part(10, file))
    else:
        store.write(part(10, file), data[:-7] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    other = Learner(seed=3)
    assert other.load(store).step == 5
    assert torch.equal(other.weights, good)


@pytest.mark.parametrize("text", [b"", b'{"run": "r", "sha', b"[]", b"{}", b'{"run": "r"}'])
def test_a_damaged_state_is_passed_over(store, text):
    learner = Learner(5)
    learner.save(store)
    learner.train(5).save(store)
    store.write(part(10, "state.json"), text)
    assert Learner().load(store).step == 5


def test_without_an_intact_one_training_starts_anew(store):
    Learner(5).save(store)
    store.write(part(5, "model.safetensors"), b"")
    before = (learner := Learner(seed=4)).weights
    assert learner.load(store) is None
    assert torch.equal(learner.weights, before)


def test_another_runs_checkpoint_is_refused(store):
    Learner(5).save(store, run="theirs")
    with pytest.raises(CheckpointError, match=r"step-000000005/state\.json.*another configuration"):
        Learner().load(store, run="ours")


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_writer_killed_between_any_two_objects_leaves_the_older_one(store, writes, monkeypatch):
    learner = Learner(5)
    learner.save(store)
    left, write = [writes], ObjectStore.write

    def dying_write(self, name, data):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "write", dying_write)
        with pytest.raises(Killed):
            learner.train(5).save(store)
    assert checkpoint_steps(store) == [5]
    assert Learner().load(store).step == 5
    learner.save(store)  # what was left half-written is overwritten
    assert Learner().load(store).step == 10


def test_a_pruner_killed_in_the_middle_leaves_no_half_checkpoint(store, monkeypatch):
    learner = Learner(5)
    learner.save(store, keep=1)

    def dying_delete(self, prefix):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete_tree", dying_delete)
        with pytest.raises(Killed):
            learner.train(5).save(store, keep=1)
    assert checkpoint_steps(store) == [10]
    assert Learner().load(store).step == 10


def constant_model(value):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, -value)
    return model


def test_the_average_is_the_mean_of_the_named_epochs(store):
    for epoch, value in enumerate([1.0, 2.0, 6.0, 100.0]):
        save_snapshot(store, constant_model(value), epoch)
    mean = average_snapshots(store, [2, 0, 1])
    assert torch.equal(mean["weight"], torch.full((2, 2), 3.0))
    assert torch.equal(mean["bias"], torch.full((2,), -3.0))
    assert mean["weight"].dtype == torch.float32


def test_the_average_of_one_epoch_is_that_epoch_exactly(store):
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    save_snapshot(store, model, 3)
    assert save(average_snapshots(store, [3])) == save({k: v.contiguous() for k, v in model.state_dict().items()})


def test_the_order_of_epochs_does_not_change_the_average(store):
    for epoch in range(3):
        torch.manual_seed(epoch)
        save_snapshot(store, nn.Linear(7, 5), epoch)
    assert save(average_snapshots(store, [0, 1, 2])) == save(average_snapshots(store, [2, 0, 1]))


def test_no_epoch_no_model(store):
    with pytest.raises(CheckpointError, match="no epoch has ended"):
        average_snapshots(store, [])


def test_the_best_epochs_are_those_of_lowest_loss():
    history = [{"epoch": e, "loss": loss, "wer": 0.0} for e, loss in enumerate([3.0, 1.0, 2.0, 1.0])]
    assert best_epochs(history, 1) == [3]
    assert best_epochs(history, 3) == [3, 1, 2]
    assert best_epochs(history, 9) == [3, 1, 2, 0]


def test_only_wanted_snapshots_stay(store):
    for epoch in range(4):
        save_snapshot(store, constant_model(epoch), epoch)
    prune_snapshots(store, {1, 3})
    assert store.list("snapshots") == ["snapshots/epoch-0001.safetensors", "snapshots/epoch-0003.safetensors"]
    assert load(store.read("snapshots/epoch-0003.safetensors"))["weight"][0, 0] == 3.0
