"""The exchange between fixed ring neighbours over torch.distributed (Gloo): a baseline without elasticity."""

from training.exchange.base import ExchangeSetup
from training.exchange.config import ExchangeConfig
from training.exchange.process import ProcessExchange


class GlooExchange(ProcessExchange):
    """An exchange with two fixed neighbours in turn; nodes cannot join, and the first lost node ends it."""

    elastic = False

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> None:
        """Start the daemon, which connects to the other nodes in the background.

        Raises:
            ValueError: If a fixed ring does not support the configuration.
            ExchangeError: If the daemon cannot start.
        """
        if setup.rendezvous is None:
            raise ValueError("gloo needs a rendezvous: give ExchangeSetup.rendezvous")
        if setup.gossip.neighbours not in ("auto", "ring"):
            raise ValueError("gloo has fixed neighbours: use strategy.neighbours=ring, or exchange.kind=zmq")
        if not 0 <= setup.node < setup.rendezvous.nodes:
            raise ValueError(f"node {setup.node} is not among the {setup.rendezvous.nodes} nodes of the fixed ring")
        rendezvous = {"store": setup.rendezvous.store, "nodes": setup.rendezvous.nodes, "serve": setup.rendezvous.serve}
        super().__init__(cfg, setup, {"kind": "gloo", "rendezvous": rendezvous})
