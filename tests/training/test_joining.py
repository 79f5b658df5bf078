"""Joining the ring, the same for a pipeline's worker and a `Ring`: where weights come from, and how often it asks."""

from types import SimpleNamespace

import pytest
import torch

from training.coordinator.membership import Member, View
from training.learner.checkpoint import CheckpointError
from training.node import node_exchange
from training.node.node_exchange import NodeExchange, NoWeightsError, RingMember
from training.node.process_group import NodeGroup
from training.node.worker import Worker
from training.ring.learner import RingLearner

VIEW = View(1, (Member(0, "a", ("",)), Member(3, "b", ("",))))


class Client:
    """Answers each request with the next of the given replies; the last one is repeated."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    def join(self, endpoints, damaged="", kind="join"):
        self.asked.append((kind, damaged))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        facts = {"view": VIEW.to_dict(), "step": 0, "finish": "", "resume": None} | reply
        return SimpleNamespace(facts=lambda: facts)

    def rejoin(self, endpoints, damaged=""):
        return self.join(endpoints, damaged, "rejoin")


class Newcomer(RingMember):
    """Records where its weights come from; a neighbour gives them at the last of `tries`."""

    def __init__(self, client, folder, tries=1):
        flat = SimpleNamespace(weights=torch.zeros(2))
        super().__init__(NodeExchange(0, NodeGroup(0, 1, folder, torch.device("cpu")), flat, None), client)
        self.tries, self.log = tries, []

    def _take_from_neighbour(self, facts):
        self.tries -= 1
        self.log.append("neighbour")
        return not self.tries

    def _set_weights(self, facts):
        self.log.append(facts["source"])
        if facts["resume"] == "damaged":
            raise CheckpointError("a file is damaged")

    def _begin(self, facts):
        self.log.append("begin")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(node_exchange, "RETRY_S", 0.0)


def test_worker_and_ring_join_alike():
    assert issubclass(Worker, RingMember)
    assert issubclass(RingLearner, RingMember)
    assert {Worker.set_view, RingLearner.set_view} == {RingMember.set_view}


def test_newcomer_asks_again_until_a_neighbour_gives_its_weights(tmp_path):
    newcomer = Newcomer(Client({"source": "neighbour", "step": 7}), tmp_path, tries=7)
    newcomer.join()
    assert newcomer.log == ["neighbour"] * 7 + ["begin"]
    assert newcomer.client.asked == [("join", "")] + [("rejoin", "")] * 6
    assert (newcomer.step, newcomer.ring.view) == (7, VIEW)


def test_damaged_checkpoint_is_named_and_an_older_one_is_taken(tmp_path):
    replies = [{"source": "checkpoint", "resume": name} for name in ("damaged", "older")]
    newcomer = Newcomer(Client(*replies), tmp_path)
    newcomer.join()
    assert newcomer.log == ["checkpoint", "checkpoint", "begin"]
    assert newcomer.client.asked == [("join", ""), ("join", "damaged")]


def test_member_that_comes_back_with_its_own_weights_keeps_its_steps(tmp_path):
    newcomer = Newcomer(Client({"source": "own", "step": 3}), tmp_path)
    newcomer.step = 5
    newcomer.join(again=True)
    assert (newcomer.step, newcomer.client.asked, newcomer.log) == (5, [("rejoin", "")], ["own", "begin"])


def test_newcomer_gives_up_in_time_and_names_the_nodes_that_gave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(node_exchange, "JOIN_S", 0.0)
    newcomer = Newcomer(Client({"source": "neighbour"}), tmp_path, tries=9)
    with pytest.raises(NoWeightsError, match="node 0 found no weights .* although nodes 3 are in the ring"):
        newcomer.join()
    assert newcomer.log == ["neighbour"]
