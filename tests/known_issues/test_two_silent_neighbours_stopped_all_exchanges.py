"""A node whose next two neighbours did not answer asked nobody until their pause was over, although others were there.

On a random ring every exchange has other neighbours, but the number of the exchange, which determines them, stayed.
"""

import os
import socket
import time

import pytest

from training.coordinator.membership import Member, View
from training.exchange.control import Control
from training.exchange.daemon import ZmqDaemon
from training.exchange.mailbox import Mailbox, make_file

NODES, SILENT = 8, {3, 5}


@pytest.fixture
def daemon():
    """The daemon of node 0 of a random ring of eight; nodes 3 and 5 have not answered."""
    file = make_file(16)
    ours, theirs = socket.socketpair()
    setup = {"node": 0, "seed": 0, "host": "127.0.0.1", "port": 0, "advertise": "", "chunk": 16, "wire": "fp32"}
    setup |= {"neighbours": "random-ring", "per_step": 1, "cpu_share": 0.05, "timeout_s": 60.0}
    daemon = ZmqDaemon(setup, Mailbox(file, 16), Control(ours))
    members = tuple(Member(node, f"i{node}", ("tcp://127.0.0.1:1",)) for node in range(NODES))
    daemon._obey({"view": View(1, members).to_dict()})
    for node in SILENT:
        daemon._peers.get(daemon._addresses[node]).silent(time.monotonic())
    yield daemon
    daemon.close()
    daemon._control.close()
    theirs.close()
    os.close(file)


def test_other_neighbours_are_asked(daemon):
    looks = [daemon._choose(time.monotonic()) for _ in range(200)]
    asked = [address.node for address in looks if address is not None]
    assert set(asked) == set(range(1, NODES)) - SILENT
    assert len(asked) > 150


def test_both_neighbours_on_a_fixed_ring_are_still_asked_in_turn(daemon):
    daemon._kind = "ring"
    assert [daemon._choose(time.monotonic()).node for _ in range(4)] == [1, 7, 1, 7]
    daemon._peers.get(daemon._addresses[1]).silent(time.monotonic())
    assert [daemon._choose(time.monotonic()).node for _ in range(3)] == [7, 7, 7]
