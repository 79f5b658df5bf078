"""torchrun ends with status 1 if its ranks end with 75: a node of several learners was restarted after a stop.

Once its ranks were told to end, its own status was torchrun's, too: a flow of Prefect then failed instead of stopping.
"""

import sys

import pytest

from training.node import agent as module
from training.node.agent import Node
from training.node.rank import GAVE_UP, STOPPED, NodeSetup

RANKS = """
import sys
from pathlib import Path
from training.node.rank import status_below_torchrun
statuses = [status_below_torchrun(75, Path(sys.argv[1])) for _ in range(2)]
assert statuses == [0, 0]
open(Path(sys.argv[1]) / "starts", "a").write("x")
raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("torchrun", [0, 1], ids=["torchrun-saw-them-end", "torchrun-was-told-to-end-itself"])
def test_node_of_several_learners_ends_as_stopped(tmp_path, monkeypatch, torchrun):
    monkeypatch.setattr(module, "fetch_job", lambda *_, **__: {"train": {"learners_per_node": 2}})
    monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(Node, "_command", lambda *_: [sys.executable, "-c", RANKS, str(tmp_path), str(torchrun)])
    (tmp_path / GAVE_UP).write_text("of an earlier time")
    node = Node(NodeSetup(node=0, coordinator="127.0.0.1:1", key_file=None, folder=tmp_path), max_restarts=2)
    assert node.run() == STOPPED
    assert (tmp_path / "starts").read_text() == "x"
