"""A tiny spoken language for the training tests: its words are six tones, and its corpus is a few seconds long.

There are two ways to train on it: `train`, with all processes, and `train_here`, the same parts in this process.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import made_once

from recognition.bundle import BundleSpec
from recognition.system import SystemConfig
from speech.audio import decode_audio, encode_flac
from speech.features import CmvnStats, LogMelConfig, build_features
from speech.models import MODELS, ModelConfig
from speech.tokens import TokenConfig, train_tokenizer
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from tasks.config.training import AcousticTrainConfig
from tasks.engine import know_tasks
from training.coordinator.client import CoordinatorClient
from training.coordinator.core import Settings
from training.coordinator.journal import read_journal
from training.coordinator.messages import Reply, Request, StopRequest
from training.coordinator.node_client import NodeClient
from training.coordinator.server import NOTE, CoordinatorServer
from training.coordinator.worklist import Assignment
from training.job import TrainJob
from training.launch.training_process import run_training
from training.learner.compute import Learner, use_threads
from training.node.evaluator import Evaluator
from training.node.evaluator import run as evaluate
from training.node.process_group import NodeGroup
from training.node.worker import Worker
from training.processes.sockets import read_address

know_tasks()

WORDS = ("ba", "ce", "di", "fu", "gu", "ly")
RATE = 8000
FEATURES = LogMelConfig(num_mels=16)
TINY = {kind: config.model_validate({**config.tiny, "dropout": 0.1}) for kind, config in MODELS.items()}


def speak(words: list[str], rng: np.random.Generator) -> torch.Tensor:
    """Each word 0.12 s of its tone with an overtone, between pauses; a little noise below all."""
    pieces = [np.zeros(RATE // 20)]
    for word in words:
        time = np.arange(int(rng.uniform(0.10, 0.14) * RATE)) / RATE
        tone = 2 * np.pi * 300 * 1.45 ** WORDS.index(word) * time
        pieces += [rng.uniform(0.2, 0.4) * (np.sin(tone) + 0.3 * np.sin(2 * tone)), np.zeros(RATE // 25)]
    wave = np.concatenate(pieces)
    return torch.from_numpy(wave + rng.normal(0, 0.003, len(wave))).float()


def language_of(words: list[str]) -> str:
    """Of an utterance, which its first word tells."""
    return "de-CH" if WORDS.index(words[0]) < len(WORDS) // 2 else "en"


def make_sample(number: int, words: list[str], rng: np.random.Generator, prefix: str) -> Sample:
    wave = speak(words, rng)
    row = {
        "duration": len(wave) / RATE,
        "num_frames": len(wave),
        "sample_rate": RATE,
        "text": " ".join(words),
        "speaker": f"speaker{number % 3}",
        "domain": "tones",
        "language": language_of(words),
    }
    return Sample(f"{prefix}{number:03d}", {"flac": encode_flac(wave, RATE)}, row)


def write_set(url: str, samples: list[Sample], payload: str = "flac", per_shard: int = 10) -> ShardIndex:
    """Shards and index of a set."""
    store = ObjectStore(url)
    chunks = [samples[start : start + per_shard] for start in range(0, len(samples), per_shard)]
    parts = [write_shard(store, f"{number:06d}.tar", chunk, payload) for number, chunk in enumerate(chunks)]
    index = build_index(parts, {})
    index.write(store)
    return index


def speak_set(url: str, count: int, seed: int, prefix: str) -> list[Sample]:
    """Write `count` utterances of one to three words."""
    rng = np.random.default_rng(seed)
    texts = [[WORDS[int(k)] for k in rng.integers(0, len(WORDS), int(rng.integers(1, 4)))] for _ in range(count)]
    samples = [make_sample(number, words, rng, prefix) for number, words in enumerate(texts)]
    write_set(url, samples)
    return samples


@dataclass(frozen=True)
class Corpus:
    """A training and a validation set on disk, and jobs over them."""

    folder: Path
    train: list[Sample]
    valid: list[Sample]
    stats: CmvnStats

    def url(self, name: str) -> str:
        return str(self.folder / name)

    def spec(self, kind: str = "blstm", **changes: object) -> BundleSpec:
        tokenizer = train_tokenizer(TokenConfig(kind="words"), [row.row["text"] for row in self.train])
        if isinstance(system := changes.get("system"), SystemConfig) and system.tells_languages:
            tokenizer = tokenizer.with_languages(sorted({row.row["language"] for row in self.train}))
        values = {
            "sample_rate": RATE,
            "features": FEATURES,
            "stats": self.stats.to_dict(),
            "tokenizer": tokenizer.to_dict(),
            "model": TINY[kind],
        }
        return BundleSpec(**(values | changes))

    def job(self, folder: Path, kind: str = "blstm", spec: BundleSpec | None = None, **changes: object) -> TrainJob:
        """A job that leaves its output and journal below `folder`; `changes` go to the job or to its `train` part."""
        train = {
            "epochs": 2,
            "batch_seconds": 6.0,
            "max_batch": 12,
            "threads": 1,
            "device": "cpu",
            "checkpoint_steps": 3,
            "log_steps": 1,
            "membership": {"beat_s": 0.05},
            "optimizer": {"lr": 5e-3},
            "augment": {"time_masks": 1, "time_mask_frames": 3, "freq_masks": 1, "freq_mask_bins": 2},
        }
        parts = AcousticTrainConfig.model_fields.keys() - {"seed"}  # which the stage train passes on to the job
        train.update({name: value for name, value in changes.items() if name in parts})
        recipe = AcousticTrainConfig.model_validate(train)
        spec = spec or self.spec(kind)
        config = spec.system.task_config
        task: dict[str, object] = {
            "spec": spec,
            "objective": recipe.objective,
            "augment": recipe.augment,
            "train_url": self.url("train"),
            "valid_url": self.url("valid"),
        }
        rest = {name: value for name, value in changes.items() if name not in parts}
        task.update({name: rest.pop(name) for name in rest.keys() & config.model_fields.keys()})
        values: dict[str, object] = {
            "run": "run-1",
            "seed": 7,
            "train": recipe.engine_part(),
            "task": config.model_validate(task),
            "output_url": str(folder / "output"),
            "journal": folder / "journal.jsonl",
            "cache": folder / "cache",
        }
        values.update(rest)
        assert values.keys() <= TrainJob.model_fields.keys()
        return TrainJob.model_validate(values)


def with_task(job: TrainJob, **changes: object) -> TrainJob:
    """A job whose task has some other fields."""
    return job.model_copy(update={"task": job.task.model_copy(update=changes)})


def make_corpus(folder: Path) -> Corpus:
    """48 training and 12 validation utterances, half a second each."""
    train = speak_set(str(folder / "train"), 48, 1, "t")
    valid = speak_set(str(folder / "valid"), 12, 2, "v")
    extract, stats = build_features(FEATURES, RATE), CmvnStats(FEATURES.num_mels)
    for sample in train:
        wave, _ = decode_audio(sample.members["flac"])
        stats.add(*extract(wave[None], torch.tensor([len(wave)])))
    return Corpus(folder, train, valid, stats)


LEARNS = {
    "augment": {"enabled": False},
    "max_batch": 4,
    "checkpoint_steps": 1000,
    "schedule": {"kind": "cosine", "warmup_epochs": 0.5},
}
"""Settings with which a tiny model learns the six words in seconds."""


def bare(kind: str) -> ModelConfig:
    """The tiny model without dropout, at 25 output frames a second if there are such models of its kind."""
    factor = min(4, max(TINY[kind].subsamplings))
    return TINY[kind].model_copy(update={"subsampling": factor, "dropout": 0.0})


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    job: TrainJob
    result: dict[str, Any]
    worker: Worker | None = None
    """Of a training in this process."""

    @property
    def bundle(self) -> Path:
        return Path(self.job.output_url) / "model"

    @property
    def model_bytes(self) -> bytes:
        return (self.bundle / "model.safetensors").read_bytes()

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """The journal's entries of a kind."""
        return [entry for entry in read_journal(self.job.journal) if entry["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [entry["loss"] for entry in self.entries("step")]


def train(job: TrainJob, on_poll: Callable[[], None] | None = None) -> Trained:
    """Train a job as users do, with all its processes."""
    run_training(job, job.journal.parent, on_poll, poll_s=0.05)
    return Trained(job, ObjectStore(job.output_url).read_json("result.json"))


@contextmanager
def serve_coordinator(job: TrainJob) -> Iterator[str]:
    """Serve a job's coordinator in a thread; yields its address."""
    folder = job.journal.parent / "store"
    folder.mkdir(parents=True, exist_ok=True)
    begun: Future[CoordinatorServer] = Future()

    def work() -> None:
        # SQLite wants its database used by the thread that opened it
        try:
            server = CoordinatorServer(
                Settings.from_job(job.model_dump(mode="json")), folder, "tcp://127.0.0.1:0", None, fresh=True
            )
        except Exception as error:
            begun.set_exception(error)
            return
        begun.set_result(server)
        server.run()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    server = begun.result(240)
    try:
        yield str(read_address(folder / NOTE))
    finally:
        server.stop()
        thread.join(240)


class StopsAt(NodeClient):
    """Asks training to stop after a given step, and leases nothing for later ones."""

    stop_at = 0
    _asked = False

    def next(self) -> Assignment | None:
        if not self.stop_at or self.step < self.stop_at:
            return super().next()
        if not self._asked:
            self._asked = True
            ask_coordinator(self._client.address, StopRequest())
        return None


def ask_coordinator(address: str, request: Request[Reply]) -> Reply:
    """Ask a coordinator that needs no key."""
    client = CoordinatorClient(address, None)
    try:
        return client.request(request, patience_s=240)
    finally:
        client.close()


def train_here(job: TrainJob, stop_at: int = 0) -> Trained:
    """Train with one node, the same parts as `train` starts, in threads of this process.

    Args:
        job: What to train.
        stop_at: The step after which training is asked to stop; there is no result then.
    """
    use_threads(job.train.threads)
    cpu, folder = torch.device("cpu"), job.journal.parent / "node-000"
    folder.mkdir(parents=True, exist_ok=True)
    with serve_coordinator(job) as address:
        client = StopsAt(address, None, 0, folder=folder)
        client.stop_at = stop_at
        worker = Worker(job, 0, Learner(job, cpu), NodeGroup(0, 1, folder / "meet", cpu), None, client)
        try:
            why = worker.run()
        finally:
            client.close()
        if stop_at:
            assert why in ("stop", "done"), why
            return Trained(job, {}, worker)
        evaluate(Evaluator(job), partial(ask_coordinator, address))
    return Trained(job, ObjectStore(job.output_url).read_json("result.json"), worker)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="session")
def trained(corpus: Corpus) -> Trained:
    """A Conformer that knows the six words; one test process trains it for all."""
    spec = corpus.spec("conformer", model=bare("conformer"))
    with made_once("trained-on-tones") as folder:
        job = corpus.job(folder, spec=spec, epochs=10, average=2, optimizer={"lr": 1e-2}, **LEARNS)
        if not ObjectStore(job.output_url).exists("result.json"):
            train_here(job)
        return Trained(job, ObjectStore(job.output_url).read_json("result.json"))
