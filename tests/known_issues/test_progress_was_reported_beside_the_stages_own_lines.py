"""Progress was told where it only confused.

`shard: 100 %, train` was printed while further sets were to come, just before the stage's last line, or at once in a
stage that ran again; and the champion's decoding by the stage register was reported as the stage decode, which had
ended.
"""

from io import StringIO

import pytest
from rich.console import Console
from support import copy_finished

from flows.cli import common
from tasks.stages import progress
from tasks.tracking import significance


@pytest.fixture
def now(clock):
    """The time, which the test sets."""
    return clock(common)


@pytest.fixture
def screen(monkeypatch, now):
    """What a run without a terminal prints."""
    file = StringIO()
    monkeypatch.setattr(common, "err", Console(file=file, force_terminal=False, width=200))
    with common.progress_bars():
        yield lambda: [line for line in file.getvalue().splitlines() if line]


def reported(monkeypatch):
    reports = []
    monkeypatch.setattr(progress, "_sinks", [lambda *report: reports.append(report)])
    return reports


def test_shares_of_sets_are_shares_of_the_whole(monkeypatch):
    reports = reported(monkeypatch)
    parts = progress.Parts("shard", {"test": 20, "train": 70, "valid": 10})
    for name, done, total in (("test", 1, 2), ("test", 2, 2), ("train", 3, 7), ("valid", 0, 0), ("valid", 1, 1)):
        parts.report(name, done, total)
    assert [(stage, whole, name) for stage, _, whole, name in reports] == [
        ("shard", 100, name) for name in ("test", "test", "train", "valid", "valid")
    ]
    assert [done for _, done, _, _ in reports] == pytest.approx([10, 20, 50, 90, 100])


def test_no_line_says_100_percent_before_the_last_one(screen, now):
    progress.report("shard", 0, 100, "train")
    for now[0], done in ((40.0, 50), (200.0, 100)):
        progress.report("shard", done, 100, "train")
    progress.end("shard")
    progress.announce("shard", "2,000 written (200.0 s)")
    assert screen() == ["shard: 50 %, train", "shard: 2,000 written (200.0 s)"]


def test_the_last_line_of_a_stage_does_not_count_for_its_next_execution(screen, now):
    progress.announce("shard", "2,000 written (3.0 s)")
    now[0] = 100.0
    progress.report("shard", 1, 4, "train")
    assert screen() == ["shard: 2,000 written (3.0 s)"]
    now[0] = 131.0
    progress.report("shard", 2, 4, "train")
    assert screen()[1:] == ["shard: 50 %, train"]


def test_decoding_by_the_champion_is_progress_of_the_stage_register(finished, tmp_path, monkeypatch):
    from recognition.bundle import load_spec
    from tasks.stages.bundles import own_bundle

    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))
    bundle = own_bundle(finished, tmp_path)
    assert load_spec(bundle).tokenizer
    reports = reported(monkeypatch)
    assert len(significance._rows(finished, bundle, "test")) == 12
    assert {(stage, note) for stage, _, _, note in reports} == {("register", "the champion on test")}
