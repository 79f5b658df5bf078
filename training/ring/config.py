"""Configuration of a ring for any model."""

from pydantic import Field, model_validator

from configurable.configuration import Configuration
from training.coordinator.config import MembershipConfig
from training.exchange.config import ExchangeConfig
from training.strategies.gossip import HierarchicalGossipConfig


class RingConfig(Configuration):
    """How the learners of a ring work together; the defaults suit most models."""

    exchange: ExchangeConfig = ExchangeConfig()
    """How learners average their weights; without a key they do it unencrypted, on loopback addresses only."""
    gossip: HierarchicalGossipConfig = HierarchicalGossipConfig(newcomer="weights+optimizer")
    """With whom they average, how often, and what a newcomer takes from a neighbour."""
    membership: MembershipConfig = MembershipConfig()
    """When learners count as lost; the process that starts the coordinator decides."""
    seed: int = 0
    """Seed of the order of shards and rows; the process that starts the coordinator decides."""
    host: str = ""
    """Address on which this learner listens for its neighbours; empty uses the one that reaches the coordinator."""
    settle_s: float = Field(default=5.0, ge=0)
    """Longest time that learners go on averaging when all rows are trained, until their weights agree."""

    @model_validator(mode="after")
    def _check_exchange(self) -> "RingConfig":
        if self.exchange.kind == "cuda":
            raise ValueError(f"exchange.kind is {self.exchange.kind}, whose learners are on one machine: use zmq")
        if self.exchange.daemons > 1 and self.gossip.newcomer != "weights":
            raise ValueError(
                f"exchange.daemons is {self.exchange.daemons}, but newcomers get the optimizer's state from a single "
                "daemon only: use gossip.newcomer=weights, or daemons=1"
            )
        return self
