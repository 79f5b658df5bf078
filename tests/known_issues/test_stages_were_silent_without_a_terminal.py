"""Without a terminal, a long stage gave no sign of life until it ended: it could not be told from one that hung."""

import re
from io import StringIO

import pytest
from rich.console import Console

from flows.cli import common
from tasks.stages import progress


@pytest.fixture
def now(clock):
    """The time, which the test sets."""
    return clock(common)


def _lines(monkeypatch, now, terminal):
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=terminal, width=200))
    with common.progress_bars():
        for second in range(0, 100, 5):
            now[0] = float(second)
            progress.report("shard", second, 200, "train")
            if second == 20:
                progress.announce("shard", "a line of its own")
    return [line for line in file.getvalue().splitlines() if "shard: " in line]


def test_a_stage_gives_a_line_when_it_had_none_for_twice_as_long_as_before(monkeypatch, now):
    assert _lines(monkeypatch, now, False) == ["shard: a line of its own", "shard: 40 %, train"]


@pytest.mark.parametrize("terminal", [False, True])
def test_many_lines_of_a_running_stage_become_few(monkeypatch, now, terminal):
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=terminal, width=200))
    with common.progress_bars():
        for epoch in range(1000):  # one in five seconds
            now[0] = 5.0 * epoch
            progress.report("train", epoch, 1000, "")
            progress.announce("train", f"epoch {epoch}")
        progress.end("train")
        progress.announce("train", "1,000 epochs (5000.0 s)")
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", file.getvalue())
    told = [line.split("train: ")[1].strip() for line in plain.splitlines() if "train: " in line]
    later = ["epoch 12", "epoch 36", "epoch 84"] if terminal else ["1 %", "4 %", "8 %"]  # which the bar shows
    assert told[:4] == ["epoch 0", *later]
    assert len(told) < 15
    assert told[-1].startswith("1,000 epochs")


def test_every_line_of_a_run_is_in_its_log(home):
    with common.run_log("tiny") as path:
        for epoch in range(3):
            progress.report("train", epoch, 3, "")
            progress.announce("train", f"epoch {epoch}")
    assert path.parent == home / "logs"
    assert [line[9:] for line in path.read_text().splitlines()] == [f"train: epoch {epoch}" for epoch in range(3)]


def test_a_stage_that_runs_again_is_silent_for_half_a_minute_again(monkeypatch, now):
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=False, width=200))
    with common.progress_bars():
        for begin in (0.0, 100.0):  # as in the next fold
            for now[0] in (begin, begin + 29):
                progress.report("shard", 1, 8)
            progress.end("shard")
    assert "shard: " not in file.getvalue()


def test_bars_on_a_terminal_are_enough(monkeypatch, now):
    assert not [line for line in _lines(monkeypatch, now, True) if "%" in line]
