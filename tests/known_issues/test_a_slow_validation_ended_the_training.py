"""Two learners trained Whisper, and validation, which one process does after them, took longer than twenty minutes: the
training failed, although nothing was wrong.
"""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from training.launch import supervisor as module
from training.launch.supervisor import TrainingSupervisor
from training.processes.signs import Signs, last_sign
from training.processes.supervision import SupervisorError


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Watches an evaluator whose nodes have ended, for a number of rounds of 100 s, and then it ends."""

    def watch(rounds, on_round):
        clock = [0.0]
        evaluator = SimpleNamespace(ended=None, look=lambda **_: None, tail=lambda: "epoch 2")
        node = SimpleNamespace(ended=0, look=lambda **_: None)

        def sleep(_):
            clock[0] += 100.0
            on_round()
            if clock[0] >= 100.0 * rounds:
                evaluator.ended = 0

        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        supervisor = SimpleNamespace(
            evaluator=evaluator,
            coordinator=SimpleNamespace(look=lambda **_: None),
            servers=[],
            nodes=[node],
            stop_requested=False,
            folder=tmp_path,
            _revive=lambda part, **_: part.look(),
            _outcome=lambda: "model",
        )
        return TrainingSupervisor._watch(supervisor, "127.0.0.1:1")

    return watch


def test_evaluator_that_computes_is_waited_for(watched, tmp_path):
    signs = iter(range(1, 1000))

    def compute():
        (tmp_path / "computing").write_text("")
        os.utime(tmp_path / "computing", ns=(0, next(signs)))

    assert watched(50, compute) == "model"


def test_silent_one_is_not(watched):
    with pytest.raises(SupervisorError, match="computed nothing for 20 minutes:\nepoch 2"):
        watched(50, lambda: None)


def test_networks_give_signs_but_not_with_each_layer(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("training.processes.signs.time", SimpleNamespace(monotonic=lambda: clock[0]))
    network, signs = torch.nn.Linear(2, 2), Signs(tmp_path)
    network.register_forward_hook(signs.give)
    assert last_sign(tmp_path) == 0
    network(torch.zeros(1, 2))
    first = last_sign(tmp_path)
    assert first > 0
    time.sleep(0.05)
    network(torch.zeros(1, 2))
    assert last_sign(tmp_path) == first
    clock[0] += 10.0
    network(torch.zeros(1, 2))
    assert last_sign(tmp_path) > first
