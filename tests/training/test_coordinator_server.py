"""The coordinator as a process, with nodes as threads and processes: work, membership, refusals."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from emulated_nodes import ROOT, check_epochs, finish
from support import processes_naming, wait_until

from training.coordinator.client import CoordinatorClient
from training.coordinator.core import Settings
from training.coordinator.messages import CoordinatorError, CoordinatorUnreachableError, StatusRequest
from training.coordinator.node_client import NodeClient
from training.coordinator.node_state import COORDINATOR_LOST
from training.coordinator.server import CoordinatorServer
from training.processes.keys import RingKey


def test_single_node_trains_each_epoch_completely_and_in_order(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=3).start("--fresh")
    node = make_node(coordinator)
    assert (node.reply.source, node.reply.fresh, node.reply.epoch) == ("initial", True, 0)
    node.start()
    assert finish(node) == {"done"}
    assert node.trained == [(epoch, row) for epoch in range(3) for row in range(coordinator.size)]
    check_epochs(coordinator, node.trained, 3)
    assert all(entry["repeated"] == 0 for entry in coordinator.journal("epoch"))
    kinds = [entry["kind"] for entry in coordinator.journal()]
    assert kinds[0] == "start"
    assert kinds.count("step") == len(node.trained) // 4
    status = coordinator.ask(op="status")
    assert (status["finish"], status["totals"]["utterances"]) == ("done", 3 * coordinator.size)
    assert [item["epoch"] for item in coordinator.ask(op="evaluations")["ready"]] == [1, 2, 3]


def test_nodes_share_an_epoch_and_the_faster_one_trains_more(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=2, shards=20).start("--fresh")
    fast, slow = (make_node(coordinator, number, step_s=0.01) for number in range(2))

    def may_go_on():  # ten times slower, however busy the machine is; but the other one cannot do what is leased
        return len(fast.trained) >= 10 * len(slow.trained) or not coordinator.ask(op="status")["pool"]

    slow.hold = lambda: wait_until(may_go_on, every_s=0.05)
    for node in (fast, slow):
        node.start()
    assert finish(fast, slow) == {"done"}
    check_epochs(coordinator, fast.trained + slow.trained, 2)
    assert all(entry["repeated"] == 0 for entry in coordinator.journal("epoch"))
    assert len(fast.trained) > 2 * len(slow.trained)


def test_killed_coordinator_resumes_where_it_stopped(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=3, shards=16, coordinator_grace_s=0.3).start("--fresh")
    nodes = [make_node(coordinator, number, step_s=0.01) for number in range(2)]
    for node in nodes:
        node.start()
    address = coordinator.address
    for _ in range(3):
        time.sleep(0.3)
        coordinator.kill()
        coordinator.start()
        assert coordinator.address == address
    assert finish(*nodes) == {"done"}
    check_epochs(coordinator, nodes[0].trained + nodes[1].trained, 3)
    steps = Counter((entry["learner"], entry["step"]) for entry in coordinator.journal("step"))
    assert set(steps.values()) == {1}
    assert len(steps) == sum(node.client.step for node in nodes)


@pytest.mark.slow
def test_node_trains_its_own_share_while_the_coordinator_is_down(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=2, epochs=2, shards=40, coordinator_grace_s=0.3).start("--fresh")
    nodes = [make_node(coordinator, number, step_s=0.005) for number in range(2)]
    for node in nodes:
        node.start()
    wait_until(lambda: all(node.trained for node in nodes))
    coordinator.kill()
    wait_until(lambda: sum(len(node.trained) for node in nodes) > 0.9 * coordinator.size)
    coordinator.start()
    assert finish(*nodes) == {"done"}
    check_epochs(coordinator, nodes[0].trained + nodes[1].trained, 2)


def test_node_ends_if_the_coordinator_stays_down(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=1000, coordinator_patience_s=1.0).start("--fresh")
    node = make_node(coordinator, step_s=0.001)
    node.start()
    wait_until(lambda: node.trained or not node.is_alive())
    coordinator.kill()
    assert finish(node) == {COORDINATOR_LOST}


def test_a_lost_node_is_dropped_and_its_rows_are_trained_by_others(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=3, epochs=2, shards=18, dead_after_s=1.0).start("--fresh")
    nodes = [make_node(coordinator, number, step_s=0.02) for number in range(3)]
    nodes[0].hold = nodes[0].halt.set  # after the first step
    for node in nodes:
        node.start()
    wait_until(lambda: nodes[0].trained)
    nodes[0].kill()
    assert finish(*nodes[1:]) == {"done"}
    lost = [entry["left"] for entry in coordinator.journal("view") if "0" in entry["left"]]
    assert "no heartbeat" in lost[0]["0"]
    check_epochs(coordinator, [row for node in nodes for row in node.trained], 2)


def test_late_node_takes_weights_from_a_neighbour_and_trains(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=1, epochs=2, shards=20).start("--fresh")
    first = make_node(coordinator, 0, step_s=0.03)
    started = threading.Event()
    first.hold = lambda: first.trained and started.wait(240) and wait_until(lambda: second.trained)
    first.start()
    wait_until(lambda: first.trained)
    second = make_node(coordinator, 1, step_s=0.03)
    assert (second.reply.source, second.reply.fresh) == ("neighbour", False)
    second.start()
    started.set()
    assert finish(first, second) == {"done"}
    assert second.trained
    check_epochs(coordinator, first.trained + second.trained, 2)


def test_a_checkpoint_of_another_run_is_refused(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=1, shards=16).start("--fresh")
    node = make_node(coordinator, step_s=0.001)
    node.start()
    finish(node)
    coordinator.close()
    (coordinator.folder / "job.json").write_text(json.dumps(coordinator.job | {"run": "run-2"}))
    done = subprocess.run(coordinator.command("--fresh"), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "another configuration" in done.stderr


def test_time_limit_ends_training_and_the_open_epoch_can_be_evaluated(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(epochs=1000, shards=16, max_minutes=6 / 60).start("--fresh")
    node = make_node(coordinator, step_s=0.002)
    node.start()
    assert finish(node) == {"limit"}
    closed = coordinator.ask(op="status")["progress"]["closed"]
    ready = [item["epoch"] for item in coordinator.ask(op="evaluations")["ready"]]
    assert ready[-1] in (closed, closed + 1)
    history = coordinator.ask(op="evaluated", epoch=ready[0], result={"loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}})
    assert history["history"] == [{"epoch": ready[0], "loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}}]
    coordinator.ask(op="evaluated", epoch=ready[0], result={"loss": 9.0})
    coordinator.ask(op="finished", result={"step": 5, "valid": {"loss": 1.0, "wer": 0.5}})
    valid, end = coordinator.journal("valid"), coordinator.journal("end")
    assert [(entry["epoch"], entry["valid_loss"], entry["train_loss"]) for entry in valid] == [(ready[0], 1.5, 2.0)]
    assert [(entry["step"], entry["valid_wer"]) for entry in end] == [(5, 0.5)]


def test_training_fails_if_all_nodes_fail(make_coordinator_process):
    coordinator = make_coordinator_process(nodes=1).start("--fresh")
    client = NodeClient(coordinator.address, None, 0, folder=coordinator.folder / "x")
    client.join(("e",))
    client.fail("the loss is no number")
    client.close()
    assert coordinator.ask(op="status")["finish"] == "failed: the loss is no number"


def test_training_starts_without_nodes_that_do_not_join(make_coordinator_process, make_node):
    coordinator = make_coordinator_process(nodes=3, start_patience_s=0.5).start("--fresh")
    node = make_node(coordinator, step_s=0.001)
    node.start()
    assert finish(node) == {"done"}
    assert [entry["wanted"] for entry in coordinator.journal("view") if "wanted" in entry] == [3]


def test_second_process_with_the_same_node_number_is_refused(make_coordinator_process, make_node):
    coordinator = make_coordinator_process().start("--fresh")
    clients = [NodeClient(coordinator.address, None, 0, folder=coordinator.folder / name) for name in "ab"]
    try:
        for client in clients:
            client.join(("e",))
        wait_until(clients[0].dropped)
        with pytest.raises(CoordinatorError, match="its own number"):
            clients[0].rejoin(("e",))
    finally:
        for client in clients:
            client.close()


def test_requests_without_the_ring_key_are_refused(make_coordinator_process, tmp_path):
    coordinator = make_coordinator_process(key=True).start("--fresh")
    assert coordinator.ask(op="status")["finish"] == ""

    def ask(key):
        with CoordinatorClient(coordinator.address, key) as stranger:
            return stranger.request(StatusRequest(), patience_s=1.0)

    with ThreadPoolExecutor() as pool:
        other, none = pool.submit(ask, RingKey.generate()), pool.submit(ask, None)
        with pytest.raises(CoordinatorUnreachableError, match="key"):
            other.result()
        with pytest.raises(CoordinatorUnreachableError):
            none.result()


def test_malformed_requests_get_an_error_and_change_nothing(make_coordinator_process):
    coordinator = make_coordinator_process().start("--fresh")
    for message, field in (
        ({"op": "dance"}, "'dance'"),
        ({"op": "join"}, r"join\.node"),
        ({"op": "evaluated", "epoch": "x"}, r"evaluated\.epoch"),
        ({"op": "leave", "incarnation": "a"}, r"leave\.node: Extra"),
        ({}, "op"),
    ):
        with pytest.raises(CoordinatorError, match=f"malformed request.*{field}"):
            coordinator.send(**message, node="x")
    assert coordinator.ask(op="status")["members"] == []


@pytest.mark.parametrize(
    ("change", "listen", "message"),
    [
        ({"nodes": 13}, "127.0.0.1:0", "fewer nodes"),
        ({}, "0.0.0.0:0", "key"),
        ({}, "nowhere", "HOST:PORT"),
        ({"epochs": "many"}, "127.0.0.1:0", "the job"),
    ],
)
def test_invalid_job_or_address_is_refused_at_the_start(make_coordinator_process, change, listen, message):
    coordinator = make_coordinator_process(**change)
    done = subprocess.run(coordinator.command(listen=listen), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_is_refused(make_coordinator_process):
    coordinator = make_coordinator_process().start("--fresh")
    words = coordinator.command(listen=coordinator.address)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_coordinator_needs_no_torch_and_ends_with_its_parent(make_coordinator_process, tmp_path):
    code = "import sys, training.coordinator.server, training.coordinator.node_client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False"
    coordinator = make_coordinator_process()
    words = [*coordinator.command("--fresh")[:-1]]
    code = "import os, subprocess, sys, time\n"
    code += "subprocess.Popen([*sys.argv[1:], str(os.getpid())])\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT)
    pid = wait_until(lambda: coordinator.note().get("pid"))
    parent.kill()
    parent.wait()
    wait_until(lambda: pid not in processes_naming(str(tmp_path)))


def test_log_of_another_run_is_replaced(make_coordinator_process, tmp_path):
    """Even without --fresh; a log of the same run is continued."""
    coordinator = make_coordinator_process()
    sessions = []
    for run in ("run-1", "run-1", "run-2"):
        settings = Settings.from_job({**coordinator.job, "run": run})
        (tmp_path / "coordinator").mkdir(exist_ok=True)
        server = CoordinatorServer(settings, tmp_path / "coordinator", "tcp://127.0.0.1:0", None, fresh=False)
        sessions.append(server.coordinator.ledger.values.session)
        server.close()
    assert sessions[0] == sessions[1] != sessions[2]
    assert all(sessions)
