"""Where machines of a node find each other: who sits together, and when a meeting is over."""

from types import SimpleNamespace

import pytest

from training.coordinator.messages import CoordinatorError
from training.coordinator.rendezvous import Meetings


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meetings(clock):
    return new_store(clock)


def new_store(clock, nodes=2, machines=3):
    return Meetings(SimpleNamespace(nodes=nodes, machines_per_node=machines, dead_after_s=10.0), clock)


def look(meetings, machine, token, address="", node=0):
    return meetings.meet({"node": node, "machine": machine, "token": token, "address": address})


def stay(meetings, machine, met, leaving=False):
    message = {"node": 0, "machine": machine, "token": met[machine], "met": met, "leaving": leaving}
    return meetings.meet(message)


def sit_down(meetings, tokens):
    for machine in (1, 2):
        look(meetings, machine, tokens[machine])
    return look(meetings, 0, tokens[0], "host:1")["met"]


def test_machines_wait_until_all_are_there_and_the_first_one_listens(meetings):
    assert look(meetings, 2, "c") == {"met": [], "address": "", "missing": [0, 1]}
    assert look(meetings, 0, "a")["missing"] == [1]
    assert look(meetings, 1, "b") == {"met": [], "address": "", "missing": []}
    assert look(meetings, 0, "a", "host:1") == {"met": ["a", "b", "c"], "address": "host:1", "missing": []}
    # learners of the same machine ask, and a lost answer is asked for again
    for machine, token in enumerate("abc"):
        assert look(meetings, machine, token) == {"met": ["a", "b", "c"], "address": "host:1", "missing": []}
    assert look(meetings, 0, "x", node=1)["missing"] == [1, 2]


def test_whoever_asks_no_more_is_not_waited_with(meetings, clock):
    look(meetings, 1, "b")
    clock.now += 6
    look(meetings, 2, "c")
    assert look(meetings, 0, "a", "host:1")["missing"] == [1]


def test_a_machine_that_begins_anew_ends_the_meeting_for_all_and_they_meet_again(meetings):
    met = sit_down(meetings, "abc")
    assert stay(meetings, 0, met) == {"over": "", "leave": False}
    assert look(meetings, 1, "b2")["missing"] == [0, 2]
    assert stay(meetings, 0, met)["over"] == "machine 1 has restarted"
    assert stay(meetings, 2, met)["over"] == "machine 1 has restarted"
    look(meetings, 2, "c2")
    assert look(meetings, 0, "a2", "host:2") == {"met": ["a2", "b2", "c2"], "address": "host:2", "missing": []}
    assert stay(meetings, 1, ["a2", "b2", "c2"])["over"] == ""
    # whoever is left of the first meeting hears that it is over
    assert stay(meetings, 2, met)["over"] == "the other machines have formed a new group"


def test_a_silent_machine_ends_the_meeting(meetings, clock):
    met = sit_down(meetings, "abc")
    for _ in range(29):
        clock.now += 1
        assert not stay(meetings, 0, met)["over"]
        stay(meetings, 1, met)
    clock.now += 2
    assert stay(meetings, 0, met)["over"] == "machine 2 has not reported for 30 s"


def test_a_store_that_was_stopped_blames_nobody(meetings, clock):
    met = sit_down(meetings, "abc")
    clock.now += 1000
    assert [stay(meetings, machine, met)["over"] for machine in (0, 1, 2)] == ["", "", ""]


def test_a_new_store_learns_who_sits_together(meetings, clock):
    met = sit_down(meetings, "abc")
    after = new_store(clock)
    look(after, 1, "b2")
    assert stay(after, 0, met)["over"] == "machine 1 has restarted"
    after = new_store(clock)
    assert [stay(after, machine, met)["over"] for machine in (0, 1, 2)] == ["", "", ""]


def test_one_that_wants_to_leave_is_heard_by_all(meetings):
    met = sit_down(meetings, "abc")
    assert stay(meetings, 2, met, leaving=True) == {"over": "", "leave": True}
    assert stay(meetings, 0, met) == {"over": "", "leave": True}
    met = sit_down(meetings, ["a2", "b2", "c2"])
    assert not stay(meetings, 0, met)["leave"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"node": 2, "machine": 0, "token": "a"}, "no machine 0 of node 2: train.nodes is 2"),
        ({"node": 0, "machine": 3, "token": "a"}, "no machine 3 of node 0"),
        ({"node": 0, "machine": -1, "token": "a"}, "no machine -1"),
        ({"node": 0, "machine": 0, "token": ""}, "needs a token"),
        ({"node": 0, "machine": 0, "token": "a" * 300}, "needs a token"),
        ({"node": 0, "machine": 0, "token": "a", "met": ["a"]}, "the tokens of all machines"),
    ],
)
def test_nonsense_is_refused(meetings, message, why):
    with pytest.raises(CoordinatorError, match=why):
        meetings.meet(message)
