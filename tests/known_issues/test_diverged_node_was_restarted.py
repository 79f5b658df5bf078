"""torchrun ends with status 1 whatever its ranks' status is: a node that had diverged was restarted three times."""

import sys
import threading

import pytest
from support import wait_until

from training.node import agent as module
from training.node.agent import Node
from training.node.rank import DIVERGED, GAVE_UP, STOPPED, NodeSetup


@pytest.mark.parametrize(("gives_up", "status", "starts"), [(True, DIVERGED, 1), (False, 1, 3)])
def test_node_is_restarted_only_if_its_rank_did_not_give_up(tmp_path, monkeypatch, gives_up, status, starts):
    job = {"train": {"learners_per_node": 2}}
    monkeypatch.setattr(module, "fetch_job", lambda *_, **__: job)
    monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.01)
    note = f"open({str(tmp_path / GAVE_UP)!r}, 'w').write('no more'); " if gives_up else ""
    code = f"{note}open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit(1)"
    monkeypatch.setattr(Node, "_command", lambda *_: [sys.executable, "-c", code])
    (tmp_path / GAVE_UP).write_text("of an earlier time")
    node = Node(NodeSetup(node=0, coordinator="127.0.0.1:1", key_file=None, folder=tmp_path), max_restarts=2)
    assert node.run() == status
    assert (tmp_path / "starts").read_text() == "x" * starts


def test_stopped_node_lets_its_ranks_leave_and_starts_them_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "END_S", 240.0)  # a busy machine may take longer than ten seconds
    monkeypatch.setattr(module, "fetch_job", lambda *_, **__: {"train": {"learners_per_node": 1}})
    ready = tmp_path / "ready"
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
    code += f"open({str(ready)!r}, 'a').write('x'); time.sleep(600)"
    monkeypatch.setattr(Node, "_command", lambda *_: [sys.executable, "-c", code])
    node = Node(NodeSetup(node=0, coordinator="127.0.0.1:1", key_file=None, folder=tmp_path), max_restarts=2)

    def stop_when_ready():  # not as soon as the file exists: a signal between its creation and the note leaves it empty
        wait_until(lambda: ready.exists() and ready.read_text(), every_s=0.01)
        node.request_stop()

    stopping = threading.Thread(target=stop_when_ready, daemon=True)
    stopping.start()
    assert node.run() == STOPPED
    stopping.join(240.0)
    assert ready.read_text() == "x"


def test_node_on_another_machine_uses_its_own_cache(tmp_path, monkeypatch):
    job = {"train": {"learners_per_node": 1}, "cache": "/of/the/head", "cache_bytes": 5}
    monkeypatch.setattr(module, "fetch_job", lambda *_, **__: dict(job))
    monkeypatch.setattr(Node, "_command", lambda *_: [sys.executable, "-c", ""])
    setup = NodeSetup(node=0, coordinator="127.0.0.1:1", key_file=None, folder=tmp_path)
    assert Node(setup, 0, tmp_path / "cache").run() == 0
    assert f'"cache": "{tmp_path / "cache"}", "cache_bytes": 5' in (tmp_path / "job.json").read_text()
