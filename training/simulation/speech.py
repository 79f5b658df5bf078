"""A real acoustic model on real speech in a simulation: features in memory, gradients of many replicas at once."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.bundle import BundleSpec
from speech.decoding import DecodeConfig, build_decoder
from speech.models import AcousticModel
from speech.scoring import score_sets
from training.batching import derive_seed
from training.compute import open_set
from training.data import Batch, SpeechDataset
from training.flat import FlatParameters
from training.job import TrainJob
from training.schedule import learning_rate
from training.simulation.model import ModelReplica, Stack, one_by_one
from training.simulation.problem import Job
from training.validation import ctc_losses

_LOAD = 64
"""Utterances that go through the front end at a time."""
_TOGETHER = 16
"""Replicas whose gradients are computed at once at most: more save nothing and take memory."""


class Utterances:
    """A set's features, tokens and texts in memory; `inputs` of its batches are features."""

    def __init__(self, dataset: SpeechDataset, spec: BundleSpec, job: TrainJob) -> None:
        frontend = spec.build_frontend(job.speaker_stats())
        self._whole: list[Batch] = []
        self._at: list[tuple[int, int]] = []
        for start in range(0, len(dataset), _LOAD):
            batch = dataset.batch(np.arange(start, min(start + _LOAD, len(dataset))))
            if not batch.ids:
                continue
            with torch.no_grad():
                batch.inputs, batch.lengths = frontend(batch.inputs, batch.lengths, batch.speakers)
            self._at += [(len(self._whole), place) for place in range(len(batch.ids))]
            self._whole.append(batch)
        self.frames = np.array([int(self._whole[part].lengths[place]) for part, place in self._at])

    def __len__(self) -> int:
        return len(self._at)

    def batch(self, numbers: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Some utterances, padded to the longest."""
        found = [(self._whole[self._at[number][0]], self._at[number][1]) for number in numbers]
        lengths = torch.stack([part.lengths[place] for part, place in found])
        counts = torch.stack([part.token_lengths[place] for part, place in found])
        frames, tokens = int(lengths.max()), int(counts.max())
        return Batch(
            rows=np.asarray(numbers, dtype=np.int64),
            ids=[part.ids[place] for part, place in found],
            speakers=[part.speakers[place] for part, place in found],
            texts=[part.texts[place] for part, place in found],
            inputs=_padded([part.inputs[place] for part, place in found], frames),
            lengths=lengths,
            tokens=_padded([part.tokens[place] for part, place in found], tokens).long(),
            token_lengths=counts,
            seconds=0.0,
        )


def _padded(rows: list[Tensor], size: int) -> Tensor:
    """Stack rows of which each holds at least its own content within the first `size` items."""
    out = torch.zeros(len(rows), size, *rows[0].shape[1:], dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        out[place, : min(size, len(row))] = row[:size]
    return out


class Speech:
    """A training job as a problem: its model, optimizer, schedule and data, without dropout and augmentation.

    Args:
        job: As the pipeline makes it.
        learners: The job's batch is divided by them.
        epochs: Passes, if not the job's.
        together: Replicas whose gradients are computed at once; 0 chooses by the kind of model.
    """

    def __init__(self, job: TrainJob, learners: int, epochs: int = 0, together: int = 0) -> None:
        self._cfg, self._seed = job.train, job.seed
        spec = job.spec.model_copy(update={"model": job.spec.model.model_copy(update={"dropout": 0.0})})
        self._spec, self.epochs = spec, epochs or job.train.epochs
        self._train = Utterances(open_set(job, job.train_url), spec, job)
        self._valid = Utterances(open_set(job, job.valid_url, lenient=True), spec, job)
        # by the median: the configured bound is for the longest utterance of a batch
        seconds = float(np.median(open_set(job, job.train_url).durations))
        self.batch = max(1, min(job.train.max_batch, int(job.train.batch_seconds / seconds)) // learners)
        self.batches = -(-len(self._train) // self.batch)
        self._global = self.batch * learners
        self._model = self._build()
        self._scratch = FlatParameters(self._model)
        self._initial = self._scratch.weights.clone()
        stackable = spec.model.kind == "conformer" and self._scratch.weights.numel() == self._scratch.num_parameters
        self._together = (together or (_TOGETHER if stackable else 1)) if stackable else 1
        self._stack = Stack(self._build()) if self._together > 1 else None
        self._decoder = build_decoder(DecodeConfig(kind="greedy"), spec.build_tokenizer())
        self._plans: dict[int, list[NDArray[np.int64]]] = {}

    def _build(self) -> AcousticModel:
        torch.manual_seed(derive_seed("init", self._seed))
        return self._spec.build_model()

    def replica(self) -> ModelReplica:
        """See `Problem.replica`."""
        return ModelReplica(self._build(), self._cfg.optimizer)

    def rate(self, progress: float) -> float:
        """See `Problem.rate`."""
        middle = progress + 0.5 / self.batches
        return learning_rate(self._cfg.schedule, self._cfg.optimizer.lr, middle, self.epochs, self._global)

    def _plan(self, epoch: int) -> list[NDArray[np.int64]]:
        """Batches of an epoch: equally many utterances each, of similar lengths."""
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
        """See `Problem.gradients`; a batch's weight is its tokens."""
        batches = [self._train.batch(self._plan(job.lease.epoch)[job.lease.number]) for job in jobs]
        weights = [job.replica.weights if job.weights is None else job.weights for job in jobs]
        into = [job.replica.grads for job in jobs]
        for start in range(0, len(jobs), self._together):
            part = slice(start, start + self._together)
            if self._stack is None or len(jobs[part]) == 1:
                losses = [lambda batch=batch: self._loss(batch) for batch in batches[part]]
                one_by_one(self._scratch, weights[part], losses, into[part])
            else:
                self._together_gradients(self._stack, weights[part], batches[part], into[part])
        return [_tokens(batch) for batch in batches]

    def _loss(self, batch: Batch) -> Tensor:
        self._model.train()
        log_probs, frames = self._model(batch.inputs, batch.lengths)
        return ctc_losses(log_probs, frames, batch)[0].sum() / _tokens(batch)

    def _together_gradients(
        self, stack: Stack, weights: Sequence[Tensor], batches: Sequence[Batch], into: Sequence[Tensor]
    ) -> None:
        size = max(len(batch.ids) for batch in batches)
        frames = max(batch.inputs.shape[1] for batch in batches)
        inputs = torch.zeros(len(batches), size, frames, batches[0].inputs.shape[2])
        lengths = torch.ones(len(batches), size, dtype=torch.long)
        for place, batch in enumerate(batches):
            inputs[place, : len(batch.ids), : batch.inputs.shape[1]] = batch.inputs
            lengths[place, : len(batch.ids)] = batch.lengths
        leaf = torch.stack(list(weights)).requires_grad_()
        log_probs, out_frames = stack(leaf, inputs, lengths)
        losses = []
        for place, batch in enumerate(batches):
            count = len(batch.ids)
            one = ctc_losses(log_probs[place, :count], out_frames[place, :count], batch)[0]
            losses.append(one.sum() / _tokens(batch))
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        for place, grads in enumerate(into):
            grads.copy_(leaf.grad[place])

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """See `Problem.evaluate`: validation loss in nats per token, and greedy WER as a fraction."""
        self._scratch.load(weights)
        self._model.eval()
        loss, tokens, rows = 0.0, 0.0, []
        order = np.argsort(self._valid.frames, kind="stable")
        for start in range(0, len(order), _LOAD):
            batch = self._valid.batch(order[start : start + _LOAD])
            log_probs, frames = self._model(batch.inputs, batch.lengths)
            loss += float(ctc_losses(log_probs, frames, batch)[0].double().sum())
            tokens += float(batch.token_lengths.sum())
            for place, heard in enumerate(self._decoder.decode(log_probs.float(), frames)):
                rows.append((batch.ids[place], batch.texts[place], heard.text, batch.speakers[place], ""))
        wer = score_sets(rows).wer
        return {"loss": loss / max(1.0, tokens), "wer": float("nan") if wer is None else wer}


def _tokens(batch: Batch) -> float:
    return max(1.0, float(batch.token_lengths.sum()))
