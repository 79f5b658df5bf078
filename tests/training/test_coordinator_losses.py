"""Nodes and coordinators that are stopped, killed and resumed: the accounts stay right."""

import signal
import time
from collections import Counter

import numpy as np
import pytest
from pretending import check_epochs, child_lines, finish, start_child, wait_for

from storage.objects import ObjectStore
from training.coordinator.node_client import NodeClient


def test_a_stopped_node_is_dropped_and_rejoins_when_it_wakes(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=24, dead_after_s=0.6).start("--fresh")
    node, child = make_node(store, 0, step_s=0.03), start_child(store, 1)
    try:
        node.start()
        wait_for(lambda: len(child_lines(store, 1)) > 8)
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: store.ask(op="status")["progress"]["live"] == 1)
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: "neighbour" in child_lines(store, 1))
        assert finish(node) == {"done"}
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
    lines = child_lines(store, 1)
    assert lines[-1] == "done"
    rows = [tuple(map(int, line.split())) for line in lines if line[0].isdigit()]
    check_epochs(store, node.trained + rows, 3)


@pytest.mark.slow
def test_a_stopped_store_drops_nobody_when_it_wakes(make_store, make_node):
    store = make_store(nodes=2, epochs=2, dead_after_s=0.8, coordinator_grace_s=30.0).start("--fresh")
    nodes = [make_node(store, number, step_s=0.03) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: all(node.trained for node in nodes))
    store.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    store.process.send_signal(signal.SIGCONT)
    assert finish(*nodes) == {"done"}
    assert not [entry for entry in store.journal("view") if set(entry["left"].values()) - {"left"}]


@pytest.mark.slow
def test_random_kills_of_store_and_nodes_keep_the_accounts(make_store, make_node):
    store = make_store(nodes=3, epochs=3, shards=24, dead_after_s=0.5, checkpoint_steps=15).start("--fresh")
    rng = np.random.default_rng(5)
    nodes = {number: make_node(store, number, step_s=0.02) for number in range(3)}
    rows = []
    for node in nodes.values():
        node.start()
    for _ in range(5):
        time.sleep(float(rng.uniform(0.1, 0.4)))
        victim = int(rng.integers(0, 4))
        if victim == 3:
            store.kill()
            store.start()
            # a node that is killed before it could tell what it did alone takes the knowledge with it
            back = time.monotonic() + 0.2
            wait_for(
                lambda back=back: all(node.client._state.heard > back or not node.is_alive() for node in nodes.values())
            )
            continue
        if store.ask(op="status")["finish"]:
            break
        nodes[victim].kill()
        rows += nodes[victim].trained
        nodes[victim] = make_node(store, victim, step_s=0.02)
        nodes[victim].start()
    assert finish(*nodes.values()) == {"done"}
    check_epochs(store, rows + [row for node in nodes.values() for row in node.trained], 3)


def complete(store):
    names = ObjectStore(store.job["output_url"]).list("checkpoints")
    return [name for name in names if name.endswith("complete.json")]


def test_a_stopped_training_resumes_with_exactly_what_the_checkpoint_holds(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=16, checkpoint_steps=8).start("--fresh")
    nodes = [make_node(store, number, step_s=0.01) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: sum(len(node.trained) for node in nodes) > store.size)
    store.ask(op="stop")
    assert finish(*nodes) == {"stop"}
    assert 1 <= len(complete(store)) <= 2
    document = ObjectStore(store.job["output_url"]).read_json(complete(store)[-1])
    assert [record["node"] for record in document["records"]] == [0, 1]
    store.close()
    store.start("--fresh")
    again = [make_node(store, number, step_s=0.005) for number in range(2)]
    assert {node.reply.source for node in again} == {"checkpoint"}
    assert [node.reply.record["node"] for node in again] == [0, 1]
    assert [node.reply.step for node in again] == [record["step"] for record in document["records"]]
    for node in again:
        node.start()
    assert finish(*again) == {"done"}
    before = [tuple(pair) for record in document["records"] for pair in record["trained"]]
    resume = store.journal("resume")[0]
    assert resume["steps"] == {f"{n}.0": record["step"] for n, record in enumerate(document["records"])}
    trained = before + [pair for node in again for pair in node.trained]
    assert Counter(trained) == Counter((epoch, row) for epoch in range(3) for row in range(store.size))
    assert len(complete(store)) == 2


def test_a_lone_node_that_was_killed_goes_back_to_the_checkpoint_and_repeats_the_order(make_store, make_node):
    store = make_store(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(store, step_s=0.01)
    node.start()
    wait_for(lambda: complete(store))
    node.kill()
    again = make_node(store, step_s=0.002)
    assert again.reply.source == "checkpoint"
    assert again.reply.session != node.reply.session
    before = [tuple(pair) for pair in again.reply.record["trained"]]
    again.start()
    assert finish(again) == {"done"}
    order = [(epoch, row) for epoch in range(2) for row in range(store.size)]
    assert sorted(before) + again.trained == order
    steps = [entry["step"] for entry in store.journal("step")]
    assert steps == list(range(1, len(order) // 4 + 1))


def test_a_damaged_checkpoint_is_passed_over(make_store, make_node):
    store = make_store(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(store, step_s=0.01)
    node.start()
    wait_for(lambda: len(complete(store)) == 2)
    node.kill()
    client = NodeClient(store.address, None, 0, folder=store.folder / "x")
    try:
        first = client.join(("e",))
        second = client.rejoin(("e",), damaged=first.resume)
        third = client.rejoin(("e",), damaged=second.resume)
    finally:
        client.close()
    assert (first.source, second.source, third.source) == ("checkpoint", "checkpoint", "initial")
    assert first.resume > second.resume
