"""Cost per utterance by corpus size (1, 10 and 100 times): sharding, indexing, planning and reading.

    python -m benchmarks.bench_size [--json]

Uses synthetic half-second utterances, 100 per shard; 4, 40 and 400 shards. Constant cost means that the data path is
linear in the size of the corpus.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from recognition.data.dataset import SpeechDataset
from speech.audio import encode_flac
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.shards import Sample, ShardPart, build_index, write_shard
from training.coordinator.epochs import Epoch, ShardMap

RATE, SECONDS, PER_SHARD, SHARDS = 8000, 0.5, 100, 4


def samples(shard: int, flac: bytes) -> Iterator[Sample]:
    """A shard's utterances."""
    row = {"duration": SECONDS, "num_frames": int(RATE * SECONDS), "sample_rate": RATE, "text": "one two"}
    for number in range(PER_SHARD):
        yield Sample(f"utt-{shard:06d}-{number:03d}", {"flac": flac}, row | {"speaker": f"speaker{number % 7}"})


def write(store: ObjectStore, shards: int, flac: bytes) -> list[ShardPart]:
    """Write all shards."""
    return [write_shard(store, f"{number:06d}.tar", samples(number, flac), "flac") for number in range(shards)]


def lease(index: ShardIndex) -> int:
    """Lease an epoch to 16 nodes, as the coordinator does; returns the number of leases."""
    epoch, number = Epoch(0, ShardMap(index.column("shard")), 1), 0
    while not epoch.done:
        number += 1
        grant = epoch.grant(number, f"node{number % 16}", 16)
        assert grant is not None
        epoch.train(grant.rows)
    return number


def read(store: ObjectStore, index: ShardIndex) -> None:
    """Read every utterance in batches, as in training."""
    dataset = SpeechDataset(index, ShardReader(store, index))
    for rows in plan_epoch(dataset.durations, batch_seconds=160.0, max_batch=64, seed=1, epoch=0):
        dataset.batch(rows)


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """CPU seconds (so that other load does not count) and result of a function."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def measure(factor: int, flac: bytes) -> dict[str, float]:
    """CPU microseconds per utterance of each step."""
    shards = SHARDS * factor
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(Path(folder))
        times: dict[str, float] = {}
        times["write shards"], parts = timed(lambda: write(store, shards, flac))
        times["write index"], _ = timed(lambda: build_index(parts, {}).write(store))  # type: ignore[arg-type]
        times["read index"], index = timed(lambda: ShardIndex.read(store))
        assert isinstance(index, ShardIndex)
        times["plan epoch"], _ = timed(
            lambda: plan_epoch(index.column("duration"), batch_seconds=160.0, max_batch=64, seed=1, epoch=0)
        )
        times["lease epoch"], _ = timed(lambda: lease(index))
        times["read batches"], _ = timed(lambda: read(store, index))
    return {name: value / (shards * PER_SHARD) * 1e6 for name, value in times.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 10, 100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    flac = encode_flac(0.1 * torch.randn(int(RATE * SECONDS), generator=torch.Generator().manual_seed(0)), RATE)
    measure(1, flac)  # warm up caches and lazy imports
    rows = []
    for factor in options.factors:
        runs = [measure(factor, flac) for _ in range(5 if factor < 100 else 3)]
        times = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append({"shards": SHARDS * factor, "utterances": SHARDS * factor * PER_SHARD, "peak_mb": peak, **times})
    if options.json:
        print(json.dumps({"benchmark": "size", "rows": rows}))
        return
    print("CPU microseconds an utterance, medians")
    for name in rows[0]:
        print(f"  {name:14}" + "".join(f"{row[name]:12.1f}" for row in rows))
    totals = [sum(value for name, value in row.items() if " " in name) for row in rows]
    print(f"  {'all':14}" + "".join(f"{total:12.1f}" for total in totals))


if __name__ == "__main__":
    main()
