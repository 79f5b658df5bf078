"""hivemind: learners find each other through a distributed hash table and average their weights in groups."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

from torch.optim import SGD

from benchmarks.peers.base import LR, MissingError, Setup, System, await_file
from benchmarks.peers.ddp import PERIOD
from benchmarks.peers.emulation import EmulatedModel

_BATCH = 8
_MATCHMAKING_S = 1.0
"""How long a learner waits for averaging partners; the documentation uses 3 to 5 s for small runs of long steps."""
_AVERAGING_S = 10.0
_EPOCH_S = 4.0
"""Seconds of local training between averagings: matchmaking alone takes a second."""
_HOST = ["/ip4/127.0.0.1/tcp/0"]


class Hivemind(System):
    """`hivemind.Optimizer` with local updates: weights are averaged every few seconds, in the background."""

    title = "hivemind"
    elsewhere = True
    joins = True

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        import hivemind

        _own_locks()
        addresses = await_file(setup.folder / "swarm").read_text(encoding="utf-8").split()
        self.dht = hivemind.DHT(initial_peers=addresses, host_maddrs=_HOST, start=True)
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id="peers",
            target_batch_size=max(PERIOD, round(_EPOCH_S / setup.step_s)) * setup.learners * _BATCH,
            batch_size_per_step=_BATCH,
            params=model.parameters(),
            optimizer=lambda params: SGD(params, lr=LR),
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=_MATCHMAKING_S,
            averaging_timeout=_AVERAGING_S,
            tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
        )
        if setup.joining:
            self.optimizer.load_state_from_peers()

    @classmethod
    def prepare(cls, sgp: Path | None) -> None:
        """Import hivemind."""
        try:
            import hivemind  # noqa: F401
        except ImportError as error:
            raise MissingError(f"{error}; pip install hivemind, then --peers-python VENV/bin/python") from error

    @classmethod
    def serve(cls, setup: Setup) -> None:
        """Run the first peer of the hash table."""
        import hivemind

        _own_locks()
        dht: Any = hivemind.DHT(host_maddrs=_HOST, start=True)
        new = setup.folder / "swarm.new"
        new.write_text("\n".join(map(str, dht.get_visible_maddrs())), encoding="utf-8")
        new.rename(setup.folder / "swarm")
        while True:
            time.sleep(60)


def _own_locks() -> None:
    """Replace the inter-process locks that hivemind created on import.

    Forked learners would share them, unlike learners on separate machines, and a learner killed while holding one would
    block all others.
    """
    from hivemind.utils import MPFuture
    from hivemind.utils.asyncio import _AsyncContextWrapper

    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
