"""The model that a run has trained, a network or a GMM-HMM: what its registration, card and report say of it."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypedDict

from safetensors.numpy import load
from typing_extensions import override

from recognition.bundle import WEIGHTS
from storage.intact import readable
from tasks.dataset.splits import TRAIN as TRAINING_SET
from tasks.stages.align import ALIGN, aligned_sets, config_of
from tasks.stages.base import Run, StageResult
from tasks.stages.train import TRAIN, forward_note, training_run
from tasks.tracking.datasets import set_inputs
from tasks.tracking.forwarding import send_rest
from tasks.tracking.provenance import run_tags
from tasks.tracking.runs import TrainingRun, client, open_training_run


class TrainingFigures(TypedDict):
    """What a model card and a report say of a training."""

    objective: str
    """What was optimized."""
    strategy: str
    nodes: int
    learners_per_node: int
    epoch: int
    """Passes over the training set."""
    step: int
    parameters: int
    utterances: int
    elapsed: float
    """Seconds."""
    device: str | None
    precision: str | None


class TrainedModel(ABC):
    """The model of a run.

    Args:
        run: The run, after the stage that trains it.

    Attributes:
        result: Result of that stage, whose output has the weights in `model/model.safetensors`.
        history: File of the same output with the figures of the training.
    """

    result: StageResult
    history: str

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    @abstractmethod
    def digest(self) -> str:
        """The same for equal models."""

    @property
    @abstractmethod
    def training(self) -> str:
        """Identity of the training; empty if it has none."""

    @property
    @abstractmethod
    def sets(self) -> list[str]:
        """The sets that the training has read."""

    @abstractmethod
    def figures(self) -> TrainingFigures:
        """Figures of the training."""

    @abstractmethod
    def parts(self) -> dict[str, dict[str, Any]]:
        """What a card says of the model's `features`, `tokens` and `model`."""

    @abstractmethod
    def training_run(self, training: str) -> TrainingRun:
        """Description of the training for its MLflow run.

        Args:
            training: Identity of the training.
        """

    @abstractmethod
    def send(self, history: Path, about: TrainingRun) -> str:
        """Send figures that MLflow lacks to the training's run, which is created if missing; returns the run's id.

        Args:
            history: A copy of the file `history`.
            about: Description of the run.
        """

    @abstractmethod
    def curves(self) -> bytes:
        """A plot of the training, PNG."""

    @property
    def weights_bytes(self) -> int:
        """Size of the file with the weights."""
        return self.result.store.size(f"model/{WEIGHTS}")


class _Network(TrainedModel):
    """A network, which the stage `train` has trained."""

    history = "journal.jsonl"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.result, self._record = run.result("train"), TRAIN.record(run)

    @property
    @override
    def digest(self) -> str:
        return self._record["digest"]

    @property
    @override
    def training(self) -> str:
        return str(self._record.get("tracking", {}).get("training", ""))

    @property
    @override
    def sets(self) -> list[str]:
        return ["train", "valid"]

    @override
    def figures(self) -> TrainingFigures:
        config, result = self.run.config, self._record["result"]
        return {
            "objective": config.train.objective.kind if config.system.objectives else config.system.kind,
            "strategy": config.train.strategy.kind,
            "nodes": config.train.nodes,
            "learners_per_node": config.train.learners_per_node,
            "epoch": result["epoch"],
            "step": result["step"],
            "parameters": result["parameters"],
            "utterances": result["utterances"],
            "elapsed": result["elapsed"],
            "device": result.get("device"),
            "precision": result.get("precision"),
        }

    @override
    def parts(self) -> dict[str, dict[str, Any]]:
        config = self.run.config
        parts = {"features": config.features, "tokens": config.tokens, "model": config.model}
        return {name: part.model_dump(mode="json") for name, part in parts.items()}

    @override
    def training_run(self, training: str) -> TrainingRun:
        return training_run(self.run, training)

    @override
    def send(self, history: Path, about: TrainingRun) -> str:
        return send_rest(history, forward_note(self.result.key, about.training), about)

    @override
    def curves(self) -> bytes:
        from tasks.tracking.plots import curves_png, stored_journal  # imports matplotlib

        return curves_png(stored_journal(self.result.output))


class _Gmm(TrainedModel):
    """A GMM-HMM, which the stage `align` has trained: its iterations are passes over the whole training set."""

    history = "iterations.jsonl"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.result, self._record = run.result("align"), ALIGN.record(run)

    @property
    @override
    def digest(self) -> str:
        return self.result.key

    @property
    @override
    def training(self) -> str:
        return self.result.key

    @property
    @override
    def sets(self) -> list[str]:
        return aligned_sets(self.run)

    @override
    def figures(self) -> TrainingFigures:
        rows, name = self._iterations(), f"model/{WEIGHTS}"
        content = self.result.output.read(name)
        with readable(self.result.store.join(name)):
            parameters = sum(values.size for values in load(content).values())
        return {
            "objective": "maximum likelihood",
            "strategy": "Viterbi training",
            "nodes": 1,
            "learners_per_node": 1,
            "epoch": len(rows),
            "step": len(rows),
            "parameters": parameters,
            "utterances": self._record["sets"][TRAINING_SET]["aligned"] * len(rows),
            "elapsed": sum(float(row["seconds"]) for row in rows),
            "device": config_of(self.run).device,
            "precision": None,
        }

    def _iterations(self) -> list[dict[str, Any]]:
        """Figures of each iteration, in order."""
        text = self.result.output.read(self.history)
        with readable(self.result.store.join(self.history)):
            return [json.loads(line) for line in text.splitlines()]

    @override
    def parts(self) -> dict[str, dict[str, Any]]:
        sizes = {name: self._record["counts"][name] for name in ("states", "gaussians")}
        return {
            "features": config_of(self.run).features.model_dump(mode="json"),
            "tokens": {"kind": "phones"},
            "model": {"kind": self.run.config.system.kind, **sizes},
        }

    @override
    def training_run(self, training: str) -> TrainingRun:
        run = self.run
        return TrainingRun(training, run.config.name, run.run_id, run_tags(run), inputs=set_inputs(run, self.sets))

    @override
    def send(self, history: Path, about: TrainingRun) -> str:
        return str(open_training_run(client(), about).info.run_id)

    @override
    def curves(self) -> bytes:
        from tasks.tracking.plots import likelihood_png  # imports matplotlib

        return likelihood_png(self._iterations())


def trained_model(run: Run) -> TrainedModel:
    """The model that a run has trained."""
    return _Network(run) if run.config.system.is_trained else _Gmm(run)
