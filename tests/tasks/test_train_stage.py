import shutil
from typing import Annotated

import pytest
from pydantic import create_model
from support import copy_finished, processes_naming, small_corpus, tiny_document

from configurable.choices import OneOf
from recognition.bundle import load_bundle
from speech.tokens import tokenizer_from_dict
from tasks.config.pipeline import parse_config
from tasks.config.training import AcousticTrainConfig
from tasks.stages import progress
from tasks.stages import train as module
from tasks.stages.base import Run, StageError
from tasks.stages.bundles import fetch_bundle
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_job, model_digest
from training.coordinator.journal import read_journal
from training.launch.training_process import TrainingFailedError
from training.strategies.registry import STRATEGY_CONFIGS
from training.strategies.strategy import StrategyConfig
from training.strategies.synchronous import SingleConfig


def ready(force_from="", sets=None, **train):
    """A run whose stages before training are done (cached, in a copy of the finished run's folder)."""
    document = tiny_document()
    document["train"] |= train
    run = Run(parse_config(document), "r", force_from)
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


def test_finished_model_is_complete_without_intermediate_files(finished, tmp_path):
    result = finished.result("train")
    names = {name for name in result.store.list() if not name.startswith("uses/")}
    assert names == {"model/model.safetensors", "model/bundle.json", "journal.jsonl", "result.json", "done.json"}
    assert result.record["digest"] == model_digest(result.store)
    spec, model = load_bundle(fetch_bundle(result.store, tmp_path))
    assert model.num_parameters() == result.record["result"]["parameters"] > 1000
    assert spec.provenance["train"] == finished.result("shard").record["sets"]["train"]["digest"]
    assert spec.stats == finished.result("features").record["stats"]
    assert result.counts == {"epochs": 2, "steps": 6, "utterances": 48, "unalignable": 0}


def test_journal_has_every_step_and_epoch(finished):
    entries = read_journal(finished.result("train").store.local_path("journal.jsonl"))
    assert [e["step"] for e in entries if e["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [e["epoch"] for e in entries if e["kind"] == "valid"] == [1, 2]


def test_tokens_come_from_the_training_transcripts_only(finished):
    tokenizer = tokenizer_from_dict(make_job(finished, TRAIN.output(finished)).task.spec.tokenizer)
    assert tokenizer.symbols[0] == "<blank>"
    assert all(len(symbol) == 1 for symbol in tokenizer.symbols[1:])


@pytest.mark.parametrize(
    ("train", "same"),
    [
        ({"threads": 2}, True),
        ({"checkpoint_steps": 3}, True),
        ({"checkpoint_keep": 5}, True),
        ({"log_steps": 2}, True),
        ({"strategy": "single"}, True),
        ({"exchange": {"wire": "bf16"}}, True),  # there is none
        ({"objective": {"kind": "ctc"}, "average": 1}, True),  # the defaults
        ({"optimizer": {"lr": 0.1}}, False),
        ({"epochs": 3}, False),
        ({"augment": {"enabled": False}}, False),
        ({"max_minutes": 1}, False),
    ],
)
def test_address_depends_only_on_what_affects_the_model(finished, tmp_path, monkeypatch, train, same):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = ready(**train)
    assert all(run.result(name).cached for name in ("prepare", "shard", "features"))
    assert (TRAIN.output(run).key == finished.result("train").key) is same
    assert (TRAIN.output(run).record() is not None) is same


def test_new_field_with_default_keeps_the_training_address(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = ready()
    later = create_model("Later", __base__=AcousticTrainConfig, invented=(int, 7))
    for value, same in ((7, True), (8, False)):
        train = later.model_validate(run.config.train.model_dump() | {"invented": value})
        other = Run(run.config.model_copy(update={"train": train}), "r", results=dict(run.results))
        assert (TRAIN.output(other).key == finished.result("train").key) is same


def test_new_field_of_a_kind_keeps_the_training_address(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = ready(strategy="scpsgd")
    train, model, key = run.config.train, run.config.model, TRAIN.output(run).key
    strategy = create_model("Later", __base__=type(train.strategy), invented=(int, 7))
    chosen = Annotated[StrategyConfig, OneOf(STRATEGY_CONFIGS | {"scpsgd": strategy}, "single")]
    later = create_model("Later", __base__=AcousticTrainConfig, strategy=(chosen, SingleConfig()))
    encoder = create_model("Later", __base__=type(model), invented=(int, 7))
    for value, same in ((7, True), (8, False)):
        document = train.model_dump() | {"strategy": {"kind": "scpsgd", "invented": value}}
        other_model = encoder.model_validate(model.model_dump() | {"invented": value})
        for changes in ({"train": later.model_validate(document)}, {"model": other_model}):
            other = Run(run.config.model_copy(update=changes), "r", results=dict(run.results))
            assert (TRAIN.output(other).key == key) is same, (changes, value)


def test_missing_validation_set_is_refused_with_a_remedy(home, tmp_path):
    source = {"kind": "table", "path": str(small_corpus(tmp_path / "c")), "set": "train"}
    run = Run(parse_config({"name": "t", "data": {"sources": [source]}}), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    with pytest.raises(StageError, match="set: valid"):
        TRAIN.execute(run)


@pytest.mark.slow
def test_interrupted_stage_ends_its_process_and_rerun_gives_same_model(finished, tmp_path, monkeypatch):
    folder = copy_finished(tmp_path / "home")
    monkeypatch.setenv("STARLING_HOME", str(folder))
    shutil.rmtree(folder / "objects" / "train")
    run = ready(checkpoint_steps=1)

    def interrupt(stage, done, total, note):
        raise KeyboardInterrupt

    with progress.listening(interrupt), pytest.raises(KeyboardInterrupt):
        TRAIN.execute(run)
    assert processes_naming(str(folder)) == []
    assert TRAIN.output(run).record() is None
    result = TRAIN.execute(run)
    assert result.key == finished.result("train").key
    assert result.record["digest"] == finished.result("train").record["digest"]
    steps = [e["step"] for e in read_journal(result.store.local_path("journal.jsonl")) if e["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_failed_training_publishes_nothing(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = ready(epochs=1)

    def fail(job, folder, on_poll):
        assert job.run == TRAIN.output(run).key
        raise TrainingFailedError("status 1")

    monkeypatch.setattr(module, "run_training", fail)
    with pytest.raises(TrainingFailedError):
        TRAIN.execute(run)
    assert TRAIN.output(run).record() is None
