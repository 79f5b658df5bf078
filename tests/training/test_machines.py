"""Nodes of several machines: the same weights as on one machine, also when a machine is lost."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from ranks import run_ranks
from running_training import QUICK, Running, send_signal
from support import ROOT, wait_until
from tones import LEARNS, bare, serve_coordinator, train

from benchmarks.netns import SWITCH_HOST, Switch, address, enter, why_not
from training.coordinator.journal import read_journal
from training.coordinator.messages import CoordinatorError
from training.launch.training_process import run_training
from training.node.rank import NodeSetup
from training.node.rendezvous import INTERFACES, RankPlacement, Rendezvous, RendezvousError
from training.processes.keys import RingKey
from training.processes.sockets import AddressError, interface_of
from training.strategies.registry import STRATEGIES

PATIENCE_S = 240.0
"""A dozen processes have to start first, on whatever machine."""
LONG = {"epochs": 40, "checkpoint_steps": 20, "membership": QUICK}


def machines_job(corpus, folder, machines=2, layers=1, **changes):
    options = {**LEARNS, "strategy": "scpsgd", "learners_per_node": 2, "machines_per_node": machines, "epochs": 3}
    model = bare("conformer").model_copy(update={"layers": layers})
    return corpus.job(folder, spec=corpus.spec("conformer", model=model), **(options | changes))


LEARNER = """
import sys, time
from pathlib import Path
import torch
from training.node.process_group import NodeGroup
from training.node.rendezvous import RankPlacement, Rendezvous
from training.node.rank import NodeSetup

rank, size, folder, address = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
setup = NodeSetup(node=0, machine=rank, machines=size, coordinator=address, key_file=None, folder=folder)
meeting = Rendezvous(setup, RankPlacement(rank, size, f"start of {rank}"), None, patience_s=240.0, ask_s=0.05)
group = NodeGroup(rank, size, meeting.store, torch.device("cpu"))
assert group.gather_text(f"I am {rank}") == [f"I am {number}" for number in range(size)]
if rank == 1:
    meeting.wants_to_leave.set()
assert meeting.leaving.wait(240)
group.all(True)
meeting.close()
group.close()
print("fine")
"""


def test_machines_find_each_other_by_the_coordinator_and_leave_together(corpus, tmp_path):
    with serve_coordinator(machines_job(corpus, tmp_path)) as address:
        run_ranks(LEARNER, 2, tmp_path, address)


def why_alone(setup):
    with pytest.raises(RendezvousError) as failure:
        Rendezvous(setup, RankPlacement(0, 2, "alone"), None, patience_s=1.0)
    return str(failure.value)


def test_machine_of_an_incomplete_node_gives_up_with_the_reason(corpus, tmp_path, monkeypatch):
    for name in INTERFACES:
        monkeypatch.setenv(name, "lo")  # else this process would keep what is set here
    with serve_coordinator(machines_job(corpus, tmp_path)) as address:
        setup = NodeSetup(node=0, machine=0, machines=2, coordinator=address, key_file=None, folder=tmp_path)
        reason = "has waited 1 s for its machine(s) 1: start a process on each"
        wait_until(lambda: reason in why_alone(setup))  # a busy coordinator may not answer within a second
        unknown = setup.model_copy(update={"node": 1})
        with pytest.raises(CoordinatorError, match="there is no machine 0 of node 1"):
            Rendezvous(unknown, RankPlacement(0, 2, "alone"), None, patience_s=240.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name, method in STRATEGIES.items() if method.traits.one_node])
def test_strategies_of_one_node_give_the_same_weights_on_two_machines(corpus, tmp_path, strategy):
    changes = {"strategy": strategy, "learners_per_node": 4, "layers": 4}
    single = train(machines_job(corpus, tmp_path / "one", 1, **changes))
    two = train(machines_job(corpus, tmp_path / "two", 2, **changes))
    assert two.losses == single.losses
    assert two.model_bytes == single.model_bytes


@pytest.mark.slow
def test_super_learners_can_span_several_machines(corpus, tmp_path):
    job = machines_job(corpus, tmp_path, strategy="h-adpsgd", nodes=2, epochs=12)
    trained = train(job)
    assert trained.result["utterances"] == 12 * 48
    assert trained.result["valid"]["wer"] < 0.5
    assert {entry["learner"] for entry in trained.entries("step")} == {"0.0", "0.1", "1.0", "1.1"}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_node_resumes_from_its_checkpoint_after_a_learner_is_killed(corpus, tmp_path, victim):
    with Running(machines_job(corpus, tmp_path, **LONG), **{"1": 4}) as running:
        running.wait_for_epoch(6, PATIENCE_S)
        send_signal(running.learner(victim), signal.SIGKILL)
        check(running.finish())


@pytest.mark.slow
def test_restarted_machine_finds_the_others(corpus, tmp_path):
    with Running(machines_job(corpus, tmp_path, learners_per_node=4, **LONG), **{"1": 4}) as running:
        running.wait_for_epoch(6, PATIENCE_S)
        for pid in running.processes("training.node.agent", 1):
            send_signal(pid, signal.SIGKILL)
        check(running.finish())


@pytest.mark.slow
def test_wait_for_a_stopped_machine_is_bounded(corpus, tmp_path):
    job = machines_job(corpus, tmp_path, **LONG | {"membership": {**QUICK, "dead_after_s": 2.0}})
    with Running(job, **{"1": 4}) as running:
        running.wait_for_epoch(6, PATIENCE_S)
        (victim,) = running.processes("training.node.rank", 1)
        send_signal(victim, signal.SIGSTOP)
        log = tmp_path / "node-000" / "node.log"
        try:
            wait_until(lambda: "machine 1 has not reported for 6 s" in log.read_text())
        finally:
            send_signal(victim, signal.SIGCONT)
        check(running.finish())


@pytest.mark.slow
def test_machines_continue_while_the_coordinator_restarts(corpus, tmp_path):
    with Running(machines_job(corpus, tmp_path, **LONG), **{"1": 4}) as running:
        running.wait_for_epoch(6, PATIENCE_S)
        learners = [running.learner(number) for number in (0, 1)]
        send_signal(running.processes("training.coordinator.server")[0], signal.SIGKILL)
        running.wait_for_epoch(12, PATIENCE_S)
        assert [running.learner(number) for number in (0, 1)] == learners
        check(running.finish())
    assert not running.entries("resume")


@pytest.mark.slow
def test_leaving_machine_makes_its_node_leave_with_a_checkpoint(corpus, tmp_path):
    with Running(machines_job(corpus, tmp_path, **LONG), **{"1": 4}) as running:
        running.wait_for_epoch(6, PATIENCE_S)
        send_signal(running.processes("training.node.agent", 1)[0], signal.SIGTERM)
        wait_until(lambda: not running.processes("training.node.rank"))
        (left,) = [entry for entry in running.entries("view") if entry["left"]]
        assert list(left["left"].values()) == ["left"]


def check(trained):
    assert 40 * 48 <= trained.result["utterances"] <= 40 * 48 + trained.result["repeated"]
    assert trained.result["valid"]["wer"] < 0.5


@pytest.mark.slow
def test_machines_in_separate_network_namespaces_train_together(corpus, tmp_path):
    if reason := why_not():
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    key = tmp_path / "ring.key"
    RingKey.generate().save(key)
    launch = {"kind": "external", "listen": "0.0.0.0:7155", "key_file": str(key), "trusted_network": True}
    job = machines_job(corpus, tmp_path, learners_per_node=4, strategy="bmuf", launch=launch, epochs=6)
    errors = []

    def head():
        try:
            with_switch()
        except Exception as error:
            errors.append(error)

    def with_switch():
        switch = Switch(2, "1gbit")  # this thread, and what it starts, is behind it now
        nodes = []
        for number, namespace in enumerate(switch.machines):
            command = [
                "-m",
                "tasks.engine",
                "training.node.agent",
                "--coordinator",
                f"{SWITCH_HOST}:7155",
                "--key-file",
                str(key),
            ]
            command += ["--folder", str(tmp_path / f"machine-{number}"), "--node-rank", str(number)]
            command += ["--bind", address(number)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            nodes.append(
                subprocess.Popen(
                    [sys.executable, *command], env=environment, preexec_fn=lambda namespace=namespace: enter(namespace)
                )
            )
        try:
            run_training(job, tmp_path)
            assert [node.wait(240) for node in nodes] == [0, 0]
        finally:
            for node in nodes:
                node.kill()

    thread = threading.Thread(target=head)
    thread.start()
    thread.join(240)
    assert not errors, errors
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    assert result["utterances"] == 6 * 48
    assert {entry["learner"] for entry in read_journal(job.journal) if entry["kind"] == "step"} == {"0.0"} | {
        f"0.{rank}" for rank in range(1, 4)
    }


def test_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("[::1]") == "lo"
    with pytest.raises(AddressError, match="no network interface has the address 192.0.2.77"):
        interface_of("192.0.2.77")
    with pytest.raises(AddressError, match="give --bind"):
        interface_of("no such host.invalid")
