"""Methods included in torch: DistributedDataParallel over Gloo, and post-local SGD (arXiv:1808.07217)."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import Setup, System
from benchmarks.peers.emulation import EmulatedModel

PERIOD = 4
"""Steps between averagings, as in torch's documentation."""
_TIMEOUT = timedelta(seconds=300)


def meet(setup: Setup) -> None:
    """Create the process group of all learners."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{setup.ports[0]}"
    dist.init_process_group("gloo", address, rank=setup.number, world_size=setup.learners, timeout=_TIMEOUT)


class Ddp(System):
    """All-reduce of gradients, bucket by bucket, overlapped with the backward pass."""

    title = "DDP"
    synchronous = True

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        meet(setup)
        self.model = DistributedDataParallel(model)


class PostLocalSgd(Ddp):
    """Local steps; weights are averaged every `PERIOD` steps. Each learner represents a separate machine."""

    title = "PostLocalSGD"
    synchronous = False

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        own, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(None, own, start_localSGD_iter=1, post_local_gradient_allreduce=False)
        self.model.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=1)
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)
