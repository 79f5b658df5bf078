"""Reading shards into shuffled, bucketed, padded log-mel batches: ours, plain webdataset, and lhotse's Shar.

    python -m benchmarks.bench_reading [--json]

One core, one thread, real speech, one epoch over all utterances. All alternatives decode FLAC with soundfile and
compute 80 log-mel features by Kaldi's definitions (lhotse with its own Fbank). Rates are utterances per second of one
core.
"""

import argparse
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import soundfile
import torch
import torchaudio
import webdataset

from benchmarks.bench_sharding import PER_SHARD, RATE, lhotse_cuts, real_rows, with_starling, with_tar_writer
from benchmarks.common import compare
from recognition.data.dataset import SpeechDataset
from speech.features import LogMelConfig, build_features
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader

BATCH_SECONDS, MAX_BATCH, FILTERS = 160.0, 64, 80
OURS = "starling"
Work = Callable[[], object]


def ours(folder: Path) -> Work:
    """Read as in training, with shards verified once per process."""
    store = ObjectStore(folder)
    index = ShardIndex.read(store)
    dataset = SpeechDataset(index, ShardReader(store, index))
    extract = build_features(LogMelConfig(num_mels=FILTERS), RATE)
    epoch = iter(range(1 << 30))

    def work() -> int:
        count = 0
        plan = plan_epoch(
            dataset.durations, batch_seconds=BATCH_SECONDS, max_batch=MAX_BATCH, seed=1, epoch=next(epoch)
        )
        for rows in plan:
            batch = dataset.batch(rows)
            extract(batch.inputs, batch.lengths)
            count += len(batch.ids)
        return count

    return work


def _features(sample: dict[str, Any]) -> dict[str, Any]:
    wave, _ = soundfile.read(io.BytesIO(sample["flac"]), dtype="float32")
    fields = json.loads(sample["json"])
    feats = torchaudio.compliance.kaldi.fbank(torch.from_numpy(wave)[None] * 32768, num_mel_bins=FILTERS, dither=0.0)
    return {"feats": feats, "seconds": fields["duration"], "text": fields["text"]}


def _bucketed(samples: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Sort by duration within buckets of several batches, cut them into batches, and shuffle these."""
    bucket: list[dict[str, Any]] = []

    def batches() -> Iterator[list[dict[str, Any]]]:
        bucket.sort(key=lambda sample: sample["seconds"])
        cut: list[list[dict[str, Any]]] = [[]]
        for sample in bucket:
            full = len(cut[-1]) == MAX_BATCH or sample["seconds"] * (len(cut[-1]) + 1) > BATCH_SECONDS
            if full and cut[-1]:
                cut.append([])
            cut[-1].append(sample)
        random.shuffle(cut)
        bucket.clear()
        yield from cut

    for sample in samples:
        bucket.append(sample)
        if len(bucket) == 16 * 12:
            yield from batches()
    if bucket:
        yield from batches()


def with_webdataset(folder: Path) -> Work:
    """The same pipeline with webdataset and torchaudio."""
    tars = sorted(str(path) for path in folder.glob("*.tar"))

    def work() -> int:
        count = 0
        data = webdataset.WebDataset(tars, shardshuffle=len(tars), seed=0).shuffle(200).map(_features)
        for group in _bucketed(data):
            torch.nn.utils.rnn.pad_sequence([sample["feats"] for sample in group], batch_first=True)
            count += len(group)
        return count

    return work


def with_lhotse(folder: Path) -> Work:
    """The same with lhotse's Shar, dynamic bucketing and on-the-fly Fbank."""
    from lhotse import CutSet, Fbank, FbankConfig
    from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset, OnTheFlyFeatures

    dataset = K2SpeechRecognitionDataset(input_strategy=OnTheFlyFeatures(Fbank(FbankConfig(num_mel_bins=FILTERS))))

    def work() -> int:
        count = 0
        cuts = CutSet.from_shar(in_dir=folder, shuffle_shards=True)
        sampler = DynamicBucketingSampler(
            cuts, max_duration=BATCH_SECONDS, max_cuts=MAX_BATCH, shuffle=True, num_buckets=8, buffer_size=200
        )
        for group in sampler:
            count += len(dataset[group]["supervisions"]["text"])
        return count

    return work


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--copies", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows = real_rows(options.copies)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("ours", "plain", "shar")}
        for folder in folders.values():
            folder.mkdir()
        with_starling(rows, folders["ours"])
        with_tar_writer(rows, folders["plain"])
        rivals: dict[str, Work] = {
            OURS: ours(folders["ours"]),
            "webdataset + torchaudio": with_webdataset(folders["plain"]),
        }
        try:
            lhotse_cuts(rows).to_shar(folders["shar"], fields={"recording": "flac"}, shard_size=PER_SHARD)
            rivals["lhotse Shar + Fbank"] = with_lhotse(folders["shar"])
        except ImportError:
            print("lhotse is not installed: pip install lhotse")
        for rival, work in rivals.items():
            assert work() == len(rows), f"{rival} does not give every utterance once"
        seconds = compare(rivals)
    table = [
        {"name": rival, "utterances_per_s": len(rows) / value, "times_slower": value / seconds[OURS]}
        for rival, value in seconds.items()
    ]
    if options.json:
        print(json.dumps({"benchmark": "reading", "utterances": len(rows), "rows": table}))
        return
    print(f"{len(rows)} utterances to shuffled, bucketed, padded log-mel batches, one core, medians of 5")
    for row in table:
        print(f"  {row['name']:26} {row['utterances_per_s']:8.1f} utterances/s   {row['times_slower']:5.2f} x our time")


if __name__ == "__main__":
    main()
