"""A batch that did not fit in the GPU's memory ended its process, which was restarted three times, on the same batch.

GPU memory is simulated by a model that rejects batches of more than a given number of utterances.
"""

import textwrap

import pytest
import torch

from devices.portions import Portions, TooLargeError
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CPU = torch.device("cpu")


@pytest.fixture
def job(corpus, tmp_path, tones):
    """Without dropout, whose draws depend on how a batch is divided; augmentation depends on the utterance alone."""
    return corpus.job(tmp_path, spec=corpus.spec("conformer", model=tones.bare("conformer")))


def limit_memory(learner, most, sizes=None):
    """Limit the number of utterances that the model's memory holds."""
    forward = learner.model.forward

    def limited(feats, frames):
        if sizes is not None:
            sizes.append(len(feats))
        if len(feats) > most:
            raise FULL
        return forward(feats, frames)

    learner.model.forward = limited


def test_gradients_of_portions_sum_to_the_batch_gradient(job):
    data, whole, small, sizes = open_set(job, "train"), Learner(job, CPU), Learner(job, CPU), []
    load = Loader(data, whole.task, CPU)
    batch = load(range(11), 2)
    wanted = whole.gradient(batch, 5)
    limit_memory(small, 3, sizes)
    summed = small.gradient(batch, 5)
    assert sizes == [11, 6, 3, 3, 3, 2]
    assert (wanted.divided, summed.divided) == (0, 1)
    assert summed.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert summed.to_list()[1:-1] == wanted.to_list()[1:-1]
    torch.testing.assert_close(small.flat.grads, whole.flat.grads, rtol=1e-4, atol=1e-4)
    # the size that failed is not tried again, smaller ones are
    sizes.clear()
    small.gradient(batch, 6)
    assert max(sizes) == 3
    sizes.clear()
    assert small.gradient(load(range(2), 2), 7).divided == 0
    assert sizes == [2]


def test_out_of_memory_during_backward_divides_the_batch(job):
    data, whole, small = open_set(job, "train"), Learner(job, CPU), Learner(job, CPU)
    batch, tries = Loader(data, whole.task, CPU)(range(6), 0), []
    wanted = whole.gradient(batch, 5)

    def fail(_):
        tries.append(1)
        if len(tries) < 3:
            raise FULL

    # the first parameters get their gradients last, so all others already have theirs
    small.flat.parameters[0].register_post_accumulate_grad_hook(fail)
    summed = small.gradient(batch, 5)
    assert summed.loss == pytest.approx(wanted.loss, rel=1e-5)
    torch.testing.assert_close(small.flat.grads, whole.flat.grads, rtol=1e-4, atol=1e-4)


def test_utterance_that_does_not_fit_alone_is_reported(job):
    data, learner = open_set(job, "train"), Learner(job, CPU)
    batch = Loader(data, learner.task, CPU)(range(4), 0)
    limit_memory(learner, 0)
    with pytest.raises(TooLargeError, match=r"does not fit .*\(t00.\): exclude such utterances with data\.max_seconds"):
        learner.gradient(batch, 1)


def test_other_errors_are_raised_unchanged(job):
    data, learner = open_set(job, "train"), Learner(job, CPU)
    learner.model.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        learner.gradient(Loader(data, learner.task, CPU)(range(4), 0), 1)


def test_training_continues_and_counts_divided_batches(job, tones, monkeypatch):
    made = tones.Learner

    def limited(job, device):
        learner = made(job, device)
        limit_memory(learner, 4)
        return learner

    monkeypatch.setattr(tones, "Learner", limited)
    run = tones.train_here(job)
    entries = run.entries("step")
    assert run.result["utterances"] == 2 * 48
    assert entries[-1]["divided"] > 0
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in entries)


def test_failed_batch_size_limits_longer_batches(job):
    data, portions = open_set(job, "train"), Portions()
    small, large = data.batch(range(4)), data.batch(range(20))
    assert portions.first(large) == 20
    assert portions.smaller(small, 4) == 2
    assert portions.first(small) < 4
    assert portions.first(large) * large.inputs.shape[1] < small.inputs.numel()


PROGRAM = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    from ranks import device_of
    from training.node.comm_hooks import CommHook
    from training.learner.flat import FlatParameters
    from training.node.process_group import GradientReducer, NodeGroup
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    device = device_of(rank)
    group = NodeGroup(rank, size, folder / "meet", device)

    def run(hook, fails):
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16) for _ in range(6)]
        model = nn.Sequential(*layers).to(device)
        flat = FlatParameters(model)
        reducer = GradientReducer(group, flat, bucket=300, hook=hook)
        sums = []
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            flat.zero_grad()
            if fails and rank == step % size:
                # some buckets have been sent by then
                handle = layers[2].weight.register_post_accumulate_grad_hook(fail)
                try:
                    model(x).square().sum().backward()
                except torch.OutOfMemoryError:
                    pass
                handle.remove()
                assert 0 < len(reducer._waits) < len(reducer._buckets)
                with reducer.held():
                    for half in x.split(3):
                        model(half).square().sum().backward()
            else:
                model(x).square().sum().backward()
            reducer.finish()
            sums.append(flat.grads.clone())
        return sums

    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for hook in (None, CommHook(default_hooks.allreduce_hook)):
        for wanted, found in zip(run(hook, False), run(hook, True)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    group.close()
    print("fine", flush=True)
    os._exit(0)  # as training.node.rank ends: Gloo sometimes aborts during interpreter shutdown
    """
)


def test_ranks_agree_when_one_runs_out_of_memory_mid_reduction(tmp_path, ranks):
    ranks.run_ranks(PROGRAM, 2, tmp_path)
