"""Which run waits for which, and the messages of a run whose resource is taken."""

import socket
import threading
from contextvars import copy_context
from dataclasses import replace

import pytest
from support import load_beside, tiny_document, wait_until

from storage.locks import is_locked
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.policies import SlotsConfig
from tasks.locking import leases, slots
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import (
    SlotTakenError,
    kept_lease,
    lock_name,
    machine_lock,
    output_lock_name,
    shared_lock,
    training_slot,
)
from tasks.stages.base import Run, Stage, lock_path

variables_server = load_beside(__file__, "variables_server.py").variables_server
REFUSE = SlotsConfig(collision="refuse")


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(slots, "REFUSE_S", 0.1)
    monkeypatch.setattr(slots, "_POLL_S", 0.02)
    monkeypatch.setattr(leases, "_WAITS_S", (0.0, 0.0))


@pytest.fixture
def in_a_flow(monkeypatch):
    """As in a flow run with a server that stores variables."""
    with variables_server() as variables:
        monkeypatch.setattr(slots, "_flow_api", lambda: "http://127.0.0.1/api")
        yield variables


def elsewhere(run="nightly"):
    return replace(LockOwner.here(run, "http://ui/flow-runs/1"), place="far/boot/ns")


def config(**changed):
    return parse_config(tiny_document(slots=changed))


def test_lock_names_are_valid_and_differ_by_object_store():
    name, other = (output_lock_name(f"s3://{bucket}/Starling_x/train/0123abcd") for bucket in ("a", "b"))
    assert name != other
    assert name.startswith("lock-train-0123abcd-")
    assert lock_name("training", "GPU pool: A/b") == "lock-training-gpu-pool-a-b"


def test_wrong_collision_strategy_is_refused_with_its_field():
    with pytest.raises(ConfigError, match=r"slots\.collision: 'maybe' is none of 'wait', 'refuse'"):
        config(collision="maybe")


def test_refused_run_names_the_current_owner(home):
    path = lock_path("train", "k")
    with (
        machine_lock([path], "the output train/k", REFUSE, LockOwner.here("nightly", "http://ui/1")),
        pytest.raises(
            SlotTakenError, match=r"the output train/k: held by run nightly \(http://ui/1\), process \d+ on .*cancel"
        ),
        machine_lock([path], "the output train/k", REFUSE, LockOwner.here("mine")),
    ):
        raise AssertionError
    assert not is_locked(path)


def test_error_within_the_block_is_raised_unchanged(home):
    with pytest.raises(KeyError), machine_lock([lock_path("train", "k")], "x", REFUSE, LockOwner.here("mine")):
        raise KeyError


def test_no_lease_is_taken_outside_a_flow(home):
    with shared_lock(["lock-x"], "x", REFUSE, LockOwner.here("mine")) as lease:
        assert lease is None


def test_pool_limits_its_number_of_trainings(home):
    two = config(collision="refuse", trainings=2, pool="gpus")
    with training_slot(two, LockOwner.here("a")), training_slot(two, LockOwner.here("b")):
        with (
            pytest.raises(SlotTakenError, match=r"training in the pool gpus: held by run a, .* and run b, "),
            training_slot(two, LockOwner.here("c")),
        ):
            raise AssertionError
        with training_slot(config(collision="refuse", trainings=0, pool="gpus"), LockOwner.here("d")):
            pass
        with training_slot(config(collision="refuse", pool="others"), LockOwner.here("e")):
            pass
    with training_slot(two, LockOwner.here("c")):
        pass


def test_training_on_another_machine_is_named_and_waited_for(home, in_a_flow, caplog):
    caplog.set_level("INFO")
    name = "lock-training-gpus-1"
    with leases.impatient_client() as client:
        table = leases.LeaseTable(client)
        far = table.take(name, elsewhere())
        with (
            pytest.raises(SlotTakenError, match=r"run nightly \(http://ui/flow-runs/1\), process \d+ on far"),
            training_slot(config(collision="refuse", pool="gpus"), LockOwner.here("mine")),
        ):
            raise AssertionError

        def end():
            wait_until(lambda: "training in the pool gpus: waiting for run nightly" in caplog.text, every_s=0.01)
            table.drop(far)

        other = threading.Thread(target=copy_context().run, args=(end,))
        other.start()
        with training_slot(config(pool="gpus"), LockOwner.here("mine")):
            assert in_a_flow.kept[name]["value"]["run"] == "mine"
        other.join(240)
    assert in_a_flow.kept == {}


def test_outage_before_work_starts_is_waited_out_up_to_a_limit(home, in_a_flow, monkeypatch):
    in_a_flow.refuse = 503
    back = threading.Timer(0.3, lambda: setattr(in_a_flow, "refuse", 0))
    back.start()
    with shared_lock(["lock-x"], "x", REFUSE, LockOwner.here("mine")):
        assert "lock-x" in in_a_flow.kept
    back.join(240)
    in_a_flow.refuse = 503
    monkeypatch.setattr(slots, "OUTAGE_S", 0.1)
    with pytest.raises(Exception, match="503"), shared_lock(["lock-x"], "x", REFUSE, LockOwner.here("mine")):
        raise AssertionError


def test_refusal_by_the_server_is_not_an_outage(home, in_a_flow, monkeypatch):
    monkeypatch.setattr(slots, "OUTAGE_S", 0.5)
    in_a_flow.refuse = 401
    with pytest.raises(Exception, match="401"), shared_lock(["lock-x"], "x", REFUSE, LockOwner.here("mine")):
        raise AssertionError
    assert len(in_a_flow.asked) == 1


def test_trainings_share_their_nodes_pool_or_this_machine(home, in_a_flow):
    launch = {"kind": "prefect", "pool": "gpus"}
    document = tiny_document(train={"strategy": "adpsgd", "nodes": 2, "launch": launch})
    for changed, pool in (({}, "gpus"), ({"slots": {"pool": "mine"}}, "mine")):
        with training_slot(parse_config(document | changed), LockOwner.here("a")):
            assert list(in_a_flow.kept) == [f"lock-training-{pool}-1"]
    with training_slot(config(), LockOwner.here("a")):
        assert list(in_a_flow.kept) == [lock_name("training", socket.gethostname(), "1")]


def test_taken_lease_is_not_waited_for_if_so_configured(in_a_flow):
    with kept_lease("lock-d", elsewhere("first")) as nobody:
        assert nobody is None
        with kept_lease("lock-d", LockOwner.here("second")) as other:
            assert other.run == "first"
    assert in_a_flow.kept == {}


def a_run(name):
    return Run(parse_config(tiny_document(slots={"collision": "refuse"})), name)


def test_output_made_by_another_machine_is_not_made_again(home, in_a_flow):
    """The other machine holds the lease, publishes, and gives the lease back; this one then takes the result."""
    made = []
    stage = Stage("prepare", 1, lambda run: ({}, {}), lambda run, output: made.append(run.run_id) or {"counts": {}})
    run = Run(parse_config(tiny_document()), "mine")
    output = stage.output(run)
    name = output_lock_name(output.store.url)
    with leases.impatient_client() as client:
        far = leases.LeaseTable(client).take(name, elsewhere())
        with pytest.raises(SlotTakenError, match="the output prepare/.*run nightly"):
            stage.execute(a_run("refuses"))
        results = []
        thread = threading.Thread(target=copy_context().run, args=(lambda: results.append(stage.execute(run)),))
        asked = len(in_a_flow.asked)
        thread.start()
        wait_until(lambda: len(in_a_flow.asked) > asked + 1, every_s=0.01)
        output.publish({"counts": {"far": 1}})
        leases.LeaseTable(client).drop(far)
        thread.join(240)
    assert made == []
    assert results[0].cached
    assert results[0].counts == {"far": 1}


def test_finished_work_sends_no_request_to_the_server(home, in_a_flow):
    stage = Stage("prepare", 1, lambda run: ({}, {}), lambda run, output: {"counts": {}})
    assert not stage.execute(a_run("first")).cached
    asked = len(in_a_flow.asked)
    assert asked
    assert stage.execute(a_run("second")).cached
    assert len(in_a_flow.asked) == asked


def test_output_published_after_an_expired_lock_is_not_overwritten(home, in_a_flow, monkeypatch, caplog):
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    thief = {"id": "1", "value": {"run": "thief"}, "updated": "2999-01-01T00:00:00Z"}

    def work(run, output):
        name = output_lock_name(output.store.url)
        with in_a_flow.lock:
            in_a_flow.kept[name] = thief | {"name": name}
        wait_until(lambda: "is held by run thief" in caplog.text, every_s=0.01)
        output.publish({"counts": {"thief": 1}})
        return {"counts": {"mine": 1}}

    result = Stage("prepare", 1, lambda run: ({}, {}), work).execute(a_run("mine"))
    assert result.counts == {"thief": 1}
