"""The public reading path: a webdataset pipeline gives the same utterances as Starling's own reader."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recognition.data.dataset import SpeechDataset
from recognition.data.webdataset import open_webdataset
from speech.audio import encode_flac
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.shards import Sample, build_index, write_shard

COUNT, RATE = 30, 8000


def sample(number, payload="flac"):
    generator = torch.Generator().manual_seed(number)
    wave = 0.1 * torch.randn(1000 + 400 * (number % 7), generator=generator)
    seconds = len(wave) / RATE
    row = {"duration": seconds, "num_frames": len(wave), "sample_rate": RATE, "text": f"word {number}", "speaker": "s"}
    if payload == "npy":
        import io

        memory = io.BytesIO()
        np.save(memory, np.full((3 + number % 4, 5), number, np.float16))
        return Sample(f"u.{number}", {"npy": memory.getvalue()}, row)
    return Sample(f"u.{number}", {"flac": encode_flac(wave, RATE)}, row)


def write(url, payload="flac"):
    store = ObjectStore(url)
    parts = [
        write_shard(store, f"train-{start:03d}.tar", [sample(n, payload) for n in range(start, start + 5)], payload)
        for start in range(0, COUNT, 5)
    ]
    build_index(parts, {}).write(store)
    return url


@pytest.fixture
def shards(tmp_path):
    return write(str(tmp_path / "shards"))


def read_with_our_reader(url, **options):
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    dataset = SpeechDataset(index, ShardReader(store, index), **options)
    return {index.row(n)["id"]: dataset.load(n) for n in range(len(index))}


def test_utterances_equal_those_of_our_reader(shards, tmp_path):
    items = {item["id"]: item for item in open_webdataset(shards, cache=tmp_path / "cache", shuffle=0)}
    wanted = read_with_our_reader(shards)
    assert list(items) == list(wanted)
    assert all(torch.equal(items[name]["wave"], wave) for name, wave in wanted.items())
    assert (items["u.7"]["text"], items["u.7"]["speaker"]) == ("word 7", "s")


def test_audio_is_resampled_to_the_requested_rate(shards, tmp_path):
    waves = {item["id"]: item["wave"] for item in open_webdataset(shards, cache=tmp_path / "cache", sample_rate=16000)}
    wanted = read_with_our_reader(shards, sample_rate=16000)
    assert waves.keys() == wanted.keys()
    assert all(torch.equal(waves[name], wave) for name, wave in wanted.items())


def test_stored_features_are_read_from_remote_shards(tmp_path):
    url = write(f"memory://webdataset{tmp_path}", "npy")
    features = {item["id"]: item["feats"] for item in open_webdataset(url, cache=tmp_path / "cache")}
    wanted = read_with_our_reader(url)
    assert features.keys() == wanted.keys()
    assert all(torch.equal(features[name], feats) for name, feats in wanted.items())
    copies = {f"{path.parent.name}/{path.name}" for path in (tmp_path / "cache").rglob("*.tar")}
    assert copies == {f"{shard.sha256}/{shard.name}" for shard in ShardIndex.read(ObjectStore(url)).shards}


def test_batches_hold_every_utterance_once_within_the_bound_and_epochs_differ(shards, tmp_path):
    data = open_webdataset(shards, cache=tmp_path / "cache", batch_seconds=2.0, max_batch=6)
    first, second = list(data), list(data)
    for batches in (first, second):
        assert sorted(name for batch in batches for name in batch["id"]) == sorted(read_with_our_reader(shards))
        assert all(1 <= len(batch["id"]) <= 6 for batch in batches)
        assert all(batch["waves"].shape == (len(batch["id"]), int(batch["lengths"].max())) for batch in batches)
        assert all(batch["waves"].numel() / RATE <= 2.0 for batch in batches)
    assert [batch["id"] for batch in first] != [batch["id"] for batch in second]
    again = open_webdataset(shards, cache=tmp_path / "cache", batch_seconds=2.0, max_batch=6)
    assert [batch["id"] for batch in again] == [batch["id"] for batch in first]


@pytest.mark.slow
def test_nodes_and_workers_divide_the_shards_in_every_epoch(shards, tmp_path, monkeypatch):
    epochs = [[], []]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        data = open_webdataset(shards, cache=tmp_path / "cache")
        more = {"multiprocessing_context": "spawn", "persistent_workers": True}
        loader = DataLoader(data, batch_size=None, num_workers=2, **more)
        for names_of_epoch in epochs:
            names = [item["id"] for item in loader]
            assert 0 < len(names) < COUNT
            names_of_epoch += names
    for names_of_epoch in epochs:
        assert sorted(names_of_epoch) == sorted(read_with_our_reader(shards))
    assert epochs[0] != epochs[1]
