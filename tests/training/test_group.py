"""A node of several learners: the same weights, step for step, as torch's DistributedDataParallel gives."""

import textwrap

import pytest
import torch
from ranks import run_ranks

from training.group import GradientReducer, NodeGroup

RANKS = 3
PROGRAM = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from training.config import OptimizerConfig
    from training.flat import FlatParameters
    from training.group import GradientReducer, NodeGroup
    from training.optim import build_optimizer

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    group = NodeGroup(rank, size, folder / "meet", torch.device("cpu"))

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))

    ours, theirs = network(), network()
    flat = FlatParameters(ours)
    reducer = GradientReducer(group, flat, bucket=20)  # several buckets
    assert len(reducer._buckets) > 3
    ddp = DistributedDataParallel(theirs)
    cfg = OptimizerConfig(lr=0.02)
    optimizers = build_optimizer(cfg, ours), build_optimizer(cfg, theirs)
    for step in range(20):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(5 + rank, 6, generator=generator)  # ranks have batches of different sizes
        tokens = sum(n for (n,) in group.gather_numbers([float(len(x))]))
        flat.zero_grad()
        ours(x).square().sum().backward()
        reducer.finish()
        flat.grads.div_(tokens)
        optimizers[0].step()
        optimizers[1].zero_grad()
        # DDP divides the sum over ranks by their number
        (ddp(x).square().sum() * size / tokens).backward()
        optimizers[1].step()
        for a, b in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # a rank without a batch still takes part
    flat.zero_grad()
    if rank:
        ours(torch.ones(1, 6)).sum().backward()
    reducer.finish()
    every = [torch.zeros_like(flat.grads) for _ in range(size)]
    dist.all_gather(every, flat.grads)
    assert all(torch.equal(one, every[0]) for one in every) and every[0].abs().sum() > 0
    # orders, texts, votes, shares
    assert group.tell({"do": "step", "rows": [1, 2], "rank": rank}) == {"do": "step", "rows": [1, 2], "rank": 0}
    assert group.gather_text(f"tcp://host:{rank}") == [f"tcp://host:{r}" for r in range(size)]
    assert group.all(True) and not group.all(rank == 1)
    start, stop = group.share(10)
    whole = group.gather_shares(torch.arange(start, stop, dtype=torch.float32), 10)
    assert whole.tolist() == list(range(10))
    group.close()
    print("fine", flush=True)
    os._exit(0)  # as training.rank ends: Gloo sometimes aborts while the interpreter takes it down
    """
)


def test_a_node_gives_the_weights_that_ddp_gives(tmp_path):
    run_ranks(PROGRAM, RANKS, tmp_path)


def test_a_node_of_one_needs_no_process_group(tmp_path):
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    assert group.tell({"do": "wait"}) == {"do": "wait"}
    assert group.gather_text("x") == ["x"]
    assert group.share(7) == (0, 7)
    assert group.all(True)
    assert group.gather_shares(torch.ones(7), 7).sum() == 7
    group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("bucket", [1, 10, 10**9])
def test_buckets_cover_all_gradients_once(tmp_path, bucket):
    from training.flat import FlatParameters

    flat = FlatParameters(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    reducer = GradientReducer(NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu")), flat, bucket)
    covered = sorted(i for start, stop in reducer._buckets for i in range(start, stop))
    assert covered == list(range(flat.num_parameters))
