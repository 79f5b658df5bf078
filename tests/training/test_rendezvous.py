"""Rendezvous of a node's machines: which machines form a group, and when it is over."""

import json
from types import SimpleNamespace

import pytest

from training.coordinator.messages import CoordinatorError, read_request
from training.coordinator.rendezvous import RendezvousService


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(clock):
    return new_service(clock)


def new_service(clock, nodes=2, machines=3):
    return RendezvousService(SimpleNamespace(nodes=nodes, machines_per_node=machines, dead_after_s=10.0), clock)


def ask(service, **fields):
    reply = service.answer(read_request(json.dumps({"op": "rendezvous", **fields}).encode()))
    return json.loads(reply.model_dump_json(exclude_defaults=True))


def ask_to_join(service, machine, token, address="", node=0):
    return ask(service, node=node, machine=machine, token=token, address=address)


def keep_alive(service, machine, group, leaving=False):
    return ask(service, node=0, machine=machine, token=group[machine], group=group, leaving=leaving)


def reason_of_end(service, machine, group):
    return keep_alive(service, machine, group).get("over", "")


def form_group(service, tokens):
    for machine in (1, 2):
        ask_to_join(service, machine, tokens[machine])
    return ask_to_join(service, 0, tokens[0], "host:1")["group"]


def test_machines_wait_for_all_and_the_first_one_listens(service):
    assert ask_to_join(service, 2, "c") == {"missing": [0, 1]}
    assert ask_to_join(service, 0, "a")["missing"] == [1]
    assert ask_to_join(service, 1, "b") == {}
    assert ask_to_join(service, 0, "a", "host:1") == {"group": ["a", "b", "c"], "address": "host:1"}
    # learners of the same machine ask, and a lost answer is asked for again
    for machine, token in enumerate("abc"):
        assert ask_to_join(service, machine, token) == {"group": ["a", "b", "c"], "address": "host:1"}
    assert ask_to_join(service, 0, "x", node=1)["missing"] == [1, 2]


def test_a_machine_that_stops_asking_does_not_count_as_waiting(service, clock):
    ask_to_join(service, 1, "b")
    clock.now += 6
    ask_to_join(service, 2, "c")
    assert ask_to_join(service, 0, "a", "host:1")["missing"] == [1]


def test_a_machine_that_restarts_ends_the_group_and_all_form_a_new_one(service):
    group = form_group(service, "abc")
    assert keep_alive(service, 0, group) == {}
    assert ask_to_join(service, 1, "b2")["missing"] == [0, 2]
    assert reason_of_end(service, 0, group) == "machine 1 has restarted"
    assert reason_of_end(service, 2, group) == "machine 1 has restarted"
    ask_to_join(service, 2, "c2")
    assert ask_to_join(service, 0, "a2", "host:2") == {"group": ["a2", "b2", "c2"], "address": "host:2"}
    assert reason_of_end(service, 1, ["a2", "b2", "c2"]) == ""
    # a remaining machine of the first group learns that it is over
    assert reason_of_end(service, 2, group) == "the other machines have formed a new group"


def test_a_silent_machine_ends_the_group(service, clock):
    group = form_group(service, "abc")
    for _ in range(29):
        clock.now += 1
        assert not reason_of_end(service, 0, group)
        keep_alive(service, 1, group)
    clock.now += 2
    assert reason_of_end(service, 0, group) == "machine 2 has not reported for 30 s"


def test_a_coordinator_that_was_suspended_keeps_all_groups(service, clock):
    group = form_group(service, "abc")
    clock.now += 1000
    assert [reason_of_end(service, machine, group) for machine in (0, 1, 2)] == ["", "", ""]


def test_a_restarted_coordinator_learns_the_groups(service, clock):
    group = form_group(service, "abc")
    after = new_service(clock)
    ask_to_join(after, 1, "b2")
    assert reason_of_end(after, 0, group) == "machine 1 has restarted"
    after = new_service(clock)
    assert [reason_of_end(after, machine, group) for machine in (0, 1, 2)] == ["", "", ""]


def test_a_machine_that_leaves_makes_the_whole_group_leave(service):
    group = form_group(service, "abc")
    assert keep_alive(service, 2, group, leaving=True) == {"leave": True}
    assert keep_alive(service, 0, group) == {"leave": True}
    group = form_group(service, ["a2", "b2", "c2"])
    assert not keep_alive(service, 0, group).get("leave")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"node": 2, "machine": 0, "token": "a"}, "no machine 0 of node 2: train.nodes is 2"),
        ({"node": 0, "machine": 3, "token": "a"}, "no machine 3 of node 0"),
        ({"node": 0, "machine": -1, "token": "a"}, "no machine -1"),
        ({"node": 0, "machine": 0, "token": ""}, "rendezvous.token"),
        ({"node": 0, "machine": 0, "token": "a" * 300}, "rendezvous.token"),
        ({"node": 0, "machine": 0, "token": "a", "group": ["a"]}, "the tokens of all 3 machines"),
    ],
)
def test_invalid_requests_are_refused(service, message, why):
    with pytest.raises(CoordinatorError, match=why):
        ask(service, **message)
