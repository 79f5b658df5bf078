"""Where ranks have checkpoints of their own, only the rank that found its file damaged asked for an older one.

The others began to train with what they had read, so that the node's ranks waited for each other in different calls, at
each start of the node again.
"""

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from training.coordinator.membership import Member, View
from training.learner.checkpoint import CheckpointError
from training.node.node_exchange import NodeExchange, RingMember
from training.node.process_group import NodeGroup

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Client:
    asked = []

    def join(self, endpoints, damaged=""):
        self.asked.append(damaged)
        view = View(1, (Member(0, "a", endpoints),)).to_dict()
        facts = {"view": view, "step": 0, "finish": "", "source": "checkpoint"}
        return SimpleNamespace(facts=lambda: facts | {"resume": "older" if damaged else "newest"})


class Rank(RingMember):
    resumed = began = ""

    def _take_from_neighbour(self, facts):
        raise AssertionError("there is none")

    def _set_weights(self, facts):
        if facts["resume"] == "newest" and rank == 1:
            raise CheckpointError("the file of rank 1 is damaged")
        self.resumed = facts["resume"]

    def _begin(self, facts):
        self.began = facts["resume"]


group = NodeGroup(rank, size, folder / "meet", torch.device("cpu"))
client = Client() if rank == 0 else None
member = Rank(NodeExchange(0, group, SimpleNamespace(weights=torch.zeros(2)), None), client)
member.join()
assert (member.resumed, member.began) == ("older", "older"), (member.resumed, member.began)
assert client is None or client.asked == ["", "newest"], client.asked
group.close()
print("fine")
"""


def test_all_ranks_take_the_older_checkpoint(ranks, tmp_path):
    ranks.run_ranks(PROGRAM, 2, tmp_path)
