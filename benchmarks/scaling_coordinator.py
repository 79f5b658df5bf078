"""The coordinator of a benchmark's learners: the real one, with an index of utterances without audio."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scaling_probes import write_index
from training.config import TrainConfig
from training.processes.keys import RingKey

_ROOT = Path(__file__).resolve().parents[1]


def start_coordinator(
    folder: Path, train: Mapping[str, Any], num_shards: int, per_shard: int, host: str = "127.0.0.1"
) -> "subprocess.Popen[bytes]":
    """Start a coordinator, which ends with this process; its key is `folder/ring.key`.

    Args:
        folder: Folder for the index, the key, the job and logs.
        train: Fields of the training's configuration.
        num_shards: Number of shards in the index.
        per_shard: Utterances per shard.
        host: Address to listen on.
    """
    write_index(str(folder / "train"), num_shards, per_shard)
    # epochs and checkpoints are not measured
    cfg = TrainConfig.model_validate({"epochs": 1_000_000, "checkpoint_steps": 1_000_000, **train})
    job = {"run": "benchmark", "seed": 1, "train": cfg.model_dump(mode="json"), "journal": str(folder / "journal")}
    job |= {"task": {"train_url": str(folder / "train")}, "output_url": str(folder / "output")}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    RingKey.generate().save(folder / "ring.key")
    words = ["--folder", str(folder / "coordinator"), "--job", str(folder / "job.json"), "--listen", f"{host}:0"]
    words += ["--key-file", str(folder / "ring.key"), "--fresh", "--parent", str(os.getpid())]
    with (folder / "coordinator.log").open("ab") as log:
        command = [sys.executable, "-m", "training.coordinator.server", *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_ROOT)


def coordinator_address(folder: Path) -> str:
    """HOST:PORT of the coordinator; empty until it listens."""
    note = folder / "coordinator" / "coordinator.json"
    return str(json.loads(note.read_text(encoding="utf-8"))["address"]) if note.exists() else ""
