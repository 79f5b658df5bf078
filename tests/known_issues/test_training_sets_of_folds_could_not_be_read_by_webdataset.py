"""The pipeline of webdataset looked for the shards of a union of folds below its index: the first one was missing."""

import torch

from recognition.data.webdataset import open_webdataset
from speech.audio import encode_flac
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from storage.union import union_index

RATE = 8000


def write_fold(store, name):
    row = {"duration": 1.0, "num_frames": RATE, "sample_rate": RATE, "text": f"said in {name}"}
    sample = Sample(f"of-{name}", {"flac": encode_flac(torch.linspace(-0.5, 0.5, RATE), RATE)}, row)
    index = build_index([write_shard(store, "shard-000000.tar", [sample], "flac")], {})
    index.write(store)
    return index


def test_union_gives_the_utterances_of_its_folds(tmp_path):
    root = ObjectStore(tmp_path / "shards")
    folds = {name: write_fold(root.child(name), name) for name in ("fold-1", "fold-2")}
    union_index(folds, "train-3").write(root.child("train-3"))
    items = list(open_webdataset(str(tmp_path / "shards" / "train-3"), cache=tmp_path / "cache", shuffle=0))
    assert [item["text"] for item in items] == ["said in fold-1", "said in fold-2"]
    assert all(item["wave"].shape == (RATE,) for item in items)
