"""An exchange listened on an IPv6 address, and no other could connect to it."""

import socket

import pytest
import torch
from support import wait_until

from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.processes.keys import RingKey


@pytest.fixture
def _loopback():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")


@pytest.mark.usefixtures("_loopback")
@pytest.mark.parametrize(("encrypt", "host"), [(True, "::1"), (False, "[::1]")])
def test_two_exchanges_at_an_ipv6_address_average(encrypt, host, tmp_path):
    config, key = ExchangeConfig(encrypt=encrypt), RingKey.generate() if encrypt else None
    ends = [build_exchange(config, ExchangeSetup(n, 0, 100, key, tmp_path, bind_host=host)) for n in range(2)]
    try:
        view = View(1, tuple(Member(n, "x", (end.endpoint,)) for n, end in enumerate(ends)))
        for n, end in enumerate(ends):
            end.set_view(view)
            end.start(torch.full((100,), float(n)), 0)

        def met():
            ends[0].tick(0)
            return ends[0].stats().finished > 0

        wait_until(met, every_s=0.05)
    finally:
        for end in ends:
            end.close()
