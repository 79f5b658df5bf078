"""Where a step takes long, a training said nothing for ten of them, and its time left only after twenty: half an hour
with a pretrained Whisper on a CPU.
"""

from types import SimpleNamespace

import pytest

from tasks.tracking.training_view import TrainingView, training_line
from training.node import worker
from training.node.worker import Worker


@pytest.fixture
def journal(clock):
    """The lines of a training with steps of a given duration."""
    now = clock(worker)

    def train(steps, step_s, log_steps=10):
        lines = []
        counters = SimpleNamespace(journal=lambda parts, **shared: lines.append(shared))
        ring = SimpleNamespace(view=SimpleNamespace(members=[0]), stats=lambda: None)
        rank = SimpleNamespace(counters=counters, ring=ring, cfg=SimpleNamespace(log_steps=log_steps), _line_at=now[0])
        for step in range(1, steps + 1):
            now[0] += step_s
            turn = {"progress": step / steps, "lr": 0.1, "elapsed": step * step_s}
            Worker._report(rank, step, turn, SimpleNamespace(norm=1.0, parts=[]), step_s)
        return lines

    return train


def test_slow_steps_have_a_line_each_half_minute(journal):
    assert [line["step"] for line in journal(12, 20.0)] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in journal(4, 45.0)] == [1, 2, 3, 4]


def test_fast_steps_have_a_line_for_every_log_steps_of_them(journal):
    assert [line["step"] for line in journal(30, 0.5)] == [10, 20, 30]


def test_time_left_is_known_after_two_lines(journal):
    view = TrainingView()
    view.feed({"kind": "start", "step": 0, "elapsed": 0.0})
    for line in journal(96, 20.0)[:2]:
        view.feed(
            line | {"kind": "step", "learner": "0.0", "epochs": 1, "loss": 2.0, "audio_seconds": line["step"] * 200}
        )
    assert view.eta_s == pytest.approx(92 * 20)
    assert training_line(view.figures()) == "epoch 0.04 of 1, loss 2.000, 10 × real time, 0:30:40 left"
