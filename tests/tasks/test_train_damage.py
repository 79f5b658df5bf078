"""The train stage's record of damaged shards, and how its key depends on the files of augmentation."""

import os
import shutil

import pytest
from support import copy_finished, small_corpus, tiny_document, write_tone

from storage.index import ShardIndex
from tasks.config.pipeline import parse_config
from tasks.config.training import AcousticTrainConfig
from tasks.stages.base import Run
from tasks.stages.decoder_files import augment_digest
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_job
from training.launch.training_process import TrainingFailedError


def ready(limit, **train):
    """A run whose training set has several shards, before training."""
    document = tiny_document(storage={"shard_seconds": 5, "workers": 2})
    document["train"] |= {"epochs": 1, "max_unreadable": limit} | train
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


@pytest.mark.slow
def test_damaged_shard_is_recorded_counted_and_reported(finished, fragment, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = ready(0.0)
    store = run.result("shard").store.child("train")
    index = ShardIndex.read(store)
    record = index.shards[0]
    assert len(index.shards) > 2
    content = store.read(record.name)
    store.write(record.name, content[:-2000])
    with pytest.raises(TrainingFailedError, match=f"more than the share of 0 (?s:.*){record.name}"):
        TRAIN.execute(run)
    assert TRAIN.output(run).record() is None
    key = TRAIN.output(run).key
    run = ready(0.9)
    assert store.read(record.name) == content, "a truncated shard is written again when its stage runs"
    store.write(record.name, content[:-2000])
    result = TRAIN.execute(run)
    assert result.key == key, "how much may be lost is no part of what is made"
    assert result.counts["unreadable"] == result.counts["quarantined"] == record.count
    assert result.counts["utterances"] + record.count == len(index)
    (entry,) = result.record["quarantined_shards"]
    assert (entry["set"], entry["shard"]) == ("train", f"train/{record.name}")
    assert "bytes instead of" in entry["reason"]
    assert any(name.startswith("damaged-shards/train/") for name in result.store.list())
    assert f"train/{record.name}" in fragment("damage", stages=run.results)
    store.write(record.name, content)
    assert TRAIN.execute(run).cached, "a training is not done again because a shard was mended"


def test_job_has_the_cache_limit(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    document = tiny_document()
    document["storage"] |= {"cache_gb": 0.5}
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    assert make_job(run, TRAIN.output(run)).cache_bytes == 500_000_000


def noisy(*files):
    return AcousticTrainConfig.model_validate({"augment": {"noise": {"files": list(map(str, files))}}}).augment


@pytest.fixture
def noises(tmp_path):
    for name in "ab":
        write_tone(tmp_path / "noises" / f"{name}.wav", seed=ord(name))
    return tmp_path / "noises"


def test_noise_digest_depends_on_the_folders_content(noises):
    digests = [augment_digest(noisy(noises))]
    write_tone(noises / "deep" / "c.flac")
    digests.append(augment_digest(noisy(noises)))
    os.utime(noises / "a.wav", (1, 1))
    digests.append(augment_digest(noisy(noises)))
    (noises / "b.wav").rename(noises / "z.wav")
    digests.append(augment_digest(noisy(noises)))
    (noises / "z.wav").unlink()
    digests.append(augment_digest(noisy(noises)))
    assert len(set(digests)) == len(digests)
    (noises / "notes.md").write_text("no audio")
    assert augment_digest(noisy(noises)) == digests[-1]
    shutil.copytree(noises, noises.parent / "moved", copy_function=shutil.copy2)
    assert augment_digest(noisy(noises.parent / "moved")) == digests[-1]


def test_noise_digest_includes_recordings_of_a_table(noises):
    table = noises.parent / "noises.txt"
    table.write_text("noises/a.wav\nnoises/b.wav\n")
    digests = [augment_digest(noisy(table))]
    write_tone(noises / "b.wav", seconds=1.0)
    digests.append(augment_digest(noisy(table)))
    table.write_text("noises/a.wav\n")
    digests.append(augment_digest(noisy(table)))
    assert len(set(digests)) == 3


def test_training_key_depends_on_its_noises(home, noises, tmp_path):
    path = small_corpus(tmp_path / "corpus", speakers=8)
    config = {"name": "n", "data": {"sources": [{"kind": "table", "path": str(path)}]}}

    def key(**train):
        run = Run(parse_config(config | {"train": train}), "r")
        for stage in (PREPARE, SHARD, FEATURES):
            stage.execute(run)
        return TRAIN.output(run).key

    augment = {"noise": {"files": [str(noises)]}}
    first = key(augment=augment)
    assert key(augment=augment) == first
    write_tone(noises / "a.wav", seconds=2.0)
    assert key(augment=augment) != first
    assert key() == key(loader_threads=3, max_unreadable=0.5)
