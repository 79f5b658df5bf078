"""Node runs requested from a fake Prefect when nodes crash, leave, or are left over from an earlier process."""

import json
from itertools import count
from uuid import UUID

import pytest

from tasks.orchestration.nodes import NodeRuns
from tasks.stages.base import StageError
from training.config import TrainConfig
from training.processes.sockets import own_address


class Prefect:
    """Records requests; the test decides the states of runs."""

    def __init__(self):
        self.numbers = count(1)
        self.runs, self.parameters, self.keys, self.cancelled = {}, {}, {}, []
        self.leftovers = {}
        self.away = False

    def start(self, rank, parameters, idempotency_key):
        self._answer()
        if idempotency_key not in self.keys:
            run = UUID(int=next(self.numbers))
            self.keys[idempotency_key] = run
            self.runs[run], self.parameters[run] = ("SCHEDULED", ""), parameters
        return self.keys[idempotency_key]

    def states(self, runs):
        self._answer()
        return {run: self.runs[run] for run in runs}

    def left(self):
        self._answer()
        return self.leftovers

    def cancel(self, run):
        self._answer()
        self.cancelled.append(run)
        self.runs[run] = ("CANCELLED", "")

    def _answer(self):
        if self.away:
            raise OSError("Prefect is away")

    def ranks(self):
        return [parameters["node_rank"] for parameters in self.parameters.values()]

    def run_of(self, rank):
        return [run for run, parameters in self.parameters.items() if parameters["node_rank"] == rank][-1]

    def set_state(self, rank, state, message=""):
        self.runs[self.run_of(rank)] = (state, message)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 0.5
        return self.now


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


class Cluster:
    def __init__(self, folder, nodes=3, credentials="", exchange=None, machines=1, **launch):
        train = TrainConfig(
            strategy="h-adpsgd",
            nodes=nodes,
            learners_per_node=machines,
            machines_per_node=machines,
            exchange=exchange or {},
            launch={"kind": "prefect", **launch},
            membership={"max_restarts": 2},
        )
        self.job = type("Job", (), {"run": "key1", "train": train, "journal": folder / "journal.jsonl"})()
        self.folder, self.prefect, self.clock = folder, Prefect(), Clock()
        self.nodes = NodeRuns(self.job, self.prefect, self.clock, credentials)

    def listen(self, address="127.0.0.1:7100"):
        (self.folder / "coordinator.json").write_text(json.dumps({"address": address, "pid": 1}))

    def poll(self, seconds=3.0):
        self.clock.now += seconds
        self.nodes.poll()


def test_no_run_is_requested_before_the_coordinator_listens(cluster):
    cluster.poll()
    assert cluster.prefect.runs == {}
    (cluster.folder / "coordinator.json").write_text("{")
    cluster.poll()
    assert cluster.prefect.runs == {}


def test_each_node_run_gets_coordinator_address_and_key_path_only(cluster):
    cluster.listen()
    cluster.poll()
    assert cluster.prefect.ranks() == [0, 1, 2]
    key_file = cluster.folder / "ring.key"
    assert list(cluster.prefect.parameters.values())[1] == {
        "node_rank": 1,
        "coordinator": "127.0.0.1:7100",
        "key_file": str(key_file),
        "max_restarts": 2,
    }
    cluster.poll()
    assert len(cluster.prefect.runs) == 3


def test_runs_get_the_name_of_the_credentials_block(tmp_path):
    cluster = Cluster(tmp_path, credentials="lab")
    cluster.listen()
    cluster.poll()
    assert {parameters["credentials"] for parameters in cluster.prefect.parameters.values()} == {"lab"}


def test_frequent_polling_sends_few_requests(cluster):
    cluster.listen()
    cluster.poll()
    asked = []
    cluster.prefect.states = lambda runs: asked.append(runs) or {}
    for _ in range(20):
        cluster.poll(-0.4)
    assert len(asked) <= 2


@pytest.mark.parametrize("how", ["CRASHED", "FAILED"])
def test_crashed_node_is_replaced_alone_a_limited_number_of_times(cluster, how):
    cluster.listen()
    cluster.poll()
    for _ in range(5):
        cluster.prefect.set_state(1, how, "killed")
        cluster.poll()
        cluster.poll()
    assert cluster.prefect.ranks() == [0, 1, 2, 1, 1]


@pytest.mark.parametrize("how", ["COMPLETED", "CANCELLED"])
def test_completed_or_cancelled_node_is_not_replaced(cluster, how):
    cluster.listen()
    cluster.poll()
    cluster.prefect.set_state(1, how)
    cluster.poll()
    assert cluster.prefect.ranks() == [0, 1, 2]


def test_training_ends_when_every_node_failed_too_often(cluster):
    cluster.listen()
    cluster.poll()

    def fail_again_and_again():
        for _ in range(9):
            for rank in range(3):
                cluster.prefect.set_state(rank, "FAILED", "no GPU here")
            cluster.poll()

    with pytest.raises(StageError, match=r"2 replacements included: node 0: no GPU here"):
        fail_again_and_again()


def test_requests_are_repeated_after_an_outage_without_duplicate_runs(cluster):
    cluster.listen()
    cluster.prefect.away = True
    cluster.poll()
    cluster.prefect.away = False
    cluster.poll()
    assert len(cluster.prefect.runs) == 3
    start = cluster.prefect.start

    def answer_is_lost(*given):
        start(*given)
        raise OSError("the answer was lost")

    cluster.prefect.set_state(1, "CRASHED")
    cluster.prefect.start = answer_is_lost
    cluster.poll()
    cluster.prefect.start = start
    cluster.poll()
    assert cluster.prefect.ranks() == [0, 1, 2, 1]


def test_run_on_dead_machine_is_cancelled_after_a_timeout(cluster):
    cluster.listen()
    cluster.poll()
    for rank in range(3):
        cluster.prefect.set_state(rank, "RUNNING")
    cluster.nodes.alive = {0, 1, 2}
    cluster.poll()
    cluster.nodes.alive = {0, 2}
    cluster.poll()
    assert cluster.prefect.cancelled == []
    first = cluster.prefect.run_of(1)
    cluster.poll(60)
    assert cluster.prefect.cancelled == [first]
    assert cluster.prefect.ranks() == [0, 1, 2, 1]
    for _ in range(3):  # the new one has not joined yet: it may still wait for a worker
        cluster.poll(60)
    assert cluster.prefect.ranks() == [0, 1, 2, 1]


def test_absences_of_a_returning_node_do_not_add_up(cluster):
    cluster.listen()
    cluster.poll()
    for rank in range(3):
        cluster.prefect.set_state(rank, "RUNNING")
    for alive in ({0, 1, 2}, {0, 2}, {0, 1, 2}, {0, 2}, {0, 2}):
        cluster.nodes.alive = alive
        cluster.poll(0.7 * cluster.nodes._patience_s)
    assert cluster.prefect.cancelled == []
    cluster.poll(0.7 * cluster.nodes._patience_s)
    assert cluster.prefect.cancelled == [cluster.prefect.keys[f"key1-{cluster.nodes._session}-1-0"]]


def test_completed_node_is_not_considered_missing(cluster):
    cluster.listen()
    cluster.poll()
    for rank in range(3):
        cluster.prefect.set_state(rank, "RUNNING")
    cluster.nodes.alive = {0, 1, 2}
    cluster.poll()
    cluster.prefect.set_state(1, "COMPLETED")
    cluster.nodes.alive = {0, 2}
    for _ in range(3):
        cluster.poll(2 * cluster.nodes._patience_s)
    assert cluster.prefect.cancelled == []
    assert cluster.prefect.ranks() == [0, 1, 2]


def test_machines_of_a_node_have_runs_replaced_together(tmp_path):
    cluster = Cluster(tmp_path, nodes=2, machines=2, trusted_network=True)
    cluster.listen()
    cluster.poll()
    assert cluster.prefect.ranks() == [0, 1, 2, 3]
    for rank in range(4):
        cluster.prefect.set_state(rank, "RUNNING")
    cluster.nodes.alive = {0, 1}
    cluster.poll()
    cluster.nodes.alive = {0}
    cluster.poll()
    lost = [cluster.prefect.run_of(rank) for rank in (2, 3)]
    cluster.poll(60)
    assert cluster.prefect.cancelled == lost
    assert cluster.prefect.ranks() == [0, 1, 2, 3, 2, 3]


def test_leftover_runs_are_kept_only_if_they_reach_the_coordinator(tmp_path):
    cluster = Cluster(tmp_path, key_file="/keys/ring")
    cluster.listen()
    mine, other, strange = (UUID(int=n) for n in (101, 102, 103))
    cluster.prefect.runs |= dict.fromkeys((mine, other, strange), ("RUNNING", ""))
    cluster.prefect.leftovers = {
        mine: {"node_rank": 1, "coordinator": "127.0.0.1:7100"},
        other: {"node_rank": 2, "coordinator": "127.0.0.1:9"},
        strange: {},
    }
    cluster.poll()
    assert cluster.prefect.ranks() == [0, 2]
    assert sorted(cluster.prefect.cancelled) == [other, strange]
    for _ in range(4):  # adopted runs are supervised like those that this process requested
        cluster.poll()
        cluster.prefect.runs[mine] = ("CRASHED", "killed")
        for run in cluster.prefect.runs.keys() - {mine, other, strange}:
            cluster.prefect.runs[run] = ("CRASHED", "killed")
            cluster.prefect.runs[cluster.prefect.run_of(0)] = ("RUNNING", "")
    assert cluster.prefect.ranks().count(1) == 2  # as often as the limit allows
    assert len(cluster.prefect.cancelled) == 2


def test_one_of_two_leftover_runs_of_a_node_is_kept(tmp_path):
    cluster = Cluster(tmp_path, key_file="/keys/ring")
    cluster.listen()
    first, second = (UUID(int=n) for n in (101, 102))
    cluster.prefect.runs |= dict.fromkeys((first, second), ("RUNNING", ""))
    cluster.prefect.leftovers = {run: {"node_rank": 1, "coordinator": "127.0.0.1:7100"} for run in (first, second)}
    cluster.poll()
    assert cluster.prefect.cancelled == [second]
    assert cluster.prefect.ranks() == [0, 2]


def test_session_with_its_own_key_ends_all_leftover_runs(cluster):
    cluster.listen()
    left = UUID(int=101)
    cluster.prefect.leftovers = {left: {"node_rank": 1, "coordinator": "127.0.0.1:7100"}}
    cluster.poll()
    assert cluster.prefect.cancelled == [left]
    assert cluster.prefect.ranks() == [0, 1, 2]


def test_end_of_training_waits_for_nodes_but_cancellation_does_not(cluster, monkeypatch):
    monkeypatch.setattr("tasks.orchestration.nodes._LOOK_S", 0.01)
    cluster.listen()
    cluster.poll()
    for rank in (0, 1):
        cluster.prefect.set_state(rank, "COMPLETED")
    cluster.prefect.set_state(2, "RUNNING")
    cluster.nodes.close(5.0)
    assert cluster.prefect.cancelled == [cluster.prefect.run_of(2)]
    cluster.prefect.away = True
    cluster.nodes.close(0.0)


def test_wildcard_coordinator_address_becomes_this_machines_address(tmp_path):
    cluster = Cluster(tmp_path, listen="0.0.0.0:7100")
    cluster.listen("127.0.0.1:7100")  # what the coordinator says of itself is for this machine
    cluster.poll()
    assert {parameters["coordinator"] for parameters in cluster.prefect.parameters.values()} == {
        f"{own_address('192.0.2.1:9')}:7100"
    }


def test_runs_get_no_key_path_without_encryption(tmp_path):
    cluster = Cluster(tmp_path, exchange={"encrypt": False})
    assert cluster.nodes.key_file == ""


@pytest.mark.parametrize(("coordinator", "own"), [("127.0.0.1:80", "127.0.0.1"), ("nowhere.invalid:1", "127.0.0.1")])
def test_own_address_is_the_one_that_reaches_the_coordinator(coordinator, own):
    assert own_address(coordinator) == own
