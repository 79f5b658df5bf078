"""One learner's computation: batch to gradient, gradient to update, independent of other learners.

No random state is carried from step to step: each step seeds dropout, and the batch brings its augmentation's draws.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from speech.features.augment.noise import generated
from speech.models.networks.base import ModelStage, TrainableNetwork
from speech.models.networks.blstm import LstmLayers
from speech.models.networks.precision import describe, has_bf16
from speech.objectives import build_objective, objective_class
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardReader
from training.config import OptimizerConfig, SgdConfig
from training.job import TrainJob
from training.learner.augmentation import Augmenter
from training.learner.batching import derive_seed
from training.learner.data import Batch, SpeechDataset
from training.learner.devices import is_out_of_memory
from training.learner.flat import FlatParameters
from training.learner.graphs import GraphedForward
from training.learner.microbatches import Portions, cut, undivided
from training.learner.moments import Moments
from training.learner.optim import build_optimizer, num_moments, set_learning_rate
from training.learner.padding import frame_multiple, rounded_up
from training.learner.prefetch import Loader
from training.learner.segments import segments_of
from training.learner.state_targets import StateTargets, read_alignments
from training.processes import logs

log = logging.getLogger(__name__)


def mixed_precision(wanted: str, device: torch.device) -> bool:
    """Whether `train.amp` means bf16 on a device; `auto` does on a GPU that supports bf16 in hardware."""
    if wanted == "auto":
        return device.type == "cuda" and has_bf16(device)
    if wanted == "bf16" and not has_bf16(device):
        log.warning("train.amp is bf16, which this GPU only emulates: amp=off is likely faster")
    return wanted == "bf16"


def use_threads(configured: int, learners: int = 1) -> None:
    """Set the threads of a training step; by default all cores but one, divided among this machine's learners."""
    torch.set_num_threads(configured or max(1, ((os.cpu_count() or 1) - 1) // learners))


def damage_folder(name: str) -> str:
    """Folder below a training's output that records the damaged shards of its set `train` or `valid`."""
    return f"damaged-shards/{name}"


def open_set(job: TrainJob, url: str, lenient: bool = False, checked: bool = False) -> SpeechDataset:
    """Open a job's training or validation set; damaged shards are recorded below the job's output.

    Args:
        job: What to train.
        url: The set.
        lenient: It is the validation set, see `SpeechDataset`.
        checked: Another process has checked that the tokenizer encodes all transcripts.
    """
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    reader = ShardReader(store, index, job.cache, job.cache_bytes)
    name = "valid" if lenient else "train"
    folder = damage_folder(name)
    quarantine = ShardQuarantine(ObjectStore(job.output_url), len(index), job.train.max_unreadable, folder)
    tokenizer, targets = job.spec.build_tokenizer(), None
    if objective_class(job.train.objective).needs == "states":
        table = read_alignments(ObjectStore(job.alignments_url), name)
        targets = StateTargets(table, job.spec.frame_factor, segments_of(index))
    return SpeechDataset(
        index, reader, tokenizer, lenient=lenient, quarantine=quarantine, targets=targets, checked=checked
    )


def build_augmenter(job: TrainJob) -> Augmenter:
    """The augmentation of a job's training set."""
    return Augmenter(job.train.augment, job.spec.sample_rate, job.seed, job.spec.states_per_frame)


def open_loader(job: TrainJob, threads: int, rank: int) -> Loader:
    """Open a loader of a rank's training set in a process of its own, beside the rank's, which has checked the set.

    Args:
        job: What to train.
        threads: Threads of the rank's process, whose loader this one equals bit for bit.
        rank: Number of the rank, for the log.
    """
    logs.setup(f"[rank {rank}, loader]", rank=str(rank))
    torch.set_num_threads(threads)
    generated("pink", job.spec.sample_rate)  # kept; its Fourier transform rounds differently with a single thread
    return Loader(open_set(job, job.train_url, checked=True), build_augmenter(job), torch.device("cpu"))


@dataclass
class Losses:
    """Sums over one learner's part of a step."""

    loss: float = 0.0
    """Sum of the objective in nats; NaN at one learner propagates to the sum over learners."""
    tokens: float = 0.0
    utterances: float = 0.0
    unalignable: float = 0.0
    """Utterances whose tokens or states do not fit their frames, or that have none; their loss counts as zero."""
    seconds: float = 0.0
    """Audio."""
    unreadable: float = 0.0
    """Utterances lost with damaged shards."""
    divided: float = 0.0
    """Batches that had to be divided to fit into the device's memory."""

    def to_list(self) -> list[float]:
        """All fields as numbers, for communication."""
        return [getattr(self, field.name) for field in fields(self)]


class Learner:
    """A model with flat parameters and its optimizer.

    Args:
        job: What to train.
        device: Device to train on.

    Raises:
        TooLargeError: If the device's memory does not hold the model, its gradients and the optimizer's state.

    Attributes:
        augmenter: Makes the random draws of batches, which `gradient` applies.
        frame_multiple: Batches are padded to a multiple of this number of feature frames.
        moments: The optimizer's state.
        held: Context in which gradients of several backward passes accumulate before other ranks get them.
    """

    def __init__(self, job: TrainJob, device: torch.device) -> None:
        self.job, self.cfg, self.device = job, job.train, device
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        self.frame_multiple = frame_multiple(device, self.cfg.compile)
        self.objective = build_objective(self.cfg.objective)
        self._portions = Portions()
        self.amp = mixed_precision(self.cfg.amp, device)
        self.frontend = job.spec.build_frontend(job.speaker_stats()).to(device)
        self.model = self._initial_model()
        with self._in_memory():
            self.model.to(device)
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(self._updates, self.model)
            self.moments = Moments(self.optimizer, self.flat)
        self.augmenter = build_augmenter(job)
        self.model.train()
        self._network = self._compiled() if self.cfg.compile else self.model
        graphs = self.cfg.cuda_graphs and device.type == "cuda"
        self._forward = GraphedForward(self._scores, self.flat) if graphs else self._scores

    def _compiled(self) -> Callable[..., Any]:
        if self.device.type == "cuda":
            from torch._inductor import config

            # its check fails for reductions over dynamic shapes (AssertionError in tiling_utils, torch 2.11)
            config.triton.coalesce_tiling_analysis = False
        # dynamic: the padded lengths and the numbers of utterances are too many for a program each
        return torch.compile(self.model, dynamic=True)

    def _initial_model(self) -> nn.Module:
        torch.manual_seed(derive_seed("init", self.job.seed))
        return self.job.spec.build_model()

    @property
    def _updates(self) -> OptimizerConfig:
        """Optimizer of this learner's own updates; if it makes none, one without state."""
        return self.cfg.optimizer if self.cfg.traits.own_updates else SgdConfig(momentum=0.0)

    def _in_memory(self) -> AbstractContextManager[None]:
        """Context for the allocations that must fit into memory besides batches."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        values = 2 + num_moments(self._updates)
        other = ", train.optimizer.kind=sgd" if self._updates.kind == "adamw" else ""
        return undivided(
            f"{count:,} weights with their gradients and optimizer state, {4e-9 * values * count:.2f} GB",
            f"use a smaller model{other}, fewer learners per GPU, strategy pipeline on more GPUs, or a larger GPU",
        )

    def describe(self) -> dict[str, str]:
        """`device` and `precision` of this learner, as recorded in the training's output."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        has_lstm = any(isinstance(module, nn.LSTM | LstmLayers) for module in self.model.modules())
        return {"device": name, "precision": describe(self.device, self.amp, has_lstm)}

    def reset(self) -> None:
        """Reset the weights to their initial values, and the optimizer's state to zero."""
        self.model.load_state_dict(self._initial_model().state_dict())
        self.moments.clear()

    def gradient(self, batch: Batch | None, seed: int) -> Losses:
        """Compute the gradient of a batch's summed loss into the flat gradients, which are cleared first.

        Args:
            batch: Utterances, with the draws of `augmenter`; None leaves the gradients zero (a rank without work in the
                last step of a lease).
            seed: Seed of dropout.
        """
        self.flat.zero_grad()
        if batch is None or not batch.ids:
            return Losses(unreadable=batch.unreadable if batch else 0)
        loss, unalignable, divided = self._add_gradients(batch, seed)
        tokens = self.objective.items(batch)
        counted = len(batch.ids), unalignable, batch.seconds, batch.unreadable
        return Losses(loss, tokens, *counted, divided=float(divided))

    def _add_gradients(self, batch: Batch, seed: int) -> tuple[float, int, bool]:
        """Add a batch's gradient; returns loss, unalignable utterances, and whether it was divided to fit memory.

        Raises:
            TooLargeError: If a single utterance does not fit.
        """
        size = self._portions.first(batch)
        if size == len(batch.ids):
            try:
                return *self._backward(batch, seed), False
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._portions.smaller(batch, size)
        # outside the handler: the error's traceback keeps tensors alive
        with self.held():
            return *self._in_portions(batch, seed, size), True

    def _in_portions(self, batch: Batch, seed: int, size: int) -> tuple[float, int]:
        """Like `_backward`, `size` utterances at a time; if these do not fit either, start over with fewer."""
        while True:
            self.flat.zero_grad()
            try:
                sums = [
                    self._backward(batch.part(some), derive_seed("portion", seed, some.start))
                    for some in cut(batch, size)
                ]
                return sum(loss for loss, _ in sums), sum(count for _, count in sums)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._portions.smaller(batch, size)

    def _backward(self, batch: Batch, seed: int) -> tuple[float, int]:
        """Add a batch's gradient; returns its summed loss and the number of unalignable utterances."""
        torch.manual_seed(seed)
        feats, frames = self.augmenter.features(self.frontend, batch, self.device)
        feats = rounded_up(feats, self.frame_multiple)
        log_probs, out_frames = self._forward(feats, frames)
        losses, unalignable = self.objective.losses(log_probs, out_frames, batch)
        total = losses.sum()
        total.backward()  # type: ignore[no-untyped-call]
        # one wait for the device, after everything has been launched
        loss, count = torch.stack([total.detach().double(), unalignable.double()]).tolist()
        return loss, int(count)

    def _scores(self, feats_BTF: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, T', V] and output frames [B] of features."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            found: tuple[Tensor, Tensor] = self._network(feats_BTF, frames)
        return found

    def _grad_norm(self) -> float:
        return float(self.flat.grad_norm())

    @torch.no_grad()
    def scale_gradient(self, tokens: float) -> float:
        """Scale summed gradients to those of the mean loss per token, and clip, in one pass over the flat buffer.

        Args:
            tokens: Number of tokens that the gradients are summed over, at all learners of the node.

        Returns:
            The gradient's L2 norm before clipping.
        """
        scale = 1.0 / max(1.0, tokens)
        norm = self._grad_norm() * scale
        clip = self.cfg.optimizer.clip_norm
        if clip and math.isfinite(norm) and norm > clip:
            scale *= clip / (norm + 1e-6)
        self.flat.grads.mul_(scale)
        return norm

    def update(self, lr: float) -> None:
        """Make one optimizer step with the gradients."""
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        if isinstance(self.model, TrainableNetwork | ModelStage):
            self.model.constrain()
