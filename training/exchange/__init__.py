"""Averaging weights with neighbours while gradients are computed; importing this imports neither torch nor ZeroMQ."""

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
    "memory": "training.exchange.memory:MemoryExchange",
}


def build_exchange(cfg: "ExchangeConfig", setup: ExchangeSetup, kind: str = "") -> Exchange:
    """Start the exchange of one rank.

    Args:
        cfg: What the user chose.
        setup: Who and where this rank is.
        kind: Another implementation than the configured one (`memory`, for tests and simulation).

    Raises:
        PortTakenError: If the configured port is taken.
        ExchangeError: If the exchange cannot begin.
        ValueError: If the configuration and the setup do not fit.
    """
    name = kind or cfg.kind
    if name not in _KINDS:
        raise ValueError(f"no exchange {name!r}: choose one of {', '.join(_KINDS)}")
    module, _, attribute = _KINDS[name].partition(":")
    exchange: Exchange = getattr(import_module(module), attribute)(cfg, setup)
    return exchange
