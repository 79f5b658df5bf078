"""A node while the coordinator does not answer, without processes."""

import time

import numpy as np
import pytest
from bookkeeping import PER_SHARD

from training.coordinator.epochs import ShardMap
from training.coordinator.membership import Member, View
from training.coordinator.messages import HeartbeatReply, Progress
from training.coordinator.node_client import NodeClient
from training.coordinator.node_state import COORDINATOR_LOST
from training.coordinator.worklist import Worklist

SIZE = 6 * PER_SHARD


def batches_of_four(epoch, rows, plan):
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


@pytest.fixture
def client(tmp_path):
    """Node 1 of 2, which trains, and has not reached the coordinator for 20 s: longer than the grace of 10 s."""
    client = NodeClient("127.0.0.1:9", None, 1, folder=tmp_path)
    state = client._state
    state.queue = Worklist(ShardMap(np.repeat(np.arange(6), PER_SHARD)), 7, 1, {})
    state.planner, state.known = batches_of_four, HeartbeatReply(running=True, progress=Progress(0, SIZE, 1))
    state.view = View(1, (Member(0, "a"), Member(1, "b")))
    state.heard = time.monotonic() - 20.0
    yield client
    client.close()


def test_idle_node_takes_its_own_share(client):
    client._continue_alone()
    batches = client.peek(99)
    assert len(np.unique(np.concatenate([batch.rows for batch in batches]))) == SIZE // 2
    assert all(batch.own for batch in batches)
    client._continue_alone()
    assert client.peek(99) == batches  # one share at a time


def test_node_with_a_batch_left_takes_no_share(client):
    client._continue_alone()
    while len(client.peek(9)) > 1:
        client._state.queue.next()
    client._continue_alone()
    assert len(client.peek(9)) == 1


def test_no_share_is_taken_within_the_grace_period(client):
    client._state.heard = time.monotonic() - 1.0
    client._continue_alone()
    assert client.peek(9) == []


@pytest.mark.parametrize(("field", "value"), [("known", HeartbeatReply()), ("planner", None), ("queue", None)])
def test_node_that_does_not_train_takes_no_share(client, field, value):
    setattr(client._state, field, value)
    client._continue_alone()
    assert client.peek(9) == []


def test_dropped_node_takes_no_share(client):
    client._state.view = View(2, (Member(0, "a"),))
    client._continue_alone()
    assert client.peek(9) == []


def test_training_ends_after_a_long_silence_of_the_coordinator(client):
    client._state.heard = time.monotonic() - 601.0
    client._continue_alone()
    assert client.finish() == COORDINATOR_LOST
    assert client.peek(9) == []
