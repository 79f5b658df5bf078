"""The coordinator as a process, with nodes as threads and processes: work, membership, refusals."""

import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pretending import (
    ROOT,
    check_epochs,
    finish,
    wait_for,
)

from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import CoordinatorError, CoordinatorUnreachableError
from training.coordinator.node_client import NodeClient
from training.coordinator.node_state import COORDINATOR_LOST
from training.coordinator.requests import StatusRequest
from training.coordinator.server import CoordinatorServer
from training.coordinator.settings import Settings
from training.processes.keys import RingKey


def test_one_node_gets_each_epoch_whole_and_in_one_order(make_store, make_node):
    store = make_store(epochs=3).start("--fresh")
    node = make_node(store)
    assert (node.reply.source, node.reply.fresh, node.reply.epoch) == ("initial", True, 0)
    node.start()
    assert finish(node) == {"done"}
    assert node.trained == [(epoch, row) for epoch in range(3) for row in range(store.size)]
    check_epochs(store, node.trained, 3)
    assert all(entry["repeated"] == 0 for entry in store.journal("epoch"))
    kinds = [entry["kind"] for entry in store.journal()]
    assert kinds[0] == "start"
    assert kinds.count("step") == len(node.trained) // 4
    status = store.ask(op="status")
    assert (status["finish"], status["totals"]["utterances"]) == ("done", 3 * store.size)
    assert [item["epoch"] for item in store.ask(op="evaluations")["ready"]] == [1, 2, 3]


def test_nodes_share_an_epoch_and_the_fast_one_takes_more(make_store, make_node):
    store = make_store(nodes=2, epochs=2, shards=20).start("--fresh")
    fast, slow = make_node(store, 0, step_s=0.01), make_node(store, 1, step_s=0.1)
    for node in (fast, slow):
        node.start()
    assert finish(fast, slow) == {"done"}
    check_epochs(store, fast.trained + slow.trained, 2)
    assert all(entry["repeated"] == 0 for entry in store.journal("epoch"))
    assert len(fast.trained) > 2 * len(slow.trained)


def test_a_killed_store_goes_on_where_it_was(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=16).start("--fresh")
    nodes = [make_node(store, number, step_s=0.01) for number in range(2)]
    for node in nodes:
        node.start()
    address = store.address
    for _ in range(3):
        time.sleep(0.3)
        store.kill()
        store.start()
        assert store.address == address
    assert finish(*nodes) == {"done"}
    check_epochs(store, nodes[0].trained + nodes[1].trained, 3)
    steps = Counter((entry["learner"], entry["step"]) for entry in store.journal("step"))
    assert set(steps.values()) == {1}
    assert len(steps) == sum(node.client.step for node in nodes)


@pytest.mark.slow
def test_without_a_store_a_node_takes_its_own_share(make_store, make_node):
    store = make_store(nodes=2, epochs=2, shards=40).start("--fresh")
    nodes = [make_node(store, number, step_s=0.005) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: all(node.trained for node in nodes))
    store.kill()
    wait_for(lambda: sum(len(node.trained) for node in nodes) > 0.9 * store.size)
    store.start()
    assert finish(*nodes) == {"done"}
    check_epochs(store, nodes[0].trained + nodes[1].trained, 2)


def test_a_store_that_stays_away_ends_the_node(make_store, make_node):
    store = make_store(epochs=1, coordinator_patience_s=1.0).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    wait_for(lambda: node.trained)
    store.kill()
    assert finish(node) == {COORDINATOR_LOST}


def test_a_lost_node_is_dropped_and_its_rows_are_trained_by_others(make_store, make_node):
    store = make_store(nodes=3, epochs=2, shards=18).start("--fresh")
    nodes = [make_node(store, number, step_s=0.02) for number in range(3)]
    for node in nodes:
        node.start()
    wait_for(lambda: nodes[0].trained)
    nodes[0].kill()
    assert finish(*nodes[1:]) == {"done"}
    lost = [entry["left"] for entry in store.journal("view") if "0" in entry["left"]]
    assert "no heartbeat" in lost[0]["0"]
    check_epochs(store, [row for node in nodes for row in node.trained], 2)


def test_a_late_node_takes_weights_from_a_neighbour_and_helps(make_store, make_node):
    store = make_store(nodes=1, epochs=2, shards=20).start("--fresh")
    first = make_node(store, 0, step_s=0.03)
    first.start()
    wait_for(lambda: first.trained)
    second = make_node(store, 1, step_s=0.03)
    assert (second.reply.source, second.reply.fresh) == ("neighbour", False)
    second.start()
    assert finish(first, second) == {"done"}
    assert second.trained
    check_epochs(store, first.trained + second.trained, 2)


def test_a_checkpoint_of_another_run_is_refused(make_store, make_node):
    store = make_store(epochs=1, shards=16).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    finish(node)
    store.close()
    (store.folder / "job.json").write_text(json.dumps(store.job | {"run": "run-2"}))
    done = subprocess.run(store.command("--fresh"), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "another configuration" in done.stderr


def test_time_is_up_ends_the_training_and_the_open_epoch_can_be_evaluated(make_store, make_node):
    store = make_store(epochs=1000, shards=16, max_minutes=0.5 / 60).start("--fresh")
    node = make_node(store, step_s=0.002)
    node.start()
    assert finish(node) == {"time"}
    closed = store.ask(op="status")["progress"]["closed"]
    ready = [item["epoch"] for item in store.ask(op="evaluations")["ready"]]
    assert ready[-1] in (closed, closed + 1)
    history = store.ask(op="evaluated", epoch=ready[0], result={"loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}})
    assert history["history"] == [{"epoch": ready[0], "loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}}]
    store.ask(op="evaluated", epoch=ready[0], result={"loss": 9.0})
    store.ask(op="finished", result={"step": 5, "valid": {"loss": 1.0, "wer": 0.5}})
    valid, end = store.journal("valid"), store.journal("end")
    assert [(entry["epoch"], entry["valid_loss"], entry["train_loss"]) for entry in valid] == [(ready[0], 1.5, 2.0)]
    assert [(entry["step"], entry["valid_wer"]) for entry in end] == [(5, 0.5)]


def test_all_nodes_that_fail_fail_the_training(make_store):
    store = make_store(nodes=1).start("--fresh")
    client = NodeClient(store.address, None, 0, folder=store.folder / "x")
    client.join(("e",))
    client.fail("the loss is no number")
    client.close()
    assert store.ask(op="status")["finish"] == "failed: the loss is no number"


def test_training_begins_without_those_that_never_come(make_store, make_node):
    store = make_store(nodes=3, start_patience_s=0.5).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    assert finish(node) == {"done"}
    assert [entry["wanted"] for entry in store.journal("view") if "wanted" in entry] == [3]


def test_two_processes_with_one_number_are_told_apart(make_store, make_node):
    store = make_store().start("--fresh")
    clients = [NodeClient(store.address, None, 0, folder=store.folder / name) for name in "ab"]
    try:
        for client in clients:
            client.join(("e",))
        wait_for(clients[0].dropped)
        with pytest.raises(CoordinatorError, match="its own number"):
            clients[0].rejoin(("e",))
    finally:
        for client in clients:
            client.close()


def test_only_the_ring_s_key_is_let_in(make_store, tmp_path):
    store = make_store(key=True).start("--fresh")
    assert store.ask(op="status")["finish"] == ""

    def ask(key):
        with CoordinatorClient(store.address, key) as stranger:
            return stranger.request(StatusRequest(), patience_s=1.0)

    with ThreadPoolExecutor() as pool:
        other, none = pool.submit(ask, RingKey.generate()), pool.submit(ask, None)
        with pytest.raises(CoordinatorUnreachableError, match="key"):
            other.result()
        with pytest.raises(CoordinatorUnreachableError):
            none.result()


def test_nonsense_is_answered_and_harms_nobody(make_store):
    store = make_store().start("--fresh")
    for message, field in (
        ({"op": "dance"}, "'dance'"),
        ({"op": "join"}, r"join\.node"),
        ({"op": "evaluated", "epoch": "x"}, r"evaluated\.epoch"),
        ({"op": "leave", "incarnation": "a"}, r"leave\.node: Extra"),
        ({}, "op"),
    ):
        with pytest.raises(CoordinatorError, match=f"malformed request.*{field}"):
            store.tell(**message, node="x")
    assert store.ask(op="status")["members"] == []


@pytest.mark.parametrize(
    ("change", "listen", "message"),
    [
        ({"nodes": 13}, "127.0.0.1:0", "fewer nodes"),
        ({}, "0.0.0.0:0", "key"),
        ({}, "nowhere", "HOST:PORT"),
        ({"epochs": "many"}, "127.0.0.1:0", "the job"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(make_store, change, listen, message):
    store = make_store(**change)
    done = subprocess.run(store.command(listen=listen), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused(make_store):
    store = make_store().start("--fresh")
    words = store.command(listen=store.address)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_the_store_needs_no_torch_and_ends_with_its_parent(make_store):
    code = "import sys, training.coordinator.server, training.coordinator.node_client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False"
    store = make_store()
    words = [*store.command("--fresh")[:-1]]
    code = "import os, subprocess, sys, time\n"
    code += "subprocess.Popen([*sys.argv[1:], str(os.getpid())])\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT)
    pid = wait_for(lambda: store.note().get("pid"))
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_a_log_of_another_run_is_begun_anew(make_store, tmp_path):
    """Without being asked to; one of the same run is continued."""
    store = make_store()
    sessions = []
    for run in ("run-1", "run-1", "run-2"):
        settings = Settings.from_job({**store.job, "run": run})
        (tmp_path / "coordinator").mkdir(exist_ok=True)
        server = CoordinatorServer(settings, tmp_path / "coordinator", "tcp://127.0.0.1:0", None, fresh=False)
        sessions.append(server.coordinator.ledger.values.session)
        server.close()
    assert sessions[0] == sessions[1] != sessions[2]
    assert all(sessions)
