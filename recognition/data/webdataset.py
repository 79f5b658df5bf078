"""Starling's shards as a pipeline of the webdataset library, for other training loops.

    data = open_webdataset("s3://bucket/shards/train", cache=Path("/tmp/shards"), batch_seconds=240)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=4, persistent_workers=True)
    for epoch in range(10):
        for batch in loader:
            batch["waves"], batch["lengths"], batch["text"]

The stages are the library's own, except for opening shards in any object store, decoding without pickle, and batches of
utterances of similar length. Nodes (`torch.distributed`) and loader workers each read shards of their own. Unlike
Starling's own reader (`recognition.data.dataset`), this one reads whole shards in order, does not verify their
checksums, and may give nodes different numbers of batches.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset

from speech.audio import decode_audio, resample
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.union import shards_store

Item = dict[str, Any]


def open_webdataset(
    url: str,
    *,
    cache: Path,
    sample_rate: int | None = None,
    shuffle: int = 2000,
    seed: int = 0,
    batch_seconds: float = 0.0,
    max_batch: int = 64,
) -> webdataset.DataPipeline:
    """Open a set of shards as utterances or batches; each iteration is an epoch, in another order.

    Each process counts epochs by itself: with loader workers, use `persistent_workers=True`.

    Args:
        url: Folder or object store with the set's index, any URL of `ObjectStore`; the shards of a fold's training set
            are beside it.
        cache: Folder for copies of remote shards, each in a folder that its SHA-256 names.
        sample_rate: Rate that audio is resampled to, Hz; None keeps the stored rate.
        shuffle: Size of the shuffle buffer in utterances; shards are shuffled, too. 0 keeps the stored order of both.
        seed: Seed of the order.
        batch_seconds: Longest utterance times number of utterances of a batch; 0 gives single utterances.
        max_batch: Maximum number of utterances in a batch.

    Returns:
        A pipeline of dicts: each utterance's JSON (`id`, `text`, `speaker`, `duration`, ...) with `wave` [samples], or
        `feats` [frames, F] if features are stored; batches have lists of these fields, `waves` or `feats` [batch,
        longest, ...] and `lengths` [batch].

    Raises:
        ShardIndexError: If the index is missing or damaged.
    """
    folder = ObjectStore(url)
    index = ShardIndex.read(folder)
    store, digests = shards_store(folder, index), {record.name: record.sha256 for record in index.shards}
    names = list(digests)
    stages: list[Any] = [webdataset.SimpleShardList(names)]
    if shuffle:
        stages.append(webdataset.detshuffle(len(names), len(names), seed=seed))
    stages += [
        webdataset.split_by_node,
        webdataset.split_by_worker,
        partial(_opened, store, cache, digests),
        webdataset.tariterators.tar_file_expander,
        webdataset.tariterators.group_by_keys,
    ]
    if shuffle:
        stages.append(webdataset.detshuffle(shuffle, shuffle, seed=seed))
    stages.append(webdataset.map(partial(_decoded, sample_rate)))
    if batch_seconds:
        stages.append(partial(_batched, batch_seconds, max_batch, max(shuffle, max_batch)))
    return webdataset.DataPipeline(*stages)


def _opened(store: ObjectStore, cache: Path, digests: Mapping[str, str], shards: Iterable[Item]) -> Iterator[Item]:
    for shard in shards:
        # shards of other sets have the same names, and may be fetched at the same time
        with store.fetch(shard["url"], cache / digests[shard["url"]]).open("rb") as stream:
            yield {"url": store.join(shard["url"]), "stream": stream}


def _decoded(sample_rate: int | None, sample: Item) -> Item:
    """Decode an utterance from its members of the tar."""
    item: Item = json.loads(sample.pop("json"))
    if "npy" in sample:
        stored = np.load(io.BytesIO(sample["npy"]), allow_pickle=False)
        return item | {"feats": torch.from_numpy(stored.astype(np.float32))}
    payload = next(data for suffix, data in sample.items() if not suffix.startswith("__"))
    wave, rate = decode_audio(payload)
    return item | {"wave": resample(wave, rate, sample_rate) if sample_rate else wave}


def _batched(batch_seconds: float, max_batch: int, window: int, items: Iterable[Item]) -> Iterator[Item]:
    """Batches of utterances of similar length, chosen within consecutive windows of utterances."""
    waiting: list[Item] = []
    for item in items:
        waiting.append(item)
        if len(waiting) == window:
            yield from _batches(waiting, batch_seconds, max_batch)
            waiting = []
    if waiting:
        yield from _batches(waiting, batch_seconds, max_batch)


def _batches(items: list[Item], batch_seconds: float, max_batch: int) -> Iterator[Item]:
    durations = [float(item["duration"]) for item in items]
    for rows in plan_epoch(durations, batch_seconds=batch_seconds, max_batch=max_batch, seed=len(items), epoch=0):
        some = [items[row] for row in rows]
        name = "feats" if "feats" in some[0] else "wave"
        inputs = [item[name] for item in some]
        batch: Item = {key: [item[key] for item in some] for key in some[0] if key != name}
        batch["lengths"] = torch.tensor([len(features) for features in inputs])
        batch["feats" if name == "feats" else "waves"] = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        yield batch
