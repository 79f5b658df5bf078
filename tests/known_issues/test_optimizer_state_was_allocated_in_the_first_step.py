"""torch allocates an optimizer's state in its first step: batches had already been tried in the memory that it needs,
and if there was too little, the process ended and was restarted three times.

Without a GPU, a full memory is simulated.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devices.portions import TooLargeError
from training.config import OPTIMIZERS, SgdConfig
from training.learner import compute, optim
from training.learner.compute import Learner, open_set
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, in_one_pass, load_optimizer_tensors, optimizer_tensors
from training.learner.prefetch import Loader
from training.node import run_rank
from training.node.rank import DIVERGED, GAVE_UP, NodeSetup
from training.node.rendezvous import RankPlacement

CPU = torch.device("cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
KINDS = {
    "adamw": {"kind": "adamw", "lr": 0.01},
    "momentum": {"kind": "sgd", "lr": 0.1},
    "plain": {"kind": "sgd", "lr": 0.1, "momentum": 0.0},
}


@pytest.fixture(params=KINDS)
def job(request, corpus, tmp_path):
    return corpus.job(tmp_path, "conformer", optimizer=KINDS[request.param])


def memory(learner):
    """Where the optimizer's state is."""
    entries = (entry for state in learner.optimizer.state.values() for entry in state.values())
    return sorted((tensor.data_ptr(), tensor.numel()) for tensor in entries)


def update(flat, optimizer, numbers):
    """Steps that are functions of their numbers."""
    for number in numbers:
        flat.grads.copy_(torch.randn(flat.grads.shape, generator=torch.Generator().manual_seed(number)))
        optimizer.step()


def test_optimizer_state_is_allocated_before_the_first_batch(job):
    learner = Learner(job, CPU)
    before = memory(learner)
    names = learner.moments.names
    kept = {"adamw": 3, "sgd": 1}[job.train.optimizer.kind] if names else 0  # each parameter's steps are counted
    assert len(before) == kept * len(learner.flat.parameters)
    update(learner.flat, learner.optimizer, range(2))
    load_optimizer_tensors(learner.optimizer, optimizer_tensors(learner.optimizer))
    learner.moments.clear()
    learner.reset()
    assert memory(learner) == before


def test_preallocated_state_equals_that_of_the_first_step(job):
    """After a reset to the start, too."""
    learner, model = Learner(job, CPU), job.task.spec.build_model()
    flat = FlatParameters(model)
    optimizer = build_optimizer(job.train.optimizer, model)
    flat.load(learner.flat.weights)
    for again in range(2):
        update(flat, optimizer, range(3))
        update(learner.flat, learner.optimizer, range(3))
        assert torch.equal(flat.weights, learner.flat.weights)
        wanted, own = optimizer_tensors(optimizer), optimizer_tensors(learner.optimizer)
        assert list(own) == list(wanted)
        assert all(
            torch.equal(own[name], tensor) and own[name].dtype == tensor.dtype for name, tensor in wanted.items()
        )
        if not again:
            learner.reset()
            flat.load(learner.flat.weights)
            optimizer = build_optimizer(job.train.optimizer, model)


class Allocations(TorchDispatchMode):
    """Counts values of tensors that are neither an operation's argument nor a view of it."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage().data_ptr()
            for tensor in torch.utils._pytree.tree_leaves(args)
            if torch.is_tensor(tensor)
        }
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.values += tensor.numel()
        return result


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_first_fused_update_allocates_no_memory(corpus, tmp_path, monkeypatch, kind):
    """As on a GPU; a CPU's loop for SGD takes memory for one parameter at a time."""
    monkeypatch.setattr(optim, "in_one_pass", lambda *_: True)
    learner = Learner(corpus.job(tmp_path, optimizer=KINDS[kind]), CPU)
    learner.flat.grads.fill_(1.0)
    with Allocations() as counted:
        learner.update(0.01)
    assert counted.values == 0


def test_updates_are_fused_on_gpus():
    for kind in ("adamw", "sgd"):
        assert in_one_pass(OPTIMIZERS[kind](), torch.device("cuda", 1))
    assert not in_one_pass(SgdConfig(), CPU)


def test_first_batch_is_divided_by_memory_left_beside_the_state(corpus, tmp_path, tones):
    """Simulated memory holds eleven utterances without the optimizer's state, and fewer beside it."""
    job = corpus.job(tmp_path, spec=corpus.spec("conformer", model=tones.bare("conformer")))
    learner = Learner(job, CPU)
    batch = Loader(open_set(job, "train"), learner.task, CPU)(range(11), 0)
    forward, room = learner.model.forward, 11 * learner.flat.num_parameters

    def limited(feats, frames):
        state = sum(count for _, count in memory(learner))
        if state + len(feats) * learner.flat.num_parameters > room:
            raise FULL
        return forward(feats, frames)

    learner.model.forward = limited
    assert learner.gradient(batch, 1).divided == 1
    learner.update(0.01)
    assert learner.gradient(batch, 1).divided == 1


def test_state_that_does_not_fit_is_an_error_with_a_remedy(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise FULL

    monkeypatch.setattr(compute, "Moments", full)
    with pytest.raises(TooLargeError, match=r"weights with .*Tried to allocate.*kind=sgd, fewer learners per GPU"):
        Learner(corpus.job(tmp_path), CPU)
    with pytest.raises(TooLargeError, match=r"use a smaller model, fewer learners per GPU"):
        Learner(corpus.job(tmp_path, optimizer=KINDS["momentum"]), CPU)


def test_rank_whose_model_does_not_fit_is_not_restarted(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise TooLargeError("too large: use a smaller model")

    monkeypatch.setattr(run_rank, "build_learner", full)
    setup = NodeSetup(node=0, coordinator="127.0.0.1:1", key_file=None, folder=tmp_path)
    place = RankPlacement(0, 1, "1")
    assert run_rank.run_rank(corpus.job(tmp_path), setup, place, 1) == DIVERGED
    assert "use a smaller model" in (tmp_path / GAVE_UP).read_text()


def test_learners_of_a_parameter_server_keep_no_optimizer_state(corpus, tmp_path):
    assert not memory(Learner(corpus.job(tmp_path, strategy="asgd", nodes=2), CPU))
    assert memory(Learner(corpus.job(tmp_path, strategy="easgd", nodes=2), CPU))


def test_state_of_another_model_is_refused(job, corpus, tmp_path):
    learner = Learner(job, CPU)
    tensors = optimizer_tensors(learner.optimizer)
    if not tensors:
        return
    name = next(name for name in tensors if not name.endswith("step"))
    for wrong in ({**tensors, name: torch.zeros(1)}, {**tensors, "x.y": torch.zeros(1)}):
        with pytest.raises(ValueError, match="of another model"):
            load_optimizer_tensors(learner.optimizer, wrong)
