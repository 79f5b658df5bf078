"""The workload of the fault battery: a corpus of spoken digits, and variants of a pipeline that trains in a minute.

The corpus is created once, outside the data folders: every run computes its own shards, statistics and model from the
same recordings. Test and training sets have different voices.
"""

import csv
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from speech.synthesis import Engine, Voice

ROOT = Path(__file__).resolve().parents[1]
NAME = "faults"
EPOCHS = 14
TRAIN_UTTERANCES = 240
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SETS = {
    "train": (TRAIN_UTTERANCES, ("f1", "f2", "f3", "m1", "m2", "m3", "m5", "m6", "Alex", "Andy", "anika", "linda")),
    "valid": (24, ("f5", "m4")),
    "test": (90, ("f4", "m7")),
}


@dataclass(frozen=True)
class Variant:
    """A variant of the pipeline."""

    name: str
    strategy: str
    learners_per_node: int = 1
    runner: str = "threads"
    plain: bool = False

    def document(self, corpus: Path, seed: int, epochs: int = EPOCHS) -> dict[str, Any]:
        """The configuration as a dictionary, like one parsed from YAML.

        Args:
            corpus: Table of the corpus.
            seed: Seed of initialization and batches.
            epochs: Number of training epochs.
        """
        return {
            "name": NAME,
            "seed": seed,
            "data": {"sources": [{"kind": "table", "path": str(corpus)}], "sample_rate": 8000},
            "storage": {"shard_seconds": 40, "workers": 2},
            "runner": {"kind": self.runner, "workers": 2},
            "features": {"num_mels": 32, "cmvn": "utterance"},
            "model": {
                **{"kind": "conformer", "dim": 48, "layers": 2, "heads": 4},
                **{"channels": 8, "subsampling": 4, "dropout": 0.0},
            },
            "train": {
                "strategy": self.strategy,
                "nodes": 2,
                "learners_per_node": self.learners_per_node,
                "epochs": epochs,
                "batch_seconds": 8 * self.learners_per_node,
                "device": "cpu",
                "threads": 1,
                "checkpoint_steps": 20,
                "average": 3,
                # each fault may end a node's processes; the limit of restarts is not tested here
                "membership": {"max_restarts": 20},
                "optimizer": {"kind": "adamw", "lr": 0.006},
                "schedule": {"kind": "cosine", "warmup_epochs": 0.5},
            },
            "decode": {"kind": "greedy"},
            "register": {"accept_untrained": True},  # the battery tests recovery, not learning
        }


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("adpsgd", "adpsgd"),
        Variant("h-adpsgd", "h-adpsgd", learners_per_node=2),
        Variant("asgd", "asgd", runner="processes"),
        Variant("plain", "adpsgd", runner="processes", plain=True),
    )
}


def make_corpus(folder: Path) -> Path:
    """Synthesize the corpus unless it exists.

    Returns:
        The path of its table.
    """
    table = folder / "metadata.csv"
    if table.exists():
        return table
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    rng, rows = random.Random(0), []
    with Engine() as engine:
        for name, (count, voices) in _SETS.items():
            for number in range(count):
                text, speaker = " ".join(rng.choices(_DIGITS, k=3)), voices[number % len(voices)]
                wave = engine.speak(text, Voice(speaker, rate=rng.randint(185, 200)))
                path = f"audio/{name}-{number:03d}.flac"
                soundfile.write(folder / path, wave, engine.sample_rate)
                rows.append((Path(path).stem, path, text, speaker, name))
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "path", "text", "speaker", "split"))
        writer.writerows(rows)
    return table


def write_config(path: Path, document: dict[str, Any]) -> Path:
    """Write a configuration as JSON, which is valid YAML."""
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return path


def command(*words: object) -> list[str]:
    """The `starling` command with these words."""
    return [sys.executable, "-m", "flows.cli.app", *map(str, words)]


def run_command(variant: Variant, config: Path) -> list[str]:
    """The command that runs a variant's pipeline."""
    return command("run", config, "--json", *(["--no-prefect"] if variant.plain else []))


def environment(home: Path) -> dict[str, str]:
    """Environment of a command with a separate data folder: no external servers, logs without colours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "STARLING_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    own = {"STARLING_HOME": str(home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return clean | own
