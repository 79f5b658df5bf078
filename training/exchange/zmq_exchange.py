"""The default exchange: ZeroMQ between daemons, elastic, authenticated and encrypted."""

from training.exchange.base import ExchangeSetup
from training.exchange.config import ExchangeConfig
from training.exchange.process import ProcessExchange


class ZmqExchange(ProcessExchange):
    """An exchange whose daemon communicates with its neighbours over ZeroMQ."""

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> None:
        """Start the daemon.

        Raises:
            ValueError: If encryption is on and there is no key.
            PortTakenError: If the configured port is in use.
            ExchangeError: If the daemon cannot start.
        """
        if cfg.encrypt and setup.key is None:
            raise ValueError("encrypt is on but there is no key: give a key file (launch.key_file) or encrypt=false")
        super().__init__(cfg, setup, {"kind": "zmq"})
