"""Bars of stages that had ended stayed below the training's, and their clocks ran on."""

from io import StringIO

import pytest
from rich.console import Console
from rich.progress import Progress

from flows.cli import common
from tasks.stages import progress, report


@pytest.fixture
def bars(monkeypatch):
    """The bars on a terminal."""
    made = []

    def make(*columns, **options):
        made.append(Progress(*columns, **options))
        return made[0]

    monkeypatch.setattr(common, "err", Console(file=StringIO(), force_terminal=True))
    monkeypatch.setattr(common, "Progress", make)
    return made


def test_only_running_stages_have_bars(bars):
    def shown():
        return [(bar.description, bar.completed) for bar in bars[0].tasks]

    with common.progress_bars():
        progress.report("prepare", 5, 0, "checking")
        progress.report("shard", 1, 8)
        assert shown() == [("prepare", 5), ("shard", 1)]
        progress.end("prepare")
        assert shown() == [("shard", 1)]
        progress.end("features")  # had no bar
        progress.report("prepare", 2, 0, "checking")  # as in the next fold
        assert shown() == [("shard", 1), ("prepare", 2)]
    progress.end("shard")  # nobody listens


def test_a_report_missing_in_mlflow_is_told_in_a_line(monkeypatch):
    def fail():
        raise ConnectionError

    monkeypatch.setattr(report, "client", fail)
    monkeypatch.setattr(report, "shown_mlflow_uri", lambda: "http://models")
    lines = []
    with progress.following(lambda *line: lines.append(line)):
        report._attach(None, "<html>")
    assert lines == [("report", "not attached to MLflow at http://models: ConnectionError")]
