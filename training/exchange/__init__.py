"""Averages weights with neighbours while gradients are computed; importing this imports neither torch nor ZeroMQ.

A learner calls an `Exchange` (`base`). Its side of the shared memory is a `MailboxExchange` (`client`), whose `Mover`
copies weights in and what was averaged out: from main memory, from a device, or within it. On the other side an
`Averager` averages chunks by the half-difference rule and a `Protocol` decides, both without I/O. What drives them is
the one thing that differs: the daemon over ZeroMQ in a process of its own (`ProcessExchange`), the same in a thread for
weights that stay in GPU memory (`CudaExchange`), or a virtual network (`training.simulation.exchange`).
"""

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
    from training.exchange.client import SeveralExchanges

    each = cfg.model_copy(update={"cpu_share": cfg.cpu_share / cfg.daemons})
    return SeveralExchanges(lambda part: made(each, part), setup, cfg.daemons)
