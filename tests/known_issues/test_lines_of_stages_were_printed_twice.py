"""Consoles of workers, and JSON logs, had each line of a stage two or three times.

They had those of the task, of the enclosing run, and of the command. Without a terminal, progress ended in two rates:
"WER 100.0 % 12 %".
"""

import io
import logging
from contextlib import contextmanager

import pytest
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from flows.cli import common
from tasks.orchestration.logs import JsonConsole
from tasks.orchestration.stage_tasks import lines_logged
from tasks.stages import progress


@pytest.mark.parametrize("kind", [PrefectConsoleHandler, JsonConsole])
def test_a_worker_prints_each_line_once_and_the_server_gets_both(kind):
    printed, sent = io.StringIO(), []
    console, api = kind(printed), logging.Handler()
    api.emit = lambda record: sent.append((record.name, record.getMessage()))
    loggers = [logging.getLogger(f"tests.once.{part}") for part in ("flow", "task")]
    parent = logging.getLogger("tests.once")
    parent.propagate = False
    parent.setLevel(logging.INFO)
    for handler in (console, api):
        parent.addHandler(handler)
    try:
        with lines_logged(loggers[0]), lines_logged(loggers[1], "train"):
            progress.announce("train", "2 epochs")
    finally:
        for handler in (console, api):
            parent.removeHandler(handler)
    assert sent == [("tests.once.flow", "train: 2 epochs"), ("tests.once.task", "train: 2 epochs")]
    assert printed.getvalue().count("train: 2 epochs") == 1


@pytest.mark.parametrize(("asked", "printed"), [("json", 0), ("", 1)])
def test_a_command_leaves_lines_to_json_logs_of_prefect(monkeypatch, asked, printed):
    @contextmanager
    def orchestration(say):
        yield "http://127.0.0.1:4200"

    monkeypatch.setenv("STARLING_LOG", asked)
    monkeypatch.setattr("flows.servers.prefect_api.orchestration", orchestration)
    monkeypatch.setattr(common, "err", Console(file=(file := io.StringIO()), width=200))
    with common.on_prefect(print):
        progress.announce("train", "2 epochs")
    assert file.getvalue().count("train: 2 epochs") == printed
    assert "Prefect at" in file.getvalue()


def test_how_far_a_stage_is_comes_before_its_figures(monkeypatch):
    monkeypatch.setattr(common, "err", Console(file=(file := io.StringIO()), width=200))
    monkeypatch.setattr(common, "_QUIET_S", 0.0)
    with common.progress_bars():
        progress.report("train", 1, 8, "epoch 1 of 8, WER 100.0 %")
    assert file.getvalue().split("\n")[0] == "train: 12 %, epoch 1 of 8, WER 100.0 %"
