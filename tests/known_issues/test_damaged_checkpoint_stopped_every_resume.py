"""A checkpoint with a missing object or a torn state stopped every resume; it should be skipped."""

import shutil

import pytest

from storage.objects import ObjectStore
from training.coordinator.journal import parse_lines


@pytest.fixture(scope="module")
def whole(tones, tmp_path_factory):
    """A corpus, and an undisturbed training on it."""
    corpus = tones.make_corpus(tmp_path_factory.mktemp("tones"))
    return corpus, tones.train_here(corpus.job(tmp_path_factory.mktemp("whole"), max_batch=4, checkpoint_steps=1000))


@pytest.fixture(scope="module")
def interrupted(tones, whole, tmp_path_factory):
    """A training that was stopped twice, and has a checkpoint of each time."""
    folder = tmp_path_factory.mktemp("interrupted")
    job = whole[0].job(folder, max_batch=4, checkpoint_steps=1000)
    for step in (5, 8):
        tones.train_here(job, stop_at=step)
    return folder


def damage(store, folder, kind):
    model, optimizer = f"{folder}/node-000/model.safetensors", f"{folder}/node-000/optimizer.safetensors"
    if kind == "torn":
        store.write(f"{folder}/complete.json", store.read(f"{folder}/complete.json")[:200])
    elif kind == "never completed":
        store.delete(f"{folder}/complete.json")
    elif kind == "no model":
        store.delete(model)
    elif kind == "no optimizer":
        store.delete(optimizer)
    elif kind == "cut":
        store.write(model, store.read(model)[:-9])
    else:
        data = bytearray(store.read(optimizer))
        data[-5] ^= 4
        store.write(optimizer, bytes(data))


@pytest.mark.parametrize("kind", ["torn", "never completed", "no model", "no optimizer", "cut", "flipped"])
@pytest.mark.variants(2)
def test_damaged_checkpoint_is_skipped(tones, whole, interrupted, tmp_path, kind):
    corpus, undisturbed = whole
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    job = corpus.job(tmp_path, max_batch=4, checkpoint_steps=1000)
    store = ObjectStore(job.output_url)
    folder = sorted(name.rsplit("/", 1)[0] for name in store.list("checkpoints") if name.endswith("complete.json"))[-1]
    damage(store, folder, kind)
    run = tones.train_here(job)
    restarts = [entry for entry in parse_lines(job.journal.read_text().splitlines()) if entry["kind"] == "resume"]
    assert restarts[-1]["steps"] == {"0.0": 5}
    assert run.model_bytes == undisturbed.model_bytes
    assert run.losses == undisturbed.losses
    # what is written after it counts, though its number may be lower than the damaged one's was
    newest = sorted(name for name in store.list("checkpoints") if name.endswith("complete.json"))[-1]
    assert store.read_json(newest)["totals"]["steps"] == run.result["step"]


def test_training_restarts_if_every_checkpoint_is_damaged(tones, whole, tmp_path):
    corpus, undisturbed = whole
    job = corpus.job(tmp_path, max_batch=4, checkpoint_steps=1000)
    tones.train_here(job, stop_at=5)
    store = ObjectStore(job.output_url)
    damage(store, next(name for name in store.list("checkpoints")).rsplit("/", 2)[0], "no model")
    run = tones.train_here(job)
    assert run.model_bytes == undisturbed.model_bytes
    assert run.losses == undisturbed.losses
