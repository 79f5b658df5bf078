"""The figures of docs/gpu.md: probe, GPU tests, models, exchange, feeding and whole trainings on one GPU.

    python -m benchmarks.gpu pack --speech DIR [--output gpu-pack] [--python 3.12]     where there is a network
    python -m benchmarks.gpu run [--pack gpu-pack] [--output gpu-report] [--total 560] [--steps NAME ...]

`run`, or `make gpu-report`, needs a Python with torch, and the packages below `pack`'s wheels: no Prefect, no MLflow
and no network. Each step is a process with a time limit of its own; a failed one does not stop the others, and what
does not fit into `--total` seconds is not run, and said so. The folder gets report.md, to paste into docs/gpu.md,
results.jsonl and run.log. `--device cpu` runs everything in small, without meaning, to test the steps.

`pack` writes the shards of two corpora below --speech (fsdd, and a quarter of an hour of mini LibriSpeech), the
configuration of a training on each, and, with --python, wheels for a machine without a network: install them with
`python -m pip install --no-index --no-deps --target SITE gpu-pack/wheels/*.whl` and set PYTHONPATH=SITE. Without a
pack, the steps that need speech are skipped.
"""

import argparse
import collections
import csv
import functools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ("pyzmq", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "cryptography", "cffi")
WHEELS += ("pycparser", "soundfile", "webdataset", "braceexpand", "rapidfuzz", "flashlight-text", "kaldifst")
"""What the tests and trainings need beside torch, torchaudio, numpy, pyarrow, sentencepiece, safetensors, psutil,
nvidia-ml-py, fsspec and pytest with xdist, timeout and hypothesis."""
FLAC_BYTES_PER_S = 16_300
"""Of 16 kHz speech."""
LOADERS_START_S = 30.0
"""How long loader processes may take to start."""
CONFORMER = {"kind": "conformer", "dim": 320, "layers": 12, "heads": 4, "channels": 64, "subsampling": 4}
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a step runs.

    Attributes:
        device: "cuda", or "cpu" for small measurements without meaning.
        pack: Folder that `pack` has written.
        output: Folder for results.
    """

    device: str
    pack: Path
    output: Path

    @property
    def gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"

    def result(self, **fields: Any) -> None:
        """Record a row of figures."""
        row = {name: (float(f"{v:.5g}") if isinstance(v, float) else v) for name, v in fields.items()}
        print("RESULT", json.dumps(row), flush=True)
        with (self.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def wait(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.gpu:
            torch.cuda.synchronize()

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """One failed measurement is recorded, and does not stop the others."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.result(what=what, error=f"{type(error).__name__}: {error}"[:300])
        self._release()

    def _release(self) -> None:
        import torch

        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def timed(self, work: Callable[[], object], seconds: float, warm: int = 3) -> tuple[float, int]:
        """Median seconds of a call that ends when the GPU has finished, and the number of calls."""
        for _ in range(warm):
            work()
        self.wait()
        end = time.perf_counter() + (seconds if self.gpu else 0.1)
        times: list[float] = []
        while time.perf_counter() < end or len(times) < 3:
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times), len(times)

    def profiled(self, work: Callable[[], object], name: str, calls: int = 5) -> Row:
        """Share of the time in which the GPU computes, and kernels a call; the table of kernels goes to the log."""
        from torch.profiler import DeviceType, ProfilerActivity, profile

        if not self.gpu:
            return {}
        work()
        self.wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            wall = time.perf_counter() - began
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        )
        busy = last = 0.0
        for start, end in spans:  # their union, since streams overlap
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
        print(name)
        print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=70))
        return {"gpu_busy": busy / 1e6 / wall, "kernels": len(spans) / calls}

    def waits(self, work: Callable[[], object]) -> Row:
        """Places in the code that wait for the GPU in one call."""
        import torch

        if not self.gpu:
            return {}
        work()
        self.wait()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        at = collections.Counter(
            f"{Path(warning.filename).parent.name}/{Path(warning.filename).name}:{warning.lineno}"
            for warning in seen
            if "synchroniz" in str(warning.message)
        )
        return {"waits": sum(at.values()), "waits_at": dict(at.most_common(12))}


# --- the pack


def pack(speech: Path, output: Path, libri_mb: float, python: str) -> None:
    """Write shards and jobs of two corpora, and wheels if `python` is a version."""
    import yaml

    shutil.rmtree(output, ignore_errors=True)
    table = csv.DictReader((speech / "fsdd/metadata.csv").open())
    rows = [(row["path"], speech / "fsdd" / row["path"], row["text"], row["speaker"], row["part"]) for row in table]
    sets = {
        part: _shards(output / "fsdd" / part, [row[:4] for row in rows if row[4] == part], "flac")
        for part in ("train", "valid")
    }
    document = yaml.safe_load((ROOT / "configs/fsdd.yaml").read_text())
    _job(output, "fsdd", sets, document, document["model"])
    sets = {
        "train": _shards(output / "libri/train", _libri(speech, "train-clean-5", libri_mb * 1e6), "flac"),
        "valid": _shards(output / "libri/valid", _libri(speech, "dev-clean-5", 3e6), "flac"),
    }
    document = yaml.safe_load((ROOT / "configs/mini_librispeech_gpu.yaml").read_text())
    _job(output, "libri", sets, document, {**CONFORMER, "dropout": 0.1})
    (output / "commit").write_text(_commit())
    if python:
        _wheels(output / "wheels", python)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size / 1e6:.0f} MB")


def _wheels(folder: Path, python: str) -> None:
    """Download the wheels of `WHEELS` at the versions of constraints.txt, for a version of Python on Linux."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    wanted = [pin for name in WHEELS for pin in pins if pin.lower().startswith(name.lower() + "==")]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*command, *wanted], check=True)


def _libri(speech: Path, part: str, limit: float) -> list[tuple[str, Path, str, str]]:
    """Utterances of a part of mini LibriSpeech in random order, up to a number of bytes as FLAC."""
    import numpy as np
    import soundfile

    utterances = []
    for table in sorted((speech / "LibriSpeech" / part).rglob("*.trans.txt")):
        for line in table.read_text().splitlines():
            name, _, text = line.partition(" ")
            utterances.append((name, next(table.parent.glob(name + ".*")), text.lower(), name.split("-")[0]))
    picked, size = [], 0.0
    for number in np.random.default_rng(1).permutation(len(utterances)):
        if size > limit:
            break
        picked.append(utterances[number])
        size += FLAC_BYTES_PER_S * soundfile.info(str(utterances[number][1])).duration
    return picked


def _shards(folder: Path, rows: list[Any], payload: str) -> list[Any]:
    """Write the shards of a set; returns its samples with their waveforms.

    Pipelines store FLAC, too, which takes a seventh of Opus' time to decode.
    """
    from speech.audio import decode_audio, encode_flac
    from storage.objects import ObjectStore
    from storage.shards import Sample, build_index, write_shard

    store, samples = ObjectStore(str(folder)), []
    # a learner leases whole shards: each must be a sample of the corpus, and the table is sorted by word
    for name, path, text, speaker in random.Random(1).sample(rows, len(rows)):
        raw = path.read_bytes()
        wave, rate = decode_audio(raw)
        raw = raw if path.suffix == f".{payload}" else encode_flac(wave, rate)
        facts = {"duration": len(wave) / rate, "num_frames": len(wave), "sample_rate": rate}
        samples.append((Sample(name, {payload: raw}, {**facts, "text": text, "speaker": speaker}), wave))
    parts = [
        write_shard(store, f"{first:06d}.tar", [sample for sample, _ in samples[first : first + 100]], payload)
        for first in range(0, len(samples), 100)
    ]
    build_index(parts, {}).write(store)
    return samples


def _job(output: Path, name: str, sets: dict[str, list[Any]], document: Row, model: Row) -> None:
    """Write the job of a training on a set: tokens, statistics of the features, and the configuration."""
    import torch

    from recognition.bundle import BundleSpec
    from recognition.systems.acoustic import AcousticTaskConfig
    from speech.features import CmvnStats, build_features
    from speech.tokens import TokenConfig, train_tokenizer
    from tasks.config.training import AcousticTrainConfig
    from training.job import TrainJob

    tokens = train_tokenizer(
        TokenConfig.model_validate(document["tokens"]), [sample.row["text"] for sample, _ in sets["train"]]
    )
    fields = {"features": {"kind": "logmel", **document["features"]}, "stats": None, "model": model}
    rate = sets["train"][0][0].row["sample_rate"]
    spec = BundleSpec.model_validate({"sample_rate": rate, "tokenizer": tokens.to_dict(), **fields})
    extract, stats = build_features(spec.features, rate), CmvnStats(spec.features.width)
    for _, wave in sets["train"]:
        feats, frames = extract(wave[None], torch.tensor([len(wave)]))
        mask = extract.speech_frames(feats, frames)
        stats.add(feats[mask] if mask is not None else feats[0, : int(frames[0])])
    train = AcousticTrainConfig.model_validate(document["train"])
    spec = spec.model_copy(update={"stats": stats.to_dict()})
    task = AcousticTaskConfig(spec=spec, objective=train.objective, augment=train.augment, train_url="x", valid_url="x")
    job = TrainJob(
        run=name,
        seed=1,
        train=train.engine_part(),
        task=task,
        output_url="x",
        journal=Path("x"),
        cache=Path("x"),
    )
    (output / f"{name}.json").write_text(job.model_dump_json())


def packed_job(place: Place, name: str, folder: Path, **train: Any) -> Any:
    """The job of a packed training, with some fields of `train` replaced, and its output in a folder."""
    from tasks.engine import know_tasks
    from training.job import TrainJob

    know_tasks()
    document = json.loads((place.pack / f"{name}.json").read_text())
    document["train"] |= {"device": place.device, "log_steps": 1, "checkpoint_steps": 100_000} | train
    document["task"] |= {f"{part}_url": str(place.pack.resolve() / name / part) for part in ("train", "valid")}
    document |= {"output_url": str(folder / "output"), "journal": str(folder / "journal.jsonl")}
    return TrainJob.model_validate(document | {"cache": str(folder / "cache")})


# --- steps


def probe(place: Place) -> None:
    """The machine: GPU, versions, rates of matrix products and copies, what Gloo does with CUDA tensors."""
    import torch

    tools = {name: bool(shutil.which(name)) for name in ("nvidia-smi", "nvidia-cuda-mps-control", "nsys", "ncu")}
    facts: Row = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count(), **tools}
    if place.gpu:
        gpu = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts |= {"gpu": gpu.name, "memory_gb": gpu.total_memory / 1e9, "cudnn": cudnn, "nccl": nccl}
    place.result(what="machine", **facts)
    side = 8192 if place.gpu else 256
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ):
        with place.guarded(f"matrix product, {name}"):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            a, b = (torch.randn(side, side, device=place.device, dtype=dtype) for _ in range(2))
            seconds, _ = place.timed(lambda a=a, b=b: a @ b, 0.5)
            place.result(what="matrix product", type=name, tflops=2 * side**3 / seconds / 1e12)
    torch.backends.cuda.matmul.allow_tf32 = False
    if place.gpu:
        with place.guarded("copies"):
            _copies(place, 43_000_000)
        with place.guarded("launches"):
            x = torch.zeros(1, device=place.device)
            seconds, _ = place.timed(lambda: [x.add_(1) for _ in range(1000)], 0.5)
            place.result(what="launch of a kernel", us=seconds * 1e3)


def _copies(place: Place, size: int) -> None:
    """Copies between the GPU and a memfd, as the exchange makes them."""
    import torch

    from training.exchange.mailbox import Mailbox, make_file

    box = Mailbox(make_file(size), size)
    parts = (*box.weights, *box.deltas)
    for part in parts:
        part[:] = 1
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.zeros(1, device=place.device)
    began = time.perf_counter()
    codes = [int(cudart.cudaHostRegister(part.ctypes.data, part.nbytes, 0)) for part in parts]
    place.result(what="page-locking of a memfd", codes=codes, seconds=time.perf_counter() - began)
    first, two = (torch.empty(size, device=place.device) for _ in range(2))
    host, pageable = [torch.from_numpy(part) for part in box.weights], torch.empty(size)
    streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(first, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            two.copy_(host[1], non_blocking=True)

    ways: dict[str, Callable[[], object]] = {
        "down": lambda: host[0].copy_(first, non_blocking=True),
        "up": lambda: two.copy_(host[1], non_blocking=True),
        "both": both,
        "down, pageable": lambda: pageable.copy_(first),
        "on the device": lambda: two.copy_(first),
    }
    for name, work in ways.items():
        seconds, _ = place.timed(work, 0.4)
        place.result(what="copy of 172 MB", way=name, ms=seconds * 1e3, gb_per_s=4e-9 * size / seconds)
    for part in parts:
        cudart.cudaHostUnregister(part.ctypes.data)


def tests(place: Place) -> None:
    """All tests marked `gpu`, by several processes; speeds are measured by the other steps."""
    files = subprocess.run(
        ["grep", "-rl", "--include=test_*.py", r"pytest\.mark\.gpu", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-n", str(min(12, os.cpu_count() or 1)), "--dist", "load"]
    command = [sys.executable, "-m", "pytest", *options, "--timeout", "100", "-k", "not test_speed_of", *sorted(files)]
    log = (
        place.output / "tests.log"
    )  # each test as it ends: what hangs until the step's limit is the one that is missing
    with log.open("wb") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR")) or " in " in line[-20:]]
    place.result(what="GPU tests", status=done.returncode, said=[line.strip("= ")[:200] for line in lines[-40:]])


def published(place: Place) -> None:
    """The published BLSTM in one process: plain, from CUDA graphs, and with all weights converted to bf16 at once."""
    from benchmarks.published_model import SEGMENT, Bench, Options

    small = {} if place.gpu else {"layers": 2, "cells": 32, "outputs": 100, "batch": 4}
    cases = [(128, "fp32", False), (128, "bf16", False), (128, "fp32", True), (128, "bf16", True), (512, "bf16", True)]
    flat_cases = [(128, "bf16", False), (128, "bf16", True)]
    for number, (batch, precision, graphs) in enumerate(cases + flat_cases):
        flat = number >= len(cases)
        name = f"batch {batch}, {precision}{', CUDA graphs' if graphs else ''}{', flat' if flat else ''}"
        if graphs and not place.gpu:
            continue
        with place.guarded(f"published model, {name}"):
            options = {"batch": batch, "precision": precision, "device": place.device, "graphs": graphs, **small}
            options["flat_bf16"] = flat
            bench = Bench(0, Options(**options))
            params, frames = bench.flat.weights.numel(), len(bench.inputs) * SEGMENT
            seconds, count = place.timed(bench.step, 2.0, 10)
            row = {"params": params, "step_ms": seconds * 1e3, "steps": count, "frames_per_s": frames / seconds}
            row |= {"tflops": 6 * params * frames / seconds / 1e12, "peak_gb": bench.peak_mb() / 1e3}
            row |= place.profiled(bench.step, name) | place.waits(bench.step)
            place.result(what="published model", way=name, **row)
            del bench


def conformer(place: Place, compiled: bool = False, flat: bool = False) -> None:
    """A Conformer of 29 M weights on real speech: gradient and update, of batches at hand and with loader threads."""
    cases = [(64.0, False), (64.0, True), (400.0, False), (400.0, True)]
    for seconds, graphs in cases[:1] if compiled else cases[:2] if flat else cases:
        name = f"batches of {seconds:.0f} s{', CUDA graphs' if graphs else ''}{', compiled' if compiled else ''}"
        name += ", flat" if flat else ""
        if not place.gpu and (graphs or seconds > 64):
            continue
        with place.guarded(f"Conformer, {name}"), tempfile.TemporaryDirectory() as folder:
            fields: Row = {"batch_seconds": seconds, "cuda_graphs": graphs, "compile": compiled, "flat_bf16": flat}
            job = packed_job(place, "libri" if place.gpu else "fsdd", Path(folder), **fields)
            place.result(what="Conformer", way=name, **_conformer(place, job, seconds, name))


def _conformer(place: Place, job: Any, seconds: float, name: str, loaders: tuple[int, ...] = (1, 4, 12)) -> Row:
    import torch

    from storage.batching import plan_epoch
    from training.learner.compute import Learner, open_set
    from training.learner.prefetch import Loader

    device = torch.device("cuda", 0) if place.gpu else torch.device("cpu")
    learner, dataset = Learner(job, device), open_set(job, "train")
    load = Loader(dataset, learner.task, device)
    planned = plan_epoch(dataset.durations, batch_seconds=seconds, max_batch=64, seed=1, epoch=3)
    batches = [load(rows, 3) for rows in planned[:6]]
    audio = sum(batch.seconds for batch in batches) / len(batches)
    turn = iter(range(10**9))

    def step() -> None:
        number = next(turn)
        learner.gradient(batches[number % len(batches)], number)
        learner.scale_gradient(1000.0, learner.norm)
        learner.update(1e-4)

    began = time.perf_counter()
    for _ in range(3 * len(batches)):  # each shape three times: computed, recorded, replayed
        step()
    place.wait()
    first = time.perf_counter() - began
    taken, count = place.timed(step, 3.0, 0)
    row = {"params": learner.flat.weights.numel(), "first_steps_s": first, "step_ms": taken * 1e3, "steps": count}
    row |= {"audio_per_s": audio / taken, "tflops": 6 * learner.flat.weights.numel() * 25 * audio / taken / 1e12}
    row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9 if place.gpu else 0.0}
    if not job.train.compile:
        row |= place.profiled(step, name, 6) | place.waits(step)
        for threads in loaders if place.gpu else loaders[:1]:
            row[f"audio_per_s_with_{threads}_loader_threads"] = _fed(place, learner, load, planned, threads)
    return row


WHISPER_BASE = {"kind": "whisper", "source": "none", "dropout": 0.0, "dim": 512, "layers": 6}
WHISPER_BASE |= {"encoder": {"model_type": "whisper", "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}}
WHISPER_DECODER = {"kind": "transformer", "dim": 512, "layers": 6, "heads": 8}
ATTENTION: Row = {"kind": "attention", "ctc": False, "decoder_network": WHISPER_DECODER}
SYSTEMS: dict[str, tuple[Row, Row, Row]] = {
    "Conformer, CTC": ({}, {}, {}),
    "Conformer, transducer": (
        {},
        {"kind": "transducer", "predictor": {"kind": "stateless", "dim": 320}, "joint_dim": 320},
        {},
    ),
    "encoder and decoder of Whisper base's size": (WHISPER_BASE, ATTENTION, {}),
    "the same, encoder frozen": (WHISPER_BASE, ATTENTION, {"freeze": [{"names": ["encoder.*"], "until": 0}]}),
}
"""Rows of `systems`: changes of the network, the system, and of `train`."""


def systems(place: Place) -> None:
    """What a second of GPU trains and encodes, by kind of recognizer: networks of random weights on real speech."""
    for name in SYSTEMS:
        seconds = 200.0 if place.gpu else 8.0
        with place.guarded(f"systems, {name}"), tempfile.TemporaryDirectory() as folder:
            way = f"{name}, batches of {seconds:.0f} s"
            job = _system_job(place, name, Path(folder), batch_seconds=seconds)
            row = _conformer(place, job, seconds, way, loaders=())
            encoded = _encoded(place, job, Path(folder))
            place.result(what="systems", way=way, **row, encoded_audio_per_s=encoded)


def _system_job(place: Place, name: str, folder: Path, **train: Any) -> Any:
    """The packed job of `libri` with another system."""
    model, system, fields = SYSTEMS[name]
    job = packed_job(place, "libri", folder, **train, **fields)
    document = job.model_dump(mode="json")
    if model:
        document["task"]["spec"] |= {"model": model, "features": {"kind": "whisper_logmel"}, "stats": None}
    if system:
        document["task"]["spec"]["system"] = system
        document["task"] |= {"kind": system["kind"], "objective": system["kind"]}
        del document["task"]["alignments_url"]
    return type(job).model_validate(document)


def _encoded(place: Place, job: Any, folder: Path) -> float:
    """Seconds of audio that `Recognizer.encode` reads per second, in batches as decoding makes them."""
    import numpy as np

    from recognition.bundle import save_bundle
    from recognition.inference import encode_set, open_set
    from recognition.recognizer import Recognizer

    spec = job.task.spec
    save_bundle(folder / "bundle", spec, dict(spec.build_model().state_dict()))
    recognizer = Recognizer.load(folder / "bundle", device=place.device)
    data = open_set(job.task.valid_url, spec.sample_rate, folder / "cache")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in encode_set(recognizer, data, np.arange(len(data.durations))):
            pass
        place.wait()
        times.append(time.perf_counter() - began)
    return float(data.durations.sum()) / min(times)


def fed(place: Place) -> None:
    """The Conformer on batches of 64 s, with CUDA graphs, fed by loader threads and by loader processes."""
    import torch

    from storage.batching import plan_epoch
    from training.learner.compute import Learner, open_loader, open_set
    from training.learner.prefetch import Loader, LoaderProcesses

    with tempfile.TemporaryDirectory() as folder:
        fields = {"batch_seconds": 64.0, "cuda_graphs": place.gpu}
        job = packed_job(place, "libri" if place.gpu else "fsdd", Path(folder), **fields)
        device = torch.device("cuda", 0) if place.gpu else torch.device("cpu")
        learner, dataset = Learner(job, device), open_set(job, "train")
        load = Loader(dataset, learner.task, device)
        planned = plan_epoch(dataset.durations, batch_seconds=64.0, max_batch=64, seed=1, epoch=3)
        _fed(place, learner, load, planned, 4)  # shapes are recorded when they come for the first time
        for count in (1, 4, 12) if place.gpu else (1,):
            with place.guarded(f"Conformer fed by {count}"):
                row = {"threads": _fed(place, learner, load, planned, count)}
                opened, began = functools.partial(open_loader, job, torch.get_num_threads(), 0), time.monotonic()
                processes = LoaderProcesses(load, opened, count)
                try:
                    while len(processes.waiting) < count and time.monotonic() - began < LOADERS_START_S:
                        time.sleep(0.05)
                    row |= {"started": len(processes.waiting), "started_s": time.monotonic() - began}
                    row["processes"] = _fed(place, learner, processes, planned, count)
                finally:
                    processes.close()
                place.result(what="Conformer fed, batches of 64 s: audio/s", count=count, **row)


def _fed(place: Place, learner: Any, load: Any, planned: list[Any], threads: int) -> float:
    """Seconds of audio per second that are trained while loader threads read, or wait for processes."""
    from training.learner.prefetch import Prefetcher

    fetch, heard, at = Prefetcher(load, threads), 0.0, 0
    began = time.perf_counter()
    while time.perf_counter() - began < (3.0 if place.gpu else 0.2):
        ahead = [(planned[(at + k) % len(planned)], 3) for k in range(4 + threads)]
        fetch.hint(ahead)
        batch = fetch.take(*ahead[0])
        at += 1
        learner.gradient(batch, at)
        learner.scale_gradient(1000.0, learner.norm)
        learner.update(1e-4)
        heard += batch.seconds if batch else 0.0
    place.wait()
    fetch.close()
    return heard / (time.perf_counter() - began)


def exchange(place: Place, learners: int, *ways: tuple[str, int]) -> None:
    """The published model's exchange between learners on one GPU, by kind of exchange and number of daemons."""
    from benchmarks.published_model import Options, measure

    small = {} if place.gpu else {"layers": 2, "cells": 32, "outputs": 100, "batch": 4}
    for kind, daemons in ways:
        if kind == "cuda" and not place.gpu:
            continue
        with place.guarded(f"exchange of {learners} learners, {kind}"):
            seconds, precision = (4.0, "bf16") if place.gpu else (0.3, "fp32")
            options = {"learners": learners, "seconds": seconds, "precision": precision, "device": place.device}
            options |= {"exchange": kind, "daemons": daemons, "graphs": place.gpu}
            place.result(what="exchange", **measure(Options(**options, **small)))


class Load(threading.Thread):
    """Samples the GPU's load twice a second until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[Row] = []
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample."""
        from devices.gpus import Gpus

        gpus = Gpus()
        while not self._ended.wait(0.5):
            with suppress(Exception):
                self.seen += gpus.sample()[:1]

    def mean(self) -> Row:
        """Stop; returns the mean of each figure."""
        self._ended.set()
        names = {name for figures in self.seen for name in figures}
        return {
            f"gpu_{name}": statistics.mean(figures[name] for figures in self.seen if name in figures) for name in names
        }


def training(place: Place, name: str, nodes: int, limit_s: float, **fields: Any) -> None:
    """A whole training through the real engine, to its WER, or to its time limit."""
    from training.launch.training_process import run_training

    if nodes > 1:
        fields = {"strategy": "adpsgd", "nodes": nodes} | fields
    if not place.gpu:
        fields |= {"max_minutes": 0.2, "cuda_graphs": False}
    learners = f"{nodes} x {per_node}" if (per_node := fields.get("learners_per_node", 1)) > 1 else nodes
    folder = Path(tempfile.mkdtemp())
    with place.guarded(f"training on {name}, {learners} learners"):
        load, began = Load(), time.perf_counter()

        def in_time() -> None:
            if time.perf_counter() - began > limit_s:
                raise TimeoutError

        try:
            with suppress(TimeoutError):  # the steps until then are measured all the same
                run_training(packed_job(place, name, folder, **fields), folder, in_time, 0.2)
        finally:
            for path in sorted(folder.rglob("*.log")):
                print(f"--- {path.relative_to(folder)}")
                print("\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        wall = time.perf_counter() - began
        place.result(what="training", set=name, learners=learners, wall_s=wall, **_trained(folder), **load.mean())
    shutil.rmtree(folder, ignore_errors=True)


def _trained(folder: Path) -> Row:
    """What a training's record and journal say."""
    from training.coordinator.journal import read_journal

    record = folder / "output/result.json"
    done = json.loads(record.read_text()) if record.exists() else {"valid": {}, "history": []}
    steps = [entry for entry in read_journal(folder / "journal.jsonl") if entry["kind"] == "step"]
    rate = 0.0
    for learner in {entry["learner"] for entry in steps}:  # the second half of each learner's steps
        own = [entry for entry in steps if entry["learner"] == learner]
        first, last = own[len(own) // 2], own[-1]
        rate += (last["audio_seconds"] - first["audio_seconds"]) / max(1e-9, last["elapsed"] - first["elapsed"])
    names = ("step_s", "exchanges_per_step", "staleness", "exchange_s", "averaging_s")
    figures = {name: [entry[name] for entry in steps if name in entry] for name in names}
    row = {"finished": record.exists(), "epochs": len(done["history"]), "steps": len(steps), "audio_per_s": rate}
    row |= {name: done["valid"].get(name) for name in ("wer", "loss")}
    row |= {name: done.get(name) for name in ("device", "precision")}
    return row | {name: statistics.median(values) for name, values in figures.items() if values}


def feeding(place: Place) -> None:
    """The loader alone, by threads and by processes, while the main thread launches operations."""
    from benchmarks.feeding import Options, measure

    url, seconds = str(place.pack.resolve() / "libri/train"), 3.0 if place.gpu else 0.3
    for count in (1, 4, 8) if place.gpu else (1,):
        for loaders in ({"threads": count}, {"processes": count}):
            with place.guarded(f"feeding by {loaders}"):
                place.result(what="feeding", **measure(Options(url, busy=True, seconds=seconds, **loaders), 1, 300.0))


MINUTES: Row = {"max_minutes": 0.35, "epochs": 1000, "average": 1}
MINUTES |= {"schedule": {"kind": "cosine", "warmup_epochs": 8}, "cuda_graphs": True}

STEPS: dict[str, tuple[float, bool, Callable[[Place], None]]] = {
    "probe": (40, False, probe),
    "tests": (150, False, tests),
    "published": (80, False, published),
    "exchange2": (70, False, lambda place: exchange(place, 2, ("zmq", 1), ("cuda", 1))),
    "conformer": (90, True, conformer),
    "systems": (130, True, systems),
    "fed": (75, True, fed),
    "libri": (55, True, lambda place: training(place, "libri", 1, 40, batch_seconds=64.0, **MINUTES)),
    "libri2": (55, True, lambda place: training(place, "libri", 2, 40, batch_seconds=64.0, **MINUTES)),
    "fsdd": (70, True, lambda place: training(place, "fsdd", 1, 60, cuda_graphs=True)),
    "fsdd4": (120, True, lambda place: training(place, "fsdd", 4, 110, cuda_graphs=True)),
    "fsdd2x2": (130, True, lambda place: training(place, "fsdd", 2, 120, strategy="h-adpsgd", learners_per_node=2)),
    "exchange4": (70, False, lambda place: exchange(place, 4, ("zmq", 3), ("cuda", 1))),
    "flat_bf16": (60, True, lambda place: conformer(place, flat=True)),
    "feeding": (75, True, feeding),
    "compiled": (90, True, lambda place: conformer(place, compiled=True)),
}
"""By name, in order of value: time limit in seconds, whether it needs the pack, and what it does."""


# --- the run


def run(place: Place, names: list[str], total_s: float) -> None:
    """Run steps, each in a process of its own, and write the report."""
    place.output.mkdir(parents=True, exist_ok=True)
    (place.output / "results.jsonl").unlink(missing_ok=True)
    began, said = time.monotonic(), []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (place.output / "run.log").open("ab") as log:
        for name in names or STEPS:
            limit_s, needs_pack, _ = STEPS[name]
            left_s = total_s - (time.monotonic() - began)
            if needs_pack and not (place.pack / "libri.json").exists():
                said.append(f"{name}: not run, no speech in {place.pack} (python -m benchmarks.gpu pack)")
            elif left_s < 15:
                said.append(f"{name}: not run, no time left of {total_s:.0f} s")
            else:
                said.append(_run_step(place, name, min(limit_s, left_s), environment, log))
            print(said[-1], flush=True)
    (place.output / "report.md").write_text(report(place.output, said))
    print((place.output / "report.md").read_text())


def _run_step(place: Place, name: str, limit_s: float, environment: dict[str, str], log: Any) -> str:
    command = [sys.executable, "-m", "benchmarks.gpu", "step", name, "--device", place.device]
    command += ["--pack", str(place.pack), "--output", str(place.output)]
    began = time.monotonic()
    log.write(f"=== {name} (at most {limit_s:.0f} s)\n".encode())
    log.flush()
    # a session of its own, so that a step's processes end with it
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        status: object = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = "its time limit"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        child.wait(10)
    return f"{name}: ended by {status}" if isinstance(status, str) else _ended(name, status, began)


def _ended(name: str, status: object, began: float) -> str:
    return f"{name}: status {status} after {time.monotonic() - began:.0f} s"


def report(output: Path, said: list[str]) -> str:
    """The results as Markdown: a table of the figures of each kind."""
    results = output / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    lines = [f"### Commit {_commit()}", ""]
    for what in dict.fromkeys(row["what"] for row in rows):
        own = [{name: value for name, value in row.items() if name != "what"} for row in rows if row["what"] == what]
        names = list(dict.fromkeys(name for row in own for name in row))
        lines += [f"{what}:", "", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in own]
        lines.append("")
    return "\n".join([*lines, "Steps:", "", *(f"- {line}" for line in said), ""])


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return "unknown"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="shards, jobs and wheels for a machine with a GPU")
    packing.add_argument("--speech", type=Path, required=True, help="folder with fsdd/ and LibriSpeech/")
    packing.add_argument("--output", type=Path, default=Path("gpu-pack"))
    packing.add_argument("--libri-mb", type=float, default=16.0)
    packing.add_argument("--python", default="", help="also download wheels for this version of Python, such as 3.12")
    for name in ("run", "step"):
        command = commands.add_parser(name)
        command.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
        command.add_argument("--pack", type=Path, default=Path("gpu-pack"))
        command.add_argument("--output", type=Path, default=Path("gpu-report"))
        if name == "run":
            command.add_argument("--total", type=float, default=560.0, help="seconds")
            command.add_argument("--steps", nargs="+", default=[], choices=list(STEPS), metavar="NAME")
        else:
            command.add_argument("name", choices=list(STEPS))
    args = parser.parse_args(argv)
    if args.command == "pack":
        pack(args.speech, args.output, args.libri_mb, args.python)
        return
    place = Place(args.device, args.pack, args.output)
    if args.command == "run":
        run(place, args.steps, args.total)
    else:
        STEPS[args.name][2](place)


if __name__ == "__main__":
    main()
