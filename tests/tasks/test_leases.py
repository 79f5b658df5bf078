"""Leases: one owner, known by name; released on its death or after a time limit; kept during outages."""

import logging
import os
import subprocess
import sys
import threading
from contextvars import copy_context
from dataclasses import asdict, replace

import httpx
import pytest
from support import load_beside, wait_until

from tasks.locking import leases
from tasks.locking.leases import LEASE_S, LeaseTable, LockLease, impatient_client
from tasks.locking.lock_owner import LockOwner
from training.processes.identity import ProcessIdentity

variables_server = load_beside(__file__, "variables_server.py").variables_server
NAME = "lock-train-x"


AHEAD = pytest.param(7200.0, id="clock ahead", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param(-7200.0, id="clock behind"), AHEAD])
def variables(monkeypatch, request):
    monkeypatch.setattr(leases, "_WAITS_S", (0.0, 0.0))
    with variables_server(request.param) as started:
        yield started


@pytest.fixture
def table(variables):
    with impatient_client() as client:
        yield LeaseTable(client)


def elsewhere(run="other"):
    """An owner of whom this machine has no information."""
    return replace(LockOwner.here(run, "http://ui/1"), place="far/boot/ns")


def test_one_owner_at_a_time_whom_others_can_see(table, variables):
    first = elsewhere("nightly")
    lease = table.take(NAME, first)
    holder = table.take(NAME, LockOwner.here("second"))
    assert holder == first
    assert str(holder) == f"run nightly (http://ui/1), process {os.getpid()} on far, since {first.since}"
    table.drop(lease)
    assert isinstance(table.take(NAME, LockOwner.here("second")), str)


def test_process_about_to_be_killed_releases_all_leases(table, variables):
    for name in ("lock-a", "lock-b"):
        me = LockOwner.here(name)
        LockLease(name, table.take(name, me), me)
    kept = table.take(NAME, elsewhere())
    leases.give_back_all(60.0)
    assert all(isinstance(table.take(name, elsewhere("next")), str) for name in ("lock-a", "lock-b"))
    assert isinstance(table.take(NAME, LockOwner.here("second")), LockOwner)
    assert kept


def test_slow_release_of_a_lease_delays_nothing(table, variables, monkeypatch):
    me = LockOwner.here("run")
    lease = LockLease(NAME, table.take(NAME, me), me)
    waiting = threading.Event()
    monkeypatch.setattr(LeaseTable, "drop", lambda *_: waiting.wait(240))
    leases.give_back_all(0.05)
    assert lease._thread.is_alive()
    waiting.set()
    lease.join(240)


def test_one_of_many_takers_gets_a_free_or_stale_lease(table, variables):
    for _ in range(2):
        results = []

        def take(number, results=results):
            with impatient_client() as client:
                results.append(LeaseTable(client).take(NAME, elsewhere(str(number))))

        threads = [threading.Thread(target=copy_context().run, args=(take, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert len(results) == 3
        assert sum(isinstance(result, str) for result in results) == 1
        variables.age(NAME, LEASE_S + 1)


@pytest.mark.parametrize("variables", [-7200.0, 7200.0], ids=["clock behind", "clock ahead"], indirect=True)
def test_lease_ages_by_the_servers_clock_until_renewed(table, variables):
    first = elsewhere()
    lease = table.take(NAME, first)
    variables.age(NAME, LEASE_S - 60)
    assert table.take(NAME, LockOwner.here("second")) == first
    assert table.renew(lease, first)
    variables.age(NAME, LEASE_S + 2)
    assert isinstance(table.take(NAME, LockOwner.here("second")), str)
    assert not table.renew(lease, first)
    table.drop(lease)  # it now has another owner
    assert variables.kept[NAME]["value"]["run"] == "second"


def test_stale_lease_taken_meanwhile_is_not_taken_again(table, variables):
    """Before the stale lease is deleted, another owner has already replaced it under the same name."""
    table.take(NAME, elsewhere("dead"))
    variables.age(NAME, LEASE_S + 1)
    earlier = elsewhere("earlier")

    def first(method, path):
        if method == "DELETE":
            variables.before = lambda *_: None
            del variables.kept[NAME]
            variables.put(NAME, asdict(earlier))

    variables.before = first
    assert table.take(NAME, elsewhere("later")) == earlier
    assert variables.kept[NAME]["value"]["run"] == "earlier"


def test_vanished_lease_is_neither_renewed_nor_dropped_by_name(table, variables):
    lease = table.take(NAME, elsewhere("first"))
    del variables.kept[NAME]
    second = variables.put(NAME, asdict(elsewhere("second")))
    assert not table.renew(lease, elsewhere("first"))
    table.drop(lease)
    assert (variables.kept[NAME]["id"], variables.kept[NAME]["value"]["run"]) == (second, "second")


def test_owner_with_dead_process_is_gone(table):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = LockOwner.here("dead")
    dead = replace(here, pid=child.pid, started="1")
    assert dead.gone()  # another process has this number now
    started = LockOwner.here("x").started
    alive = replace(here, pid=os.getpid(), started=started)
    assert not alive.gone()
    child.communicate(b"\n")
    assert replace(here, pid=child.pid, started=started).gone()
    assert not replace(dead, place="far/boot/ns").gone()  # this machine cannot know
    table.take(NAME, dead)
    assert isinstance(table.take(NAME, LockOwner.here("second")), str)


def test_zombie_process_owns_nothing():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        mine = replace(LockOwner.here("mine"), pid=child.pid, started=ProcessIdentity.of(child.pid).started)
        assert not mine.gone()
        child.kill()
        wait_until(mine.gone, every_s=0.01)
        assert os.path.exists(f"/proc/{child.pid}")


@pytest.mark.parametrize("value", [None, "text", 3, [], {}, {"pid": "x"}])
def test_malformed_owner_is_read_as_unknown_run(value):
    holder = LockOwner.read(value)
    assert not holder.gone()
    assert "an unknown run" in str(holder)


def test_lost_answer_does_not_count_as_another_owner(table, variables):
    variables.lose_answers = 1
    lease = table.take(NAME, LockOwner.here("mine"))
    assert variables.kept[NAME]["id"] == lease


def test_refusal_by_the_server_is_raised(table, variables):
    variables.refuse = 401
    with pytest.raises(httpx.HTTPStatusError):
        table.take(NAME, LockOwner.here("mine"))
    assert len(variables.asked) == 1
    variables.refuse = 503
    with pytest.raises(httpx.HTTPStatusError):
        table.take(NAME, LockOwner.here("mine"))
    assert len(variables.asked) == 4


@pytest.fixture
def hold_lease(table):
    """Takes the lease, and keeps it until the test's end at the latest."""
    made = []

    def start(beats):
        me = elsewhere("mine")
        lease = LockLease(NAME, table.take(NAME, me), me, logging.getLogger("test"), beats.append, beat_s=0.02)
        made.append(lease)
        return lease

    yield start
    for lease in made:
        lease.give_back()


def test_lease_is_kept_through_an_outage_and_released(hold_lease, variables, caplog):
    caplog.set_level(logging.INFO)
    beats = []
    lease = hold_lease(beats)
    wait_until(lambda: beats, every_s=0.01)
    variables.refuse = 503
    wait_until(lambda: "cannot be renewed" in caplog.text, every_s=0.01)
    wait_until(lambda: len(variables.asked) > 9, every_s=0.01)
    variables.refuse = 0
    wait_until(lambda: "answers again" in caplog.text, every_s=0.01)
    assert caplog.text.count("cannot be renewed") == 1
    assert variables.kept[NAME]["value"]["run"] == "mine"
    lease.give_back()
    assert variables.kept == {}


def test_lost_lease_is_taken_again_when_it_is_free(table, hold_lease, variables, caplog):
    caplog.set_level(logging.INFO)
    lease = hold_lease([])
    variables.age(NAME, LEASE_S + 1)
    with variables.lock:  # what another taker does between two beats
        del variables.kept[NAME]
    other = table.take(NAME, elsewhere("thief"))
    if isinstance(other, str):
        wait_until(lambda: "is held by run thief" in caplog.text, every_s=0.01)
        assert lease.lost_to is not None
        table.drop(other)
    wait_until(lambda: "taken again" in caplog.text, every_s=0.01)
    wait_until(lambda: variables.kept.get(NAME, {}).get("value", {}).get("run") == "mine", every_s=0.01)
    assert lease.lost_to is None
    lease.give_back()
    assert variables.kept == {}


def test_lost_lease_is_not_released_by_its_former_owner(hold_lease, variables):
    lease = hold_lease([])
    with variables.lock:
        del variables.kept[NAME]
        variables.put(NAME, {"run": "thief"})
    wait_until(lambda: lease.lost_to is not None, every_s=0.01)
    lease.give_back()
    assert variables.kept[NAME]["value"] == {"run": "thief"}


def test_each_new_owner_of_a_lost_lease_is_logged(hold_lease, variables, caplog):
    lease = hold_lease([])
    for thief in ("first", "second"):
        with variables.lock:
            del variables.kept[NAME]
            variables.put(NAME, asdict(elsewhere(thief)))
        wait_until(lambda thief=thief: lease.lost_to is not None and lease.lost_to.run == thief, every_s=0.01)
    asked = len(variables.asked)
    wait_until(lambda: len(variables.asked) > asked + 8, every_s=0.01)
    assert [caplog.text.count(f"is held by run {thief}") for thief in ("first", "second")] == [1, 1]
