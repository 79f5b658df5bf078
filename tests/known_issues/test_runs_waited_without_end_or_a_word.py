"""A run on a Dask cluster whose workers were gone waited for ever; runs that waited for a training slot were silent.

A run without Prefect was told only after `prepare` that it cannot use a cluster.
"""

from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from support import tiny_document

from storage.locks import file_lock
from storage.stages import DONE
from tasks.config.pipeline import RunnerConfig, parse_config
from tasks.dataset.policies import SlotsConfig
from tasks.dataset.sources import SourceConfig
from tasks.locking import slots
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import SlotTakenError, WaitNotice, machine_lock
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages import progress, runner, sources
from tasks.stages.base import Run, StageError, get_stage, said_as
from tasks.tracking.registry import registry_lock


class Cluster:
    """A submitter of pieces whose results may never come, with some workers."""

    def __init__(self, workers, results=()):
        self.results, self.counted = list(results), workers

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def submit(self, name, piece, label):
        def answer(seconds):
            if not self.results:
                raise runner._NotYetError
            return (self.results.pop(0),)

        return answer

    def workers(self):
        if isinstance(self.counted, Exception):
            raise self.counted
        return self.counted


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a minute whenever it is read."""
    now = [0.0]

    def read():
        now[0] += 60.0
        return now[0]

    monkeypatch.setattr(runner.time, "monotonic", read)


@contextmanager
def lines_said():
    lines = []
    with progress.following(lambda stage, text: lines.append((stage, text))):
        yield lines


def mapped(monkeypatch, cluster, **options):
    monkeypatch.setattr(runner, "_submitter", lambda *_: cluster)
    config = RunnerConfig(kind="dask", address="tcp://head:8786", **options)
    return list(runner.map_pieces(config, "tasks.x:y", [{}, {}], "shard train"))


@pytest.mark.parametrize("workers", [0, OSError("the scheduler is gone")])
def test_cluster_without_workers_ends_the_run(monkeypatch, clock, workers):
    with lines_said() as lines, pytest.raises(StageError, match=r"tcp://head:8786 has had no worker for 5 minutes"):
        mapped(monkeypatch, Cluster(workers))
    assert lines[0] == ("shard", "waiting for the dask cluster tcp://head:8786, 0 workers, for 1 min so far")
    assert len(lines) < 6


def test_piece_that_takes_too_long_ends_the_run(monkeypatch, clock):
    with lines_said() as lines, pytest.raises(StageError, match=r"longer than 0\.5 hours on .*runner\.wait_hours"):
        mapped(monkeypatch, Cluster(2), wait_hours=0.5)
    assert 25 < len(lines) < 35


def test_results_of_a_cluster_are_passed_on(monkeypatch):
    assert mapped(monkeypatch, Cluster(2, ["a", "b"])) == ["a", "b"]


def test_time_out_of_a_piece_is_not_taken_for_waiting(monkeypatch):
    failed = Future()
    failed.set_exception(TimeoutError("the piece's own"))
    plain = runner._Plain(RunnerConfig(workers=1))
    monkeypatch.setattr(plain._pool, "submit", lambda *_: failed)
    with plain, pytest.raises(TimeoutError, match="the piece's own"):
        plain.submit("tasks.x:y", {}, "shard")(0.0)


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_cluster_without_prefect_is_refused_before_any_stage(home, monkeypatch, kind):
    run = Run(parse_config(tiny_document(runner={"kind": kind})), "r")
    monkeypatch.setattr(type(get_stage("prepare")), "execute", lambda *_: pytest.fail("a stage has run"))
    with pytest.raises(StageError, match=f"runner.kind {kind} needs a flow run: leave out --no-prefect"):
        run_plainly(run)


def test_missing_package_of_a_cluster_is_reported_before_any_stage(monkeypatch):
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    with pytest.raises(StageError, match=r"needs the package prefect-dask: pip install '\.\[dask\]'"):
        runner.check_runner(RunnerConfig(kind="dask"), within_flow=True)


def test_waiting_run_says_for_whom_at_once_and_every_minute(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(slots.time, "monotonic", lambda: now[0])
    notice = WaitNotice("training in the pool gpus", said.append)
    for seconds, owner in [(0, "run a"), (10, "run a"), (20, "run b"), (79, "run b"), (81, "run b"), (139, "run b")]:
        now[0] = float(seconds)
        notice.wait(owner)
    assert said == [
        "training in the pool gpus: waiting for run a",
        "training in the pool gpus: waiting for run b",
        "training in the pool gpus: waiting for run b (for 1 min so far)",
    ]


def test_wait_for_a_lock_is_said_without_prefect(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "REFUSE_S", 0.3)
    said, path = [], tmp_path / "lock"
    refuse = SlotsConfig(collision="refuse")
    mine = machine_lock([path], "training in the pool gpus", refuse, LockOwner.here("mine"), said.append)
    with file_lock(path, 0, holder="run nightly"), pytest.raises(SlotTakenError, match="run nightly"):
        mine.__enter__()
    assert said == ["training in the pool gpus: waiting for run nightly"]


def held(path, holder):
    """The lock of another run, which is given back as soon as somebody is said to wait for it."""
    lock = file_lock(path, 0, holder=holder)
    lock.__enter__()
    said = []

    def follow(stage, text):
        said.append((stage, text))
        lock.__exit__(None, None, None)

    return progress.following(follow), said


def test_wait_for_a_models_champion_is_said_in_the_terminal(home):
    follower, said = held(home / "locks" / "registry-digits.lock", "run nightly")
    with follower, registry_lock("digits"):
        pass
    assert said == [("register", "the champion of digits: waiting for run nightly")]


def test_wait_for_synthetic_speech_is_said_in_the_terminal(home, monkeypatch):
    source = SourceConfig(kind="synthetic")
    monkeypatch.setattr(sources, "synthesize_corpus", lambda *_: None)
    monkeypatch.setattr(sources, "open_corpus", lambda *_, **options: options["corpus"])
    follower, said = held(sources.synthetic_table(source).parent.with_suffix(".lock"), "process 7")
    with follower:
        assert sources.open_source(source) == "synthetic"
    assert said == [("prepare", "the synthetic speech: waiting for process 7")]


def test_wait_is_in_the_runs_log_where_no_line_is_followed(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        said_as("register")("waiting for run nightly")
    assert [record.message for record in caplog.records] == ["waiting for run nightly"]


def test_object_that_an_output_lacks_is_named_without_prefect(home, tmp_path):
    run = Run(parse_config(tiny_document(storage={"url": str(tmp_path / "objects")})), "r")
    get_stage("prepare").execute(run)
    output = run.result("prepare").output
    lost = next(name for name in output.store.list() if name.endswith(".parquet"))
    output.store.delete(lost)
    with lines_said() as lines:
        get_stage("prepare").execute(Run(run.config, "again"))
    text = f"{output.store.join(lost)} missing or truncated: runs again and keeps the intact objects"
    assert ("prepare", text) in lines
    assert output.store.exists(DONE)
