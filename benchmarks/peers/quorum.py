"""torchft: DDP whose learners agree on a quorum at each step, so that learners may die and join."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peers.base import MissingError, Setup, System
from benchmarks.peers.emulation import EmulatedModel

_TIMEOUT = timedelta(seconds=60)


class TorchFt(System):
    """`torchft.DistributedDataParallel` over Gloo; each learner is a replica group of one."""

    title = "torchft"
    elsewhere = True
    joins = True
    synchronous = True

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        import torchft

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # the store of its own group, used by no other learner
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        optimizer = self.optimizer

        def load(state: Any) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=1,
            timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=f"http://127.0.0.1:{setup.ports[0]}",
            replica_id=f"learner{setup.number}",
            hostname="127.0.0.1",
        )
        self.model = torchft.DistributedDataParallel(self.manager, model)
        self.optimizer = torchft.Optimizer(self.manager, optimizer)

    def step(self) -> bool:
        """Make a step; without agreement of all learners, it is not applied."""
        before = self.manager.current_step()
        super().step()
        return bool(self.manager.current_step() > before)

    @classmethod
    def prepare(cls, sgp: Path | None) -> None:
        """Import torchft."""
        try:
            import torchft  # noqa: F401
        except ImportError as error:
            raise MissingError(f"{error}; pip install torchft-nightly, then --peers-python VENV/bin/python") from error

    @classmethod
    def serve(cls, setup: Setup) -> None:
        """Run the lighthouse, the coordination server of torchft."""
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind=f"127.0.0.1:{setup.ports[0]}", min_replicas=1, join_timeout_ms=100)
        while server:
            time.sleep(60)
