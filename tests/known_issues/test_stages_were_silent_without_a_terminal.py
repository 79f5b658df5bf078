"""Without a terminal, a long stage gave no sign of life until it ended: it could not be told from one that hung."""

from io import StringIO

import pytest
from rich.console import Console

from flows.cli import common
from tasks.stages import progress


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test sets."""
    now = [0.0]

    class Time:
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(common, "time", Time)
    return now


def _lines(monkeypatch, clock, terminal):
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=terminal, width=200))
    with common.progress_bars():
        for second in range(0, 100, 5):
            clock[0] = float(second)
            progress.report("shard", second, 200, "train")
            if second == 20:
                progress.announce("shard", "a line of its own")
    return [line for line in file.getvalue().splitlines() if "shard: " in line]


def test_a_stage_gives_a_line_after_half_a_minute_without_one(monkeypatch, clock):
    assert _lines(monkeypatch, clock, False) == ["shard: a line of its own", "shard: train 25 %", "shard: train 40 %"]


def test_a_stage_that_runs_again_is_silent_for_half_a_minute_again(monkeypatch, clock):
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=False, width=200))
    with common.progress_bars():
        for begin in (0.0, 100.0):  # as in the next fold
            for clock[0] in (begin, begin + 29):
                progress.report("shard", 1, 8)
            progress.end("shard")
    assert "shard: " not in file.getvalue()


def test_bars_on_a_terminal_are_enough(monkeypatch, clock):
    assert not [line for line in _lines(monkeypatch, clock, True) if "%" in line]
