"""Stages in a process of their own: the same output and errors as in this one, and ended in time."""

import errno
import shutil
import signal
import sys

import psutil
import pytest
from support import small_corpus, tiny_document

from storage.retries import DiskError
from tasks.config.pipeline import parse_config
from tasks.failures import passes
from tasks.orchestration.stage_tasks import run_plainly
from tasks.search.driver import TrialTimeoutError
from tasks.stages import separate
from tasks.stages.base import Run, StageError
from tasks.stages.paused import TrialPart
from tasks.stages.prepare import PREPARE
from training.processes.children import Child
from training.processes.exit_reason import VARIABLE, read_reason


@pytest.fixture
def config(home, tmp_path):
    corpus = small_corpus(tmp_path / "corpus", speakers=6, each=2)
    data = {"sources": [{"kind": "table", "path": str(corpus)}], "sample_rate": 8000, "valid_share": 0.3}
    return parse_config(tiny_document(data=data))


def limited(config, watch=lambda: None):
    return Run(config, "r-1", trial=TrialPart(watch=watch, limited=True))


def test_stages_in_a_process_of_their_own_make_the_same_outputs(config):
    watched = []
    run = limited(config, lambda: watched.append(len(psutil.Process().children())))
    run_plainly(run, "shard")
    assert max(watched) > 0  # while a child worked
    plain = Run(config, "r-2")
    run_plainly(plain, "shard")
    assert [result.cached for result in run.results.values()] == [False, False]
    assert [result.cached for result in plain.results.values()] == [True, True]
    assert [r.record for r in run.results.values()] == [r.record for r in plain.results.values()]


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def test_a_stage_that_hangs_is_ended_with_its_process_and_made_by_the_next_run(config, monkeypatch):
    monkeypatch.setattr(separate, "_END_S", 0.2)
    children = []

    def hang(_, *more, **fields):
        children.append(Child([sys.executable, "-c", DEAF], *more, **fields))
        return children[-1]

    def watch():
        if "deaf" in children[0].tail():
            raise TrialTimeoutError("it took too long")

    with monkeypatch.context() as patch:
        patch.setattr(separate, "Child", hang)
        with pytest.raises(TrialTimeoutError, match="too long"):
            PREPARE.execute(limited(config, watch))
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert not PREPARE.execute(Run(config, "r-2")).cached


def test_an_error_of_a_stage_is_that_of_the_run(config, tmp_path):
    shutil.rmtree(tmp_path / "corpus" / "audio")
    texts = []
    for run in (Run(config, "r-1"), limited(config)):
        with pytest.raises(StageError, match="12 of 12 utterances are quarantined") as failed:
            PREPARE.execute(run)
        texts.append(str(failed.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (DiskError("the disk is full"), DiskError),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), ConnectionError),
        (ValueError("no such word"), None),
        (KeyError(), None),
    ],
)
def test_the_kind_of_an_error_survives(tmp_path, monkeypatch, error, raised):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "reason"))

    def fail(job):
        raise error

    monkeypatch.setattr(separate, "_work", fail)
    status = separate.main(tmp_path / "job.json")
    assert status != 0
    assert separate._ERRORS.get(status) is raised
    assert read_reason(tmp_path / "reason") == (str(error) or "KeyError")
    assert raised is not ConnectionError or passes(ConnectionError(str(error)))  # so that a task is tried again
