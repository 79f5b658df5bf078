"""AD-PSGD and overlapped stochastic gradient push of facebookresearch/stochastic_gradient_push, on CPUs.

The source is written for torch 1 and GPUs. It is used unmodified, from a folder given by the user; its calls for GPUs
are redirected to the CPU (`_pretend_gpu`).
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.base import LR, MissingError, Setup, System
from benchmarks.peers.ddp import meet
from benchmarks.peers.emulation import EmulatedModel

SOURCE = "https://github.com/facebookresearch/stochastic_gradient_push"


class _Stream:
    """A CUDA stream's methods, as no-ops for synchronous execution."""

    def wait_stream(self, _: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _pretend_gpu() -> None:
    """Make transfers to a GPU no-ops, and restore a name of torch 1."""

    def stay(self: Any, *_: object, **__: object) -> Any:
        return self

    changes: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "cuda", stay),
        (torch.Tensor, "pin_memory", stay),
        (torch.nn.Module, "cuda", stay),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        (torch.cuda, "is_available", lambda: False),
        (dist, "_backend", None),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


class _Sgp(System):
    @classmethod
    def prepare(cls, sgp: Path | None) -> None:
        """Import the package `gossip`."""
        if sgp is None or not (sgp / "gossip" / "ad_psgd.py").is_file():
            missing = "" if sgp is None else f"{sgp} has no gossip/ad_psgd.py; "
            raise MissingError(f"{missing}git clone {SOURCE} SGP, then --sgp SGP")
        _pretend_gpu()
        sys.path.insert(0, str(sgp))
        import gossip  # noqa: F401


class AdPsgd(_Sgp):
    """AD-PSGD on a bipartite exponential graph; a process beside each learner averages continuously."""

    title = "SGP AD-PSGD"

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        from gossip import BilatGossipDataParallel, DynamicBipartiteExponentialGraph, UniformMixing

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.model = BilatGossipDataParallel(
            model,
            device_ids=["cpu"],
            master_addr="127.0.0.1",
            master_port=str(setup.ports[0]),
            backend="gloo",
            world_size=setup.learners,
            rank=setup.number,
            graph_class=DynamicBipartiteExponentialGraph,
            mixing_class=UniformMixing,
            comm_device=torch.device("cpu"),
            lr=LR,
            momentum=0.0,
            weight_decay=0.0,
            nesterov=False,
            verbose=False,
            network_interface_type="ethernet",
        )
        self.model.train()
        self.model.enable_gossip()


class PushSum(_Sgp):
    """Stochastic gradient push on a directed exponential graph, overlapped with gradients (arXiv:1811.10792)."""

    title = "SGP push-sum"

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        from gossip import GossipDataParallel

        meet(setup)
        self.model = GossipDataParallel(
            model, device_ids=["cpu"], comm_device=torch.device("cpu"), push_sum=True, overlap=True, verbose=False
        )
        self.model.train()
