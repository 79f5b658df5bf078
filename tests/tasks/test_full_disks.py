"""Every stage on a full disk: one clear error, no partial output, and success after space is freed."""

import logging
import subprocess
import sys
import threading
import time

import pytest
from forks import Forkable
from support import ROOT, fill, small_disk, starling, tiny_document, write_config

from storage.audit import verify
from storage.objects import ObjectStore
from storage.retries import DiskError
from tasks import STAGES
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run, get_stage, stages_of
from tasks.tracking.runs import client
from training.launch.training_process import TrainingFailedError

REMEDY = r"Free some space there .*STARLING_HOME.*run the same command again: finished work is kept\."


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A data folder on a file system of 64 megabytes."""
    with small_disk(tmp_path / "disk", "64m") as folder:
        monkeypatch.setenv("STARLING_HOME", str(folder / "home"))
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        client().search_experiments()  # creates MLflow's database, which is not tested here
        yield folder


def attempt(run, name):
    """Execute a stage that may fail because the disk is full, and for no other reason."""
    try:
        get_stage(name).execute(run)
        return ""
    except (DiskError, TrainingFailedError) as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_stage_names_full_disk_and_finishes_once_space_is_free(disk, caplog):
    run = Run(parse_config(tiny_document()), "full")
    refused = dict.fromkeys(stages_of(run.config), 0)
    for name in refused:
        for room in (0, 20_000, 100_000):
            hog = fill(disk, leave=room)
            with caplog.at_level(logging.ERROR):
                said = attempt(run, name)
            hog.unlink()
            refused[name] += bool(said)
            assert not said or ("no space is left on" in said and str(disk) in said and " MB free)" in said), said
            assert "Traceback" not in said
            assert not said or not list((disk / "home" / "objects" / name).rglob("done.json"))
        get_stage(name).execute(run)
    assert min(refused.values()) >= 1, refused
    assert not [record for record in caplog.records if record.exc_info]
    store = ObjectStore(disk / "home" / "objects")
    assert verify(store).problems == []
    assert not list((disk / "home" / "objects").rglob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("nodes", "sign"),
    [(1, "journal.jsonl"), (1, "checkpoints/**/*.safetensors"), (2, "replicas/**/*.safetensors")],
)
def test_training_on_full_disk_names_the_reason_and_resumes(disk, nodes, sign):
    fields = tiny_document()["train"] | {"epochs": 4, "nodes": nodes, "checkpoint_steps": 3}
    fields["strategy"] = "single" if nodes == 1 else "adpsgd"
    run = Run(parse_config(tiny_document(train=fields)), "fills")
    for name in STAGES[:3]:
        get_stage(name).execute(run)
    over, hogs = threading.Event(), []

    def fill_at_the_sign():
        while not over.is_set() and not list((disk / "home").glob(f"**/{sign}")):
            time.sleep(0.02)
        hogs.append(fill(disk))

    filler = threading.Thread(target=fill_at_the_sign)
    filler.start()
    said = attempt(run, "train")
    over.set()
    filler.join()
    hogs[0].unlink()
    if said:  # otherwise it finished before the disk was full
        assert "no space is left on" in said
        assert "STARLING_HOME" in said
    result = get_stage("train").execute(run)
    assert result.counts["utterances"] == 4 * 24


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", [[], ["--no-prefect"]], ids=["prefect", "plain"])
def test_command_reports_full_disk_in_one_line(disk, tmp_path, words):
    config = write_config(tmp_path / "tiny.yaml", tiny_document())
    starling("run", config, "--until", "prepare", *words, home=disk / "home")
    hog = fill(disk, leave=3_000_000 if not words else 20_000)  # Prefect's own database needs some, too
    done = starling("run", config, "--until", "report", *words, home=disk / "home", check=False, timeout=500)
    if done.returncode:
        assert "no space is left on" in done.stderr
        assert "Traceback" not in done.stderr
    hog.unlink()
    done = starling("run", config, "--until", "shard", *words, home=disk / "home")
    assert "Traceback" not in done.stderr


def test_full_shared_memory_refuses_hogwild_instead_of_killing_it(tmp_path):
    with small_disk(tmp_path / "shm", "1m") as folder:
        code = (
            "import sys; from pathlib import Path; from training.processes.exit_reason import run_with_reason\n"
            "from training.node.learner_replica import SharedWeights\n"
            f"sys.exit(run_with_reason(lambda: SharedWeights(Path({str(folder / 'weights')!r}), 10**6, 0, 1) and 0, 3))"
        )
        done = subprocess.run(
            [sys.executable, "-c", Forkable(code)], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 3, done
    assert "no space is left on the disk of" in done.stderr
