"""Two sets that were read through one cache at the same time could get each other's utterances.

A copy was named like its shard, and each set has a `shard-000000.tar`: a copy of another set replaced it before it was
opened.
"""

import random

import torch

from recognition.data.webdataset import open_webdataset
from speech.audio import encode_flac
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard

RATE = 8000


def write_set(name):
    store = ObjectStore(f"memory://{name}-{random.getrandbits(60):x}")
    row = {"duration": 1.0, "num_frames": RATE, "sample_rate": RATE, "text": name}
    sample = Sample("u1", {"flac": encode_flac(torch.linspace(-0.5, 0.5, RATE), RATE)}, row)
    build_index([write_shard(store, "shard-000000.tar", [sample], "flac")], {}).write(store)
    return store.url


def test_each_set_gets_its_own_utterances(tmp_path, monkeypatch):
    urls = {name: write_set(name) for name in ("train", "test")}
    fetch, reading = ObjectStore.fetch, []

    def and_then_another_loader(store, name, folder):
        path = fetch(store, name, folder)
        if name.endswith(".tar") and not reading:
            reading.append(name)
            assert [item["text"] for item in open_webdataset(urls["test"], cache=tmp_path, shuffle=0)] == ["test"]
        return path

    monkeypatch.setattr(ObjectStore, "fetch", and_then_another_loader)
    assert [item["text"] for item in open_webdataset(urls["train"], cache=tmp_path, shuffle=0)] == ["train"]
    assert reading
