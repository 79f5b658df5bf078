"""The bar and its clock left the note of a training 20 of 80 columns, and the time left was cut."""

from io import StringIO

import pytest
from rich.console import Console

from flows.cli import common
from tasks.stages import progress
from tasks.tracking.training_view import training_line

FIGURES = {"epoch": 112.25, "epochs": 300.0, "loss": 10.845, "valid": None, "audio_per_s": 1490.0, "eta_s": 45296.0}


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_epoch_loss_speed_and_time_left_are_whole(monkeypatch, width):
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(common, "err", console)
    note = training_line(FIGURES | {"ended": False})
    with common.progress_bars():
        progress.report("prepare", 5, 0, "checking")
        progress.end("prepare")
        progress.report("train", 112.25, 300.0, note)
    lines = [line for line in console.file.getvalue().splitlines() if "train" in line]
    assert any(note in line for line in lines), lines
    assert note.endswith("epoch 112.25 of 300, loss 10.845, 1490 × real time, 12:34:56 left")
    assert "━━" in lines[-1]
