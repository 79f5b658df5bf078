"""Work on shards in threads, in processes, and on clusters of two workers: the same results everywhere."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError
from support import ROOT, environment, tiny_document, write_config

from storage.index import ShardIndex
from tasks.config.pipeline import RunnerConfig, parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, StageError
from tasks.stages.decode import DECODE
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.runner import Workers, find_work, map_pieces, share_out
from tasks.stages.shard import SHARD

PIECES = [{"name": str(number), "store": "memory://none", "shards": [], "sample_rate": 8000} for number in range(7)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_results_are_in_order_of_pieces(kind):
    runner = RunnerConfig(kind=kind, workers=2)
    assert list(map_pieces(runner, "tasks.stages.shard:shard_piece", iter(PIECES), "probe")) == [0] * 7


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_failing_piece_fails_the_map(kind):
    pieces = [*PIECES, {"name": "bad"}, *PIECES]
    with pytest.raises(KeyError, match="store"):
        list(map_pieces(RunnerConfig(kind=kind, workers=2), "tasks.stages.shard:shard_piece", pieces, "probe"))


def test_pieces_are_taken_lazily():
    taken = []

    def source():
        for piece in PIECES * 10:
            taken.append(piece)
            yield piece

    results = map_pieces(RunnerConfig(workers=2), "tasks.stages.shard:shard_piece", source(), "probe")
    next(results)
    assert len(taken) <= 5
    results.close()


def test_functions_outside_the_package_are_refused():
    with pytest.raises(ValueError, match="not a function of this package"):
        find_work("os:system")


@pytest.mark.parametrize("count", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("workers", [1, 2, 16])
def test_every_shard_is_in_one_piece(count, workers):
    pieces = list(share_out(count, RunnerConfig(workers=workers)))
    assert [number for piece in pieces for number in piece] == list(range(count))
    assert len(pieces) >= min(count, workers)
    assert max(map(len, pieces)) <= 8


def test_address_is_refused_without_a_cluster():
    with pytest.raises(ValidationError, match="address"):
        RunnerConfig(address="tcp://127.0.0.1:1")


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_clusters_need_a_flow_run(kind):
    with pytest.raises(StageError, match=f"runner.kind {kind} needs a flow run"):
        list(map_pieces(RunnerConfig(kind=kind), "tasks.stages.shard:shard_piece", PIECES, "probe"))


def test_memory_store_is_refused_for_other_processes(home):
    run = Run(parse_config(tiny_document(storage={"url": "memory://here"}, runner={"kind": "processes"})), "r")
    with pytest.raises(StageError, match="memory://here"):
        _ = run.runner


def test_storage_workers_are_the_runners_default(home):
    assert Run(parse_config(tiny_document(storage={"workers": 3})), "r").runner.count == 3
    assert Run(parse_config(tiny_document(storage={"workers": 3}, runner={"workers": 5})), "r").runner.count == 5


def outputs(run):
    """The outputs of the stages over shards: digests of all sets, statistics, hypotheses."""
    digests = {name: entry["digest"] for name, entry in run.result("shard").record["sets"].items()}
    digests |= {f"{name} features": entry["digest"] for name, entry in run.result("features").record["sets"].items()}
    # scores depend on what an utterance is padded with, in the last digits
    rows = read_table(run.result("decode").store, "test.parquet")
    heard = [(row["id"], row["ref"], row["hyp"], round(row["score"], 3)) for row in rows]
    return digests | {"stats": run.result("features").record["stats"], "heard": sorted(heard)}


@pytest.mark.slow
def test_processes_give_the_same_outputs_as_threads(finished, tmp_path):
    """The data goes into two empty stores; the model is the finished run's."""
    made = []
    for kind in ("threads", "processes"):
        storage = {"url": str(tmp_path / kind), "shard_seconds": 3, "workers": 2}
        config = parse_config(tiny_document(storage=storage, runner={"kind": kind, "workers": 2}))
        run = Run(config, kind, results={"train": finished.result("train")})
        for stage in (PREPARE, SHARD, FEATURES, DECODE):
            stage.execute(run)
        assert len(ShardIndex.read(run.result("shard").store.child("test")).shards) > 3
        made.append(outputs(run))
    assert made[0] == made[1]


FLOW = """
import json, sys
from prefect import flow
from tasks.config.pipeline import load_config
from tasks.orchestration.stage_tasks import TASKS, open_run
from tasks.dataset.tables import read_table
from tasks.stages.base import StageResult

@flow
def data(path, url, digest, overrides):
    run = open_run(load_config(path, overrides), "r")
    run.results["train"] = StageResult("train", "k", url, 0.0, True, {}, {"digest": digest})
    for name in ("prepare", "shard", "features", "decode"):
        TASKS[name]("r")
    rows = read_table(run.result("decode").store, "test.parquet")
    heard = sorted((row["id"], row["ref"], row["hyp"]) for row in rows)
    print("RECORD", json.dumps([run.result("shard").record["sets"], run.result("features").record["stats"], heard]))

if __name__ == "__main__":
    from pathlib import Path
    data(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
"""


@pytest.mark.slow
@pytest.mark.timeout(2700)  # two runs, each with its own Prefect server, and a cluster for each stage
@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_cluster_gives_the_same_outputs_as_threads(finished, tmp_path, kind):
    pytest.importorskip(f"prefect_{kind}")
    config = write_config(tmp_path / "tiny.yaml", tiny_document(storage={"shard_seconds": 6}))
    (tmp_path / "flow.py").write_text(FLOW)
    trained = finished.result("train")
    records = []
    for runner in ("threads", kind):
        wanted = [f"runner.kind={runner}", "runner.workers=2", f"storage.url={tmp_path / runner}"]
        values = {
            "STARLING_HOME": finished.store.local_path("x").parent.parent,
            "PREFECT_HOME": tmp_path / "prefect",
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",  # the command line, once imported, wants less
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
        }
        with environment(**values):
            done = subprocess.run(
                [sys.executable, tmp_path / "flow.py", config, trained.url, trained.record["digest"], *wanted],
                env=os.environ,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
            )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        records.append(next(line for line in done.stdout.splitlines() if line.startswith("RECORD")))
        assert "shard train" in done.stdout + done.stderr  # its pieces are task runs
        assert (runner == "threads") != ("decode test" in done.stdout + done.stderr)
    assert records[0] == records[1]


def test_workers_are_reused_between_calls_and_end_with_the_block():
    with Workers(RunnerConfig(workers=2)) as workers:
        first = list(workers.map("tasks.stages.shard:shard_piece", PIECES, "probe"))
        opened = workers._open
        assert list(workers.map("tasks.stages.shard:shard_piece", PIECES, "probe")) == first
        assert workers._open is opened
    assert workers._open is None
