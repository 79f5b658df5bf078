"""Averaging weights with neighbours while gradients are computed; importing this imports neither torch nor ZeroMQ."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from training.exchange.base import Exchange, ExchangeError, ExchangeSetup, ExchangeStats, PortTakenError, World

if TYPE_CHECKING:
    from training.config import ExchangeConfig

__all__ = [
    "Exchange",
    "ExchangeError",
    "ExchangeSetup",
    "ExchangeStats",
    "PortTakenError",
    "World",
    "build_exchange",
]

_KINDS = {
    "zmq": "training.exchange.zmq_exchange:ZmqExchange",
    "gloo": "training.exchange.gloo_exchange:GlooExchange",
}


def build_exchange(cfg: "ExchangeConfig", setup: ExchangeSetup) -> Exchange:
    """Start the exchange of one rank.

    Args:
        cfg: What the user chose.
        setup: Who and where this rank is.

    Raises:
        PortTakenError: If the configured port is taken.
        ExchangeError: If the exchange cannot begin.
        ValueError: If the configuration and the setup do not fit.
    """
    module, _, attribute = _KINDS[cfg.kind].partition(":")
    made: Callable[[ExchangeConfig, ExchangeSetup], Exchange] = getattr(import_module(module), attribute)
    if cfg.daemons == 1:
        return made(cfg, setup)
    from training.exchange.several import SeveralExchanges

    each = cfg.model_copy(update={"cpu_share": cfg.cpu_share / cfg.daemons})
    return SeveralExchanges(lambda part: made(each, part), setup, cfg.daemons)
