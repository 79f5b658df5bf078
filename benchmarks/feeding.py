"""Throughput of data loading alone: utterances per second by loader threads and processes, against GPU demand.

    python -m benchmarks.feeding [--json] [--threads 1 2 4 8] [--processes 1 2] [--busy] [--learners 1] [--wanted 300]
        [--url SHARDS] [--augment profile]

Each learner's process reads, verifies and decodes the batches of an epoch's plan with `train.loader_threads` threads or
`train.loader_processes` processes, and draws the random parts of augmentation (`--augment`: none, that of the GPU
profiles, or with noise and reverberation as well). It reads ahead as in training; the consumer takes batches
immediately. With `--busy`, the learner's main thread meanwhile launches small torch operations from Python, as a
training step does: reported are those per second, with loading and before it, and how long the thread waited for the
interpreter lock. `--wanted` is the demand of one GPU: an estimated 250 to 350 utterances per second for a Conformer of
30 M weights on an H100. Without `--url` (a folder or s3:// URL of a set's shards), shards are made from the FLAC files
of LibriSpeech dev-clean-5.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.common import BenchmarkError, Watched
from recognition.data.augmentation import Augmenter
from recognition.data.dataset import SpeechDataset
from speech.features.augment import AugmentConfig, NoiseConfig, PauseConfig, ReverbConfig
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from training.learner.prefetch import Loader, LoaderProcesses, Prefetcher
from training.node.scheduler import READ_AHEAD
from training.processes.children import end_with_parent

_PAUSES = PauseConfig(edge_s=(0.0, 1.0), inner_s=(0.0, 0.5))
_PROFILE = AugmentConfig(speed_factors=(0.9, 1.0, 1.1), pauses=_PAUSES)
AUGMENTS = {
    "none": AugmentConfig(enabled=False),
    "profile": _PROFILE,
    "noisy": _PROFILE.model_copy(update={"noise": NoiseConfig(), "reverb": ReverbConfig()}),
}
COPIES = 4
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Options:
    """Options of the measurement, for each learner."""

    url: str
    threads: int = 1
    processes: int = 0
    """If any, batches are loaded in processes, not in threads."""
    busy: bool = False
    """Whether the main thread launches operations meanwhile."""
    seconds: float = 10.0
    batch_seconds: float = 400.0
    max_batch: int = 64
    augment: str = "profile"
    """The augmentation, a key of `AUGMENTS`."""


def feed(number: int, options: Options, pipe: Connection, parent: int) -> None:
    """A learner's process: load batches as fast as possible for the given time."""
    end_with_parent(parent)
    torch.set_num_threads(1)
    loader, processes = open_loader(options), None
    if options.processes:
        processes = LoaderProcesses(loader, partial(open_loader, options), options.processes)
        deadline = time.monotonic() + PATIENCE_S
        while len(processes.waiting) < options.processes:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the loader processes do not start within {PATIENCE_S:.0f} s")
            time.sleep(0.1)
    loaders = options.processes or options.threads
    prefetcher = Prefetcher(processes or loader, loaders, end=processes.close if processes else None)
    pids = [os.getpid(), *(processes.waiting if processes else ())]
    pipe.send("ready")
    pipe.recv()
    stop = threading.Event()
    alone, _ = launch(time.monotonic() + min(2.0, options.seconds), stop) if options.busy else (0.0, 0.0)
    with ThreadPoolExecutor(1) as consumer:
        measured = consumer.submit(_measure, number, options, loader.data, prefetcher, pids)
        measured.add_done_callback(lambda _: stop.set())
        beside, waited = launch(time.monotonic() + options.seconds, stop) if options.busy else (0.0, 0.0)
        rates = measured.result()
    prefetcher.close()
    pipe.send(rates | {"launches_per_s": beside, "launches_alone_per_s": alone, "lock_wait": waited})


def open_loader(options: Options) -> Loader:
    """The loader of a learner, or of one of its loader processes."""
    store = ObjectStore(options.url)
    index = ShardIndex.read(store)
    dataset = SpeechDataset(index, ShardReader(store, index))
    # fetch and verify the shards first: in training, all but the first are fetched in the background
    for row in dataset.first_of_shards(np.arange(len(dataset))):
        dataset.load(int(row))
    augmenter = Augmenter(AUGMENTS[options.augment], int(index.column("sample_rate")[0]), seed=1)
    return Loader(dataset, augmenter, torch.device("cpu"))


def launch(deadline: float, stop: threading.Event) -> tuple[float, float]:
    """Launch small operations in this thread until a time of the monotonic clock, or until told.

    Returns:
        Operations per second; and the share of the time in which the thread waited for the interpreter lock: it did not
        run, and was not waiting for a core, as Linux counts it, so that other work on the machine matters little.
    """
    began, before, count, values = time.monotonic(), _scheduled_s(), 0, torch.ones(16)
    while time.monotonic() < deadline and not stop.is_set():
        for _ in range(100):
            values = values + 1.0
        count += 100
    elapsed = time.monotonic() - began
    return count / elapsed, max(0.0, 1.0 - (_scheduled_s() - before) / elapsed)


def _scheduled_s() -> float:
    """Seconds that this thread has run or waited for a core."""
    return sum(map(int, Path("/proc/thread-self/schedstat").read_text().split()[:2])) / 1e9


def _measure(
    number: int, options: Options, dataset: SpeechDataset, prefetcher: Prefetcher, pids: list[int]
) -> dict[str, float]:
    utterances, audio, batches, epoch = 0, 0.0, 0, number << 20
    plan: list[Any] = []
    ahead = READ_AHEAD - 1 + (options.processes or options.threads)
    began, cpu = time.perf_counter(), _cpu_seconds(pids)
    while (elapsed := time.perf_counter() - began) < options.seconds or not batches:
        if len(plan) <= ahead:
            more = {"batch_seconds": options.batch_seconds, "max_batch": options.max_batch}
            plan += [(rows, epoch) for rows in plan_epoch(dataset.durations, **more, seed=1, epoch=epoch)]
            epoch += 1
        prefetcher.hint(plan[: 1 + ahead])
        batch = prefetcher.take(*plan.pop(0))
        assert batch is not None
        utterances, audio, batches = utterances + len(batch.ids), audio + batch.seconds, batches + 1
    return {"utterances": utterances, "audio_s": audio, "elapsed": elapsed, "cpu_s": _cpu_seconds(pids) - cpu}


def _cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes so far, seconds."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(used.user + used.system for used in times)


def measure(options: Options, learners: int, wanted: float) -> dict[str, Any]:
    """Run the data loading of several learners concurrently and sum up.

    Raises:
        BenchmarkError: A process has died or does not answer.
    """
    processes = Watched(feed, learners, options, options.seconds + PATIENCE_S, parents=True)
    patience_s = 0.0
    try:
        processes.hear()
        processes.tell("go on")
        replies = processes.hear()
        patience_s = 30.0
    finally:
        processes.end(patience_s)
    utterances = sum(reply["utterances"] for reply in replies)
    rate = sum(reply["utterances"] / reply["elapsed"] for reply in replies)
    return {
        **asdict(options),
        "learners": learners,
        "utterances_per_s": rate,
        "audio_per_s": sum(reply["audio_s"] / reply["elapsed"] for reply in replies),
        "utterances_per_cpu_s": utterances / max(1e-9, sum(reply["cpu_s"] for reply in replies)),
        "fed": rate / (learners * wanted),
        **{name: sum(reply[name] for reply in replies) for name in ("launches_per_s", "launches_alone_per_s")},
        "lock_wait": sum(reply["lock_wait"] for reply in replies) / len(replies),
    }


def _own_shards(folder: Path) -> str:
    from benchmarks.bench_sharding import real_rows, with_starling

    with_starling(real_rows(COPIES), folder)
    return str(folder)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="loader processes, after the threads")
    parser.add_argument("--busy", action="store_true", help="the main thread launches operations meanwhile")
    parser.add_argument("--learners", type=int, nargs="+", default=[1], help="processes, one a GPU")
    parser.add_argument("--wanted", type=float, default=300.0, help="utterances a second that one GPU takes")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch-seconds", type=float, default=400.0)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--url", default="", help="a set's shards")
    parser.add_argument("--augment", default="profile", choices=AUGMENTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        url = args.url or _own_shards(Path(folder))
        common = {name: getattr(args, name) for name in ("busy", "seconds", "batch_seconds", "max_batch", "augment")}
        loaders = [{"threads": count} for count in args.threads] + [{"processes": count} for count in args.processes]
        rows = [
            measure(Options(url, **fields, **common), learners, args.wanted)
            for learners in args.learners
            for fields in loaders
        ]
    if args.json:
        print(json.dumps({"benchmark": "feeding", "cores": os.cpu_count(), "rows": rows}))
        return
    print(f"{os.cpu_count()} cores; a GPU takes {args.wanted:g} utterances/s")
    for row in rows:
        how = f"{row['processes']} processes" if row["processes"] else f"{row['threads']} threads"
        busy = f"; {row['launches_per_s']:,.0f} operations/s launched, {row['launches_alone_per_s']:,.0f} alone, "
        busy += f"{row['lock_wait']:.1%} of the time waiting for the interpreter lock"
        print(
            f"{row['learners']} learner(s) x {how}: {row['utterances_per_s']:,.0f} utterances/s "
            f"({row['audio_per_s']:,.0f} x real time), {row['utterances_per_cpu_s']:,.0f} a CPU-second, "
            f"{row['fed']:.0%} of what the GPU(s) take{busy if args.busy else ''}"
        )


if __name__ == "__main__":
    main()
