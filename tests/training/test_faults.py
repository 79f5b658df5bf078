"""Faults in the middle of real trainings by four learners: each run finishes, utterances add up, the model is as good.

Learners are slowed down (tests/slow_nodes), because a tiny model's training would be over before anything happens.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_training import QUICK, Running, send_signal
from support import environment, processes_naming, slow_nodes, wait_until
from tones import LEARNS, bare

from training.launch.training_process import TrainingFailedError

ROOT = Path(__file__).resolve().parents[2]
NODES = 4
EPOCHS = 12


def fault_job(corpus, folder, **changes):
    spec = corpus.spec("conformer", model=bare("conformer"))
    options = {"spec": spec, "epochs": EPOCHS, "optimizer": {"lr": 1e-2}, **LEARNS, "checkpoint_steps": 20}
    options |= {"strategy": "adpsgd", "nodes": NODES, "membership": QUICK}
    return corpus.job(folder, **(options | changes))


def check(running, trained, utterances, least=0):
    """Everything adds up, and the model has learned."""
    # an epoch's line comes again, corrected, when a row of it is reported after it had closed: the last one counts
    epochs = list({entry["epoch"]: entry for entry in running.entries("epoch")}.values())
    assert [entry["epoch"] for entry in epochs] == list(range(1, EPOCHS + 1))
    for entry in epochs:
        assert entry["utterances"] == entry["index"] == utterances
        assert len(entry["repeated_ids"]) == entry["repeated"]
    repeated = sum(entry["repeated"] for entry in epochs)
    assert trained.result["repeated"] == repeated
    # rows that a lost learner had started are counted as repeated, though it may not have reported them
    assert EPOCHS * utterances <= trained.result["utterances"] <= EPOCHS * utterances + repeated
    # noise of undisturbed runs: 0.09 to 0.15 nats per token, from 2.3 at the start
    assert trained.result["valid"]["loss"] < 0.35
    assert trained.result["valid"]["wer"] <= 0.1


def departures(running):
    """Why nodes left the ring in mid-run, by node."""
    return [(node, why) for entry in running.entries("view") for node, why in entry["left"].items() if why != "left"]


@pytest.mark.slow
def test_killed_learner_of_four_is_dropped_and_rejoins(corpus, tmp_path):
    with Running(fault_job(corpus, tmp_path)) as running:
        running.wait_for_epoch(2)
        victim = running.learner(2)
        send_signal(victim, signal.SIGKILL)
        trained = running.finish()
    check(running, trained, len(corpus.train))
    joined = [node for entry in running.entries("view") for node in entry["joined"]]
    assert joined.count(2) == 2, "its processes are started again, and it rejoins"


@pytest.mark.slow
def test_training_survives_a_killed_coordinator(corpus, tmp_path):
    with Running(fault_job(corpus, tmp_path)) as running:
        for epochs in (2, 5):
            running.wait_for_epoch(epochs)
            (coordinator,) = wait_until(lambda: running.processes("training.coordinator.server"))
            send_signal(coordinator, signal.SIGKILL)
        trained = running.finish()
    # nodes that wait longer than their grace for the coordinator train their own shares, which may be repeated
    check(running, trained, len(corpus.train))
    assert departures(running) == []


@pytest.mark.slow
def test_training_survives_a_coordinator_killed_while_starting(corpus, tmp_path):
    with Running(fault_job(corpus, tmp_path)) as running:
        killed = set()
        for _ in range(2):
            (coordinator,) = wait_until(
                lambda: set(running.processes("training.coordinator.server")) - killed, every_s=0.02
            )
            send_signal(coordinator, signal.SIGKILL)
            killed.add(coordinator)
        trained = running.finish()
    check(running, trained, len(corpus.train))


@pytest.mark.slow
def test_training_survives_a_killed_node_of_two_learners(corpus, tmp_path):
    job = fault_job(corpus, tmp_path, strategy="h-adpsgd", nodes=3, learners_per_node=2)
    with Running(job, slow=10) as running:
        running.wait_for_epoch(2)
        for module in ("training.node.agent", "training.node.rank", "training.exchange.daemon"):
            for pid in running.processes(module, 1):
                send_signal(pid, signal.SIGKILL)
        trained = running.finish(240)
    check(running, trained, len(corpus.train))


@pytest.mark.slow
def test_training_survives_a_killed_rank_of_a_node(corpus, tmp_path):
    job = fault_job(corpus, tmp_path, strategy="h-adpsgd", nodes=2, learners_per_node=2)
    with Running(job, slow=10) as running:
        running.wait_for_epoch(2)
        send_signal(running.processes("training.node.rank", 1)[-1], signal.SIGKILL)
        trained = running.finish(240)
    check(running, trained, len(corpus.train))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_learner_suspended_for_twenty_seconds_is_dropped_and_rejoins(corpus, tmp_path):
    with Running(fault_job(corpus, tmp_path), slow=40) as running:
        running.wait_for_epoch(1)
        victim = running.learner(1)
        send_signal(victim, signal.SIGSTOP)
        began = len(running.entries("epoch"))
        time.sleep(20)
        went_on = len(running.entries("epoch")) - began
        send_signal(victim, signal.SIGCONT)
        trained = running.finish(300)
    check(running, trained, len(corpus.train))
    assert went_on >= 1, "the others must not have waited"
    assert any(node == "1" for node, _ in departures(running))
    joined = [node for entry in running.entries("view") for node in entry["joined"]]
    assert joined.count(1) == 2


@pytest.mark.slow
def test_slow_learner_trains_less_and_delays_no_other(corpus, tmp_path):
    with Running(fault_job(corpus, tmp_path), slow=20, **{"3": 200}) as running:
        trained = running.finish()
    check(running, trained, len(corpus.train))
    done = {}
    for entry in running.entries("step"):
        done[entry["learner"]] = entry["utterances"]
    assert done["3.0"] < 0.5 * min(done[name] for name in ("0.0", "1.0", "2.0"))
    assert trained.result["repeated"] == 0


@pytest.mark.slow
def test_learner_can_join_during_training(corpus, tmp_path):
    """Node 3 is killed permanently at the start; a process started by hand replaces it."""
    takes = {"kind": "adpsgd", "newcomer": "weights+optimizer"}
    job = fault_job(corpus, tmp_path, membership={**QUICK, "max_restarts": 0}, strategy=takes)
    with Running(job, slow=20) as running:
        running.wait_for_epoch(1)
        for module in ("training.node.agent", "training.node.rank"):
            for pid in running.processes(module, 3):
                send_signal(pid, signal.SIGKILL)
        wait_until(lambda: departures(running))
        store = json.loads((tmp_path / "coordinator.json").read_text())["address"]
        words = ["--coordinator", store, "--key-file", str(tmp_path / "ring.key"), "--node-rank", "3"]
        words += ["--folder", str(tmp_path / "by-hand")]
        with environment(**slow_nodes({3: 20})):
            joiner = subprocess.Popen([sys.executable, "-m", "tasks.engine", "training.node.agent", *words], cwd=ROOT)
        try:
            trained = running.finish()
            assert joiner.wait(240) == 0
        finally:
            joiner.kill()
    check(running, trained, len(corpus.train))
    after = [entry for entry in running.entries("step") if entry["learner"] == "3.0"]
    assert after[-1]["epoch"] > after[0]["epoch"] + 1
    assert "a neighbour's optimizer state after " in (tmp_path / "by-hand" / "node.log").read_text()
    # it starts at the present position of the schedule, without another warm-up
    again = [entry["elapsed"] for entry in running.entries("view") if 3 in entry["joined"]][1]
    rejoined = next(entry for entry in after if entry["elapsed"] > again)
    steps = [entry["step"] for entry in after]
    assert steps == sorted(set(steps)), "it goes on counting where the lost process had stopped"
    others = [entry for entry in running.entries("step") if entry["learner"] == "0.0"]
    near = min(others, key=lambda entry: abs(entry["epoch"] - rejoined["epoch"]))
    assert rejoined["lr"] == pytest.approx(near["lr"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [NODES, 2])
def test_killed_training_resumes_from_its_checkpoints(corpus, tmp_path, nodes):
    """With as many nodes each continues its replica; with another number all start from the average."""
    with Running(fault_job(corpus, tmp_path)) as running:
        running.wait_for_epoch(4)
        for pid in processes_naming(str(tmp_path)):
            if int(pid) != os.getpid():
                send_signal(pid, signal.SIGKILL)
        with pytest.raises(TrainingFailedError):
            running.finish(30)
    with Running(fault_job(corpus, tmp_path, nodes=nodes)) as running:
        trained = running.finish()
    check(running, trained, len(corpus.train))
    resumes = running.entries("resume")
    assert len(resumes) == 1
    assert resumes[0]["epoch"] >= 2
