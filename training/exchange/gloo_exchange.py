"""An exchange between fixed ring neighbours over torch.distributed (Gloo): for comparison, without elasticity."""

from training.config import ExchangeConfig
from training.exchange.base import ExchangeSetup
from training.exchange.process import ProcessExchange


class GlooExchange(ProcessExchange):
    """An exchange whose daemon meets its two neighbours in turn; nobody may join, and the first loss ends it."""

    elastic = False

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> None:
        """Start the daemon; it looks for the others in the background.

        Raises:
            ValueError: If the configuration asks for what a fixed ring cannot do.
            ExchangeError: If the daemon cannot begin.
        """
        if setup.rendezvous is None:
            raise ValueError("gloo needs to know where its ring meets: give ExchangeSetup.rendezvous")
        if setup.gossip.neighbours not in ("auto", "ring"):
            raise ValueError("gloo has fixed neighbours: use strategy.neighbours=ring, or exchange.kind=zmq")
        if not 0 <= setup.node < setup.rendezvous.nodes:
            raise ValueError(f"node {setup.node} is not among the {setup.rendezvous.nodes} nodes of the fixed ring")
        rendezvous = {"store": setup.rendezvous.store, "nodes": setup.rendezvous.nodes, "serve": setup.rendezvous.serve}
        super().__init__(cfg, setup, {"kind": "gloo", "rendezvous": rendezvous})
