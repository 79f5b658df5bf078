"""A training that is continued with more epochs is the same as one that was never interrupted."""

import shutil

import pytest
from support import copy_finished, tiny_document

from storage.audit import usage
from tasks.config.pipeline import parse_config
from tasks.stages import train as module
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.paused import TrialPart, paused_output
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN
from training.coordinator.journal import read_journal

EPOCHS = 2


def ready(epochs, trial, **train):
    """A run whose stages before training are done."""
    document = tiny_document()
    document["train"] |= {"epochs": epochs, **train}
    run = Run(parse_config(document), f"trial-{epochs}", trial=trial)
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


def steps(result):
    return [e["step"] for e in read_journal(result.store.local_path("journal.jsonl")) if e["kind"] == "step"]


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    folder = copy_finished(tmp_path / "home")
    monkeypatch.setenv("STARLING_HOME", str(folder))
    shutil.rmtree(folder / "objects" / "train")
    return folder


def made(run):
    """Steps that the last session of a training has made."""
    entries = read_journal(run.result("train").store.local_path("journal.jsonl"))
    last = max((n for n, entry in enumerate(entries) if entry["kind"] == "resume"), default=-1)
    return [entry["step"] for entry in entries[last + 1 :] if entry["kind"] == "step"]


def test_a_continued_training_gives_the_model_and_curves_of_one_that_was_not_interrupted(finished, home):
    short = ready(1, TrialPart(keep=True))
    first = TRAIN.execute(short)
    assert steps(first) == [1, 2, 3]
    paused = paused_output(short.store, first.key)
    assert paused.record()["counts"] == {"epochs": 1, "utterances": first.counts["utterances"]}
    assert {output.name for output in usage(short.store)} > {f"paused/{first.key}", f"train/{first.key}"}
    assert not any(name.startswith(("checkpoints", "snapshots")) for name in first.store.list())

    longer = ready(EPOCHS, TrialPart(before={"epochs": 1}, keep=False))
    said = []
    with module.progress.following(lambda stage, text: said.append(text)):
        result = TRAIN.execute(longer)
    whole = finished.result("train")
    assert "continues after 1 epoch" in said
    assert result.key == whole.key
    assert result.record["digest"] == whole.record["digest"]
    assert result.record["result"]["valid"] == whole.record["result"]["valid"]
    assert result.counts == whole.counts
    assert steps(result) == [1, 2, 3, 4, 5, 6]
    assert made(longer) == [4, 5, 6]
    entries = read_journal(result.store.local_path("journal.jsonl"))
    assert [entry["epoch"] for entry in entries if entry["kind"] == "valid"] == [1, 2]
    assert [entry["kind"] for entry in entries].count("end") == 1
    # both parts have one MLflow run
    assert result.record["tracking"] == first.record["tracking"]
    assert paused_output(longer.store, result.key).record() is None


@pytest.mark.slow
def test_a_training_that_paused_within_an_epoch_is_continued_without_what_that_epoch_had_given(finished, home):
    limit = finished.result("train").counts["utterances"] // EPOCHS + 1  # ends with the second epoch's first batch
    short = ready(EPOCHS, TrialPart(keep=True), max_utterances=limit)
    first = TRAIN.execute(short)
    assert steps(first) == [1, 2, 3, 4]
    assert [entry["epoch"] for entry in first.record["result"]["history"]] == [1, 2]
    paused = paused_output(short.store, first.key)
    assert {name for name in paused.store.list() if name.startswith(("replicas", "snapshots"))} == {
        *("replicas/epoch-0001.json", "snapshots/epoch-0001.safetensors")
    }
    longer = ready(EPOCHS, TrialPart(before={"max_utterances": limit}))
    said = []
    with module.progress.following(lambda stage, text: said.append(text)):
        result = TRAIN.execute(longer)
    assert f"continues after {limit} utterances" in said
    assert result.record["digest"] == finished.result("train").record["digest"]
    assert made(longer) == [5, 6]
    entries = read_journal(result.store.local_path("journal.jsonl"))
    assert [entry["step"] for entry in entries if entry["kind"] == "valid"] == [3, 6]


@pytest.mark.slow
def test_a_training_whose_paused_part_is_damaged_or_gone_starts_anew(finished, home):
    short = ready(1, TrialPart(keep=True))
    paused = paused_output(short.store, TRAIN.execute(short).key)
    [name] = [name for name in paused.store.list() if name.endswith("/model.safetensors")]
    paused.store.write(name, b"0" * len(paused.store.read(name)))
    result = TRAIN.execute(ready(EPOCHS, TrialPart(before={"epochs": 1})))
    assert result.record["digest"] == finished.result("train").record["digest"]
    assert steps(result) == [1, 2, 3, 4, 5, 6]


def test_a_training_whose_schedule_depends_on_its_length_is_not_continued(home, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "continue_paused", lambda *args: calls.append(args))
    cosine = {"kind": "cosine", "warmup_epochs": 0.5}
    for schedule, continued in ((cosine, 0), (cosine | {"epochs": 4}, 1), ({"warmup_epochs": 0.5}, 2)):
        run = ready(EPOCHS, TrialPart(before={"epochs": 1}), schedule=schedule)
        module._continue_trial(run, TRAIN.output(run), module.make_job(run, TRAIN.output(run)))
        assert len(calls) == continued


def test_the_watch_of_a_trial_ends_its_training_and_the_next_one_resumes(finished, home):
    def end():
        raise TimeoutError("too long")

    with pytest.raises(TimeoutError, match="too long"):
        TRAIN.execute(ready(EPOCHS, TrialPart(watch=end)))
    result = TRAIN.execute(ready(EPOCHS, TrialPart()))
    assert result.record["digest"] == finished.result("train").record["digest"]
