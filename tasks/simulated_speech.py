"""Simulates training a real acoustic model on real speech: features in memory, gradients of many replicas at once."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recognition.bundle import BundleSpec
from recognition.data.dataset import Batch, SpeechDataset
from recognition.systems.acoustic import AcousticTaskConfig
from recognition.validation import Validation
from speech.models.networks.base import AcousticModel
from speech.models.networks.stages import border_bytes, split_model
from speech.objectives import build_objective
from speech.objectives.base import NO_STATE
from storage.batching import derive_seed
from training.job import TrainJob
from training.learner.compute import open_set
from training.learner.flat import FlatParameters
from training.learner.schedule import learning_rate
from training.learner.task import SetName
from training.simulation.model import ModelReplica, Stack, one_by_one
from training.simulation.problem import Activations, Job
from training.strategies.base import StrategyError

_LOAD = 64
"""Utterances per batch of the front end, and of validation."""
_TOGETHER = 256
"""Maximum number of utterances computed at once, over all replicas: more save no time and need memory."""


def _open(job: TrainJob, name: SetName) -> SpeechDataset:
    dataset = open_set(job, name)
    assert isinstance(dataset, SpeechDataset)
    return dataset


class Utterances:
    """A set's features, targets and texts in memory; features and targets are padded tensors. Batches hold features.

    Attributes:
        frames: Frames of each utterance.
        seconds: Median duration of an utterance.
    """

    def __init__(self, dataset: SpeechDataset, spec: BundleSpec, job: TrainJob) -> None:
        objective = build_objective(job.task.objective)
        frontend = spec.build_frontend(job.task.speaker_stats())
        self.seconds = float(np.median(dataset.durations))
        parts: list[Batch] = []
        for start in range(0, len(dataset), _LOAD):
            batch = dataset.batch(np.arange(start, min(start + _LOAD, len(dataset))))
            if not batch.ids:
                continue
            with torch.no_grad():
                batch.inputs, batch.lengths = frontend(batch.inputs, batch.lengths, batch.speakers)
            parts.append(batch)
        self._ids = [identity for part in parts for identity in part.ids]
        self._speakers = [speaker for part in parts for speaker in part.speakers]
        self._texts = [text for part in parts for text in part.texts]
        self._languages = [language for part in parts for language in part.languages]
        self._inputs = _padded([part.inputs for part in parts])
        self._lengths = torch.cat([part.lengths for part in parts])
        self._tokens = _padded([part.tokens for part in parts])
        self._counts = torch.cat([part.token_lengths for part in parts])
        self._states = _padded([part.states for part in parts], NO_STATE)
        self._state_counts = torch.cat([part.state_lengths for part in parts])
        self._factor = parts[0].frame_factor
        singles = (part.part(slice(k, k + 1)) for part in parts for k in range(len(part.ids)))
        self._items = torch.tensor([objective.items(single) for single in singles])
        self.frames: NDArray[np.int64] = self._lengths.numpy()

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, numbers: NDArray[np.int64]) -> Batch:
        """Some utterances, padded to the longest one."""
        rows = torch.from_numpy(numbers)
        lengths, counts = self._lengths[rows], self._counts[rows]
        return Batch(
            rows=numbers,
            ids=[self._ids[number] for number in numbers],
            speakers=[self._speakers[number] for number in numbers],
            texts=[self._texts[number] for number in numbers],
            inputs=self._inputs[:, : int(lengths.max())][rows],
            lengths=lengths,
            tokens=self._tokens[:, : int(counts.max())][rows],
            token_lengths=counts,
            seconds=0.0,
            states=self._states[rows] if len(self._states) else self._states,
            state_lengths=self._state_counts[rows] if len(self._states) else self._state_counts,
            frame_factor=self._factor,
            languages=[self._languages[number] for number in numbers] if self._languages else [],
        )

    def tokens(self, numbers: NDArray[np.int64]) -> float:
        """What the objective divides the loss of some utterances by, tokens or frames; at least 1."""
        return max(1.0, float(self._items[torch.from_numpy(numbers)].sum()))


def _padded(parts: list[Tensor], value: float = 0) -> Tensor:
    """Concatenate tensors [rows, size, ...], padded with a value to the largest size."""
    size = max(part.shape[1] for part in parts)
    out = torch.full((sum(map(len, parts)), size, *parts[0].shape[2:]), value, dtype=parts[0].dtype)
    start = 0
    for part in parts:
        out[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return out


class Speech:
    """A training job as a problem: its model, optimizer, schedule and data, without dropout and augmentation.

    Args:
        job: Job of a training, as the pipeline builds it.
        learners: Number of learners that share the job's batch.
        epochs: Passes over the data; 0 uses the job's.
        together: Replicas whose gradients are computed at once; 0 chooses by the kind of model.
        like: Another problem with the same data and features, whose memory is shared.
    """

    def __init__(
        self, job: TrainJob, learners: int, epochs: int = 0, together: int = 0, like: "Speech | None" = None
    ) -> None:
        self._cfg, self._seed = job.train, job.seed
        task = job.task
        if not isinstance(task, AcousticTaskConfig):
            raise ValueError(
                f"simulations compute gradients of acoustic models, not of a recognizer of kind {task.kind}: set "
                "train.objective to ctc"
            )
        spec = task.spec.model_copy(update={"model": task.spec.network.model_copy(update={"dropout": 0.0})})
        self._spec, self.epochs = spec, epochs or job.train.epochs
        if like is None:
            self._train = Utterances(_open(job, "train"), spec, job)
            self._valid = Utterances(_open(job, "valid"), spec, job)
        else:
            self._train, self._valid = like._train, like._valid
        # by the median duration, although the configured bound refers to the longest utterance of a batch
        bound = min(job.train.max_batch, int(job.train.batch_seconds / self._train.seconds))
        self.batch = max(1, bound // learners)
        self.batches = -(-len(self._train) // self.batch)
        self._global = self.batch * learners
        self._model = self._build()
        self._scratch = FlatParameters(self._model)
        self._initial = self._scratch.weights.clone()
        stackable = self._model.stackable and self._scratch.weights.numel() == self._scratch.num_parameters
        self._together = (together or max(1, _TOGETHER // self.batch)) if stackable else 1
        self._stack = Stack(self._build()) if self._together > 1 else None
        self._objective = build_objective(task.objective)
        self._plans: dict[int, list[NDArray[np.int64]]] = {}

    def _build(self) -> AcousticModel:
        torch.manual_seed(derive_seed("init", self._seed))
        model = self._spec.build_model()
        assert isinstance(model, AcousticModel)
        return model

    def replica(self) -> ModelReplica:
        """A new replica with the initial weights."""
        return ModelReplica(self._build(), self._cfg.optimizer)

    def rate(self, progress: float) -> float:
        """Learning rate of the job's schedule at the middle of the step."""
        middle = progress + 0.5 / self.batches
        return learning_rate(self._cfg.schedule, self._cfg.optimizer.lr, middle, self.epochs, self._global)

    def _plan(self, epoch: int) -> list[NDArray[np.int64]]:
        """Batches of an epoch, with equally many utterances of similar lengths."""
        if epoch not in self._plans:
            rng = np.random.Generator(np.random.PCG64(derive_seed("simulated batches", self._seed, epoch)))
            order = rng.permutation(len(self._train))
            size = self.batch * self._cfg.bucket_batches
            parts = [order[start : start + size] for start in range(0, len(order), size)]
            order = np.concatenate([part[np.argsort(self._train.frames[part], kind="stable")] for part in parts])
            batches = np.array_split(order, self.batches)
            self._plans = {
                epoch - 1: self._plans.get(epoch - 1, []),
                epoch: [batches[k] for k in rng.permutation(len(batches))],
            }
        return self._plans[epoch]

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """Compute gradients of mean losses into the replicas; a batch's weight is its number of tokens."""
        batches = [self._plan(job.lease.epoch)[job.lease.number] for job in jobs]
        weights = [job.replica.weights if job.weights is None else job.weights for job in jobs]
        into = [job.replica.grads for job in jobs]
        for start in range(0, len(jobs), self._together):
            part = slice(start, start + self._together)
            if self._stack is None or len(jobs[part]) == 1:
                losses = [lambda numbers=numbers: self._loss(numbers) for numbers in batches[part]]
                one_by_one(self._scratch, weights[part], losses, into[part])
            else:
                self._together_gradients(self._stack, weights[part], batches[part], into[part])
        return [self._train.tokens(numbers) for numbers in batches]

    def _loss(self, numbers: NDArray[np.int64]) -> Tensor:
        batch = self._train.batch(numbers)
        self._model.train()
        log_probs, frames = self._model(batch.inputs, batch.lengths)
        losses, _ = self._objective.losses(log_probs, frames, batch)
        return losses.sum() / self._train.tokens(numbers)

    def _together_gradients(
        self,
        stack: Stack,
        weights: Sequence[Tensor],
        numbers: Sequence[NDArray[np.int64]],
        into: Sequence[Tensor],
    ) -> None:
        size = max(map(len, numbers))
        # shorter batches are padded with copies of their first utterance, with a weight of zero
        square = np.stack([np.concatenate([rows, np.full(size - len(rows), rows[0])]) for rows in numbers])
        shares = torch.zeros(square.shape)
        for place, rows in enumerate(numbers):
            shares[place, : len(rows)] = 1.0 / self._train.tokens(rows)
        batch = self._train.batch(square.ravel())
        inputs = batch.inputs.view(*square.shape, *batch.inputs.shape[1:])
        leaf = torch.stack(list(weights)).requires_grad_()
        log_probs, frames = stack(leaf, inputs, batch.lengths.view(square.shape))
        losses = self._objective.losses(log_probs.flatten(0, 1), frames.flatten(), batch)[0]
        (losses * shares.flatten()).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        for place, grads in enumerate(into):
            grads.copy_(leaf.grad[place])

    def activations(self, stages: int) -> Activations:
        """Hidden frames of a batch, padded to the longest utterance: the mean over the first epoch's batches.

        Raises:
            StrategyError: If the model has too few layers.
        """
        if stages == 1:
            return Activations(0.0)
        model = self._build()
        sizes = [border_bytes(model, len(rows), int(self._train.frames[rows].max())) for rows in self._plan(0)]
        try:
            split_model(model, stages)
        except ValueError as error:
            raise StrategyError(str(error)) from None
        return Activations(sum(sizes) / len(sizes), self.batch)

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """Validation loss in nats per token, and greedy WER as a fraction, or what else `Validation.figures` gives.

        Both are NaN for non-finite weights: training has diverged.
        """
        if not bool(weights.isfinite().all()):
            return {"loss": float("nan"), "wer": float("nan")}
        self._scratch.load(weights)
        self._model.eval()
        validation = Validation(self._objective, None if self._spec.states else self._spec.build_tokenizer())
        order = np.argsort(self._valid.frames, kind="stable")
        for start in range(0, len(order), _LOAD):
            batch = self._valid.batch(order[start : start + _LOAD])
            validation.add(batch, *self._model(batch.inputs, batch.lengths))
        return validation.figures()
