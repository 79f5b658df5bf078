"""The learners that torchrun starts on one machine: one node, whose gradients are averaged at every step."""

import os

import torch
from torch.distributed import PrefixStore, is_initialized, rendezvous  # type: ignore[attr-defined]

from training.node.process_group import NodeGroup


def torchrun_group(device: torch.device) -> NodeGroup:
    """The node of this process: the learners that the same torchrun agent started, or this process alone.

    Args:
        device: Device of the model.

    Raises:
        ValueError: If `torch.distributed` is in use already.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if size > 1 and is_initialized():
        raise ValueError(
            "torch.distributed is initialized: Ring does it, and averages gradients itself, so leave out "
            "init_process_group and DistributedDataParallel"
        )
    if size == 1:
        return NodeGroup(0, 1, None, device)
    store, _, _ = next(rendezvous("env://"))
    # the agent's store may be that of the whole job, and keeps the addresses of processes before a restart
    start = "-".join(os.environ.get(name, "0") for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    return NodeGroup(rank, size, PrefixStore(f"ring-{start}", store), device)
