"""Averages weights with neighbours while gradients are computed; importing this imports neither torch nor ZeroMQ."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from training.exchange.base import Exchange, ExchangeError, ExchangeSetup, ExchangeStats, PortTakenError

if TYPE_CHECKING:
    from training.exchange.config import ExchangeConfig

__all__ = [
    "Exchange",
    "ExchangeError",
    "ExchangeSetup",
    "ExchangeStats",
    "PortTakenError",
    "build_exchange",
]


def build_exchange(cfg: "ExchangeConfig", setup: ExchangeSetup) -> Exchange:
    """Start the exchange of one rank.

    Args:
        cfg: The user's configuration.
        setup: What the exchange needs to know about this rank and its node.

    Raises:
        PortTakenError: If the configured port is taken.
        ExchangeError: If the exchange cannot start.
        ValueError: If configuration and setup do not match.
    """
    made: Callable[[ExchangeConfig, ExchangeSetup], Exchange]
    if cfg.kind == "cuda":
        from training.exchange.cuda_exchange import CudaExchange

        made = CudaExchange
    else:
        from training.exchange.client import ProcessExchange

        made = ProcessExchange
    if cfg.daemons == 1:
        return made(cfg, setup)
    from training.exchange.several import SeveralExchanges

    each = cfg.model_copy(update={"cpu_share": cfg.cpu_share / cfg.daemons})
    return SeveralExchanges(lambda part: made(each, part), setup, cfg.daemons)
