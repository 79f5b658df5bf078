"""The two halves of an exchange's configuration from one set of fields."""

from training.config import ExchangeConfig
from training.strategies.gossip import GossipConfig


def configs(**values):
    """`ExchangeConfig` and `GossipConfig`; each takes the fields that it has."""
    gossip = {name: value for name, value in values.items() if name in GossipConfig.model_fields and name != "kind"}
    others = {name: value for name, value in values.items() if name not in gossip}
    return ExchangeConfig(**others), GossipConfig(**gossip)
