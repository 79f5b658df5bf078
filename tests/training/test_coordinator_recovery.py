"""Nodes and coordinators that are stopped, killed and resumed: row counts stay right."""

import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest
from emulated_nodes import check_epochs, child_lines, finish, start_child
from support import wait_until

from storage.objects import ObjectStore
from training.coordinator.node_client import NodeClient


def test_suspended_node_is_dropped_and_rejoins_when_resumed(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=3, shards=24, dead_after_s=8.0).start("--fresh")
    node, child = make_node(coordinator, 0, step_s=0.03), start_child(coordinator, 1)
    try:
        node.start()
        wait_until(lambda: len(child_lines(coordinator, 1)) > 8)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: coordinator.ask(op="status")["progress"]["live"] == 1)
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: "neighbour" in child_lines(coordinator, 1))
        assert finish(node) == {"done"}
        assert child.wait(240) == 0
    finally:
        child.kill()
        child.wait()
    lines = child_lines(coordinator, 1)
    assert lines[-1] == "done"
    rows = [tuple(map(int, line.split())) for line in lines if line[0].isdigit()]
    check_epochs(coordinator, node.trained + rows, 3)


@pytest.mark.slow
def test_suspended_coordinator_drops_no_node_when_resumed(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=2, dead_after_s=0.8, coordinator_grace_s=30.0).start(
        "--fresh"
    )
    nodes = [make_node(coordinator, number, step_s=0.03) for number in range(2)]
    for node in nodes:
        node.start()
    wait_until(lambda: all(node.trained for node in nodes))
    coordinator.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    coordinator.process.send_signal(signal.SIGCONT)
    assert finish(*nodes) == {"done"}
    assert not [entry for entry in coordinator.journal("view") if set(entry["left"].values()) - {"left"}]


@pytest.mark.slow
def test_row_counts_survive_random_kills_of_coordinator_and_nodes(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(
        nodes=3, epochs=3, shards=24, dead_after_s=0.5, coordinator_grace_s=0.3, checkpoint_steps=15
    ).start("--fresh")
    rng = np.random.default_rng(5)
    nodes = {number: make_node(coordinator, number, step_s=0.02) for number in range(3)}
    rows = []
    for node in nodes.values():
        node.start()
    for _ in range(5):
        time.sleep(float(rng.uniform(0.1, 0.4)))
        victim = int(rng.integers(0, 4))
        if victim == 3:
            coordinator.kill()
            coordinator.start()
            # rows that a node trains without a coordinator are unknown if it is killed before it reports them
            back = time.monotonic() + 0.2
            wait_until(
                lambda back=back: all(node.client._state.heard > back or not node.is_alive() for node in nodes.values())
            )
            continue
        if coordinator.ask(op="status")["finish"]:
            break
        nodes[victim].kill()
        rows += nodes[victim].trained
        nodes[victim] = make_node(coordinator, victim, step_s=0.02)
        nodes[victim].start()
    assert finish(*nodes.values()) == {"done"}
    check_epochs(coordinator, rows + [row for node in nodes.values() for row in node.trained], 3)


def complete_checkpoints(coordinator):
    names = ObjectStore(coordinator.job["output_url"]).list("checkpoints")
    return [name for name in names if name.endswith("complete.json")]


def test_stopped_training_resumes_exactly_from_its_checkpoint(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=3, shards=16, checkpoint_steps=8).start("--fresh")
    nodes = [make_node(coordinator, number, step_s=0.01) for number in range(2)]
    stopped = threading.Event()

    def have_begun_the_second_epoch():
        return sum(len(node.trained) for node in nodes) > coordinator.size

    for node in nodes:
        node.hold = lambda: have_begun_the_second_epoch() and stopped.wait(240)
        node.start()
    wait_until(have_begun_the_second_epoch)
    coordinator.ask(op="stop")
    stopped.set()
    assert finish(*nodes) == {"stop"}
    assert 1 <= len(complete_checkpoints(coordinator)) <= 2
    document = ObjectStore(coordinator.job["output_url"]).read_json(complete_checkpoints(coordinator)[-1])
    assert [record["node"] for record in document["records"]] == [0, 1]
    coordinator.close()
    coordinator.start("--fresh")
    again = [make_node(coordinator, number, step_s=0.005) for number in range(2)]
    assert {node.reply.source for node in again} == {"checkpoint"}
    assert [node.reply.record["node"] for node in again] == [0, 1]
    assert [node.reply.step for node in again] == [record["step"] for record in document["records"]]
    for node in again:
        node.start()
    assert finish(*again) == {"done"}
    before = [tuple(pair) for record in document["records"] for pair in record["trained"]]
    resume = coordinator.journal("resume")[0]
    assert resume["steps"] == {f"{n}.0": record["step"] for n, record in enumerate(document["records"])}
    trained = before + [pair for node in again for pair in node.trained]
    assert Counter(trained) == Counter((epoch, row) for epoch in range(3) for row in range(coordinator.size))
    assert len(complete_checkpoints(coordinator)) == 2


def test_killed_single_node_resumes_from_the_checkpoint_in_the_same_order(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(coordinator, step_s=0.01)
    node.hold = lambda: complete_checkpoints(coordinator) and node.halt.set()
    node.start()
    wait_until(lambda: complete_checkpoints(coordinator))
    node.kill()
    again = make_node(coordinator, step_s=0.002)
    assert again.reply.source == "checkpoint"
    assert again.reply.session != node.reply.session
    before = [tuple(pair) for pair in again.reply.record["trained"]]
    again.start()
    assert finish(again) == {"done"}
    order = [(epoch, row) for epoch in range(2) for row in range(coordinator.size)]
    assert sorted(before) + again.trained == order
    steps = [entry["step"] for entry in coordinator.journal("step")]
    assert steps == list(range(1, len(order) // 4 + 1))


def test_damaged_checkpoint_is_skipped(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(coordinator, step_s=0.01)
    node.hold = lambda: len(complete_checkpoints(coordinator)) == 2 and node.halt.set()
    node.start()
    wait_until(lambda: len(complete_checkpoints(coordinator)) == 2)
    node.kill()
    client = NodeClient(coordinator.address, None, 0, folder=coordinator.folder / "x")
    try:
        first = client.join(("e",))
        second = client.rejoin(("e",), damaged=first.resume)
        third = client.rejoin(("e",), damaged=second.resume)
    finally:
        client.close()
    assert (first.source, second.source, third.source) == ("checkpoint", "checkpoint", "initial")
    assert first.resume > second.resume
