"""One learner's arithmetic: batch to gradient, gradient to update. Knows nothing of other learners.

Nothing random survives from step to step: dropout draws from the seed that each step is given, and what augmentation
needs of chance comes with the batch.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch import nn

from speech.models.precision import describe, has_bf16
from speech.models.stages import LstmLayers
from speech.objectives import build_objective
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardReader
from training.augmenting import Augmenter
from training.batching import derive_seed
from training.config import OptimizerConfig
from training.data import Batch, SpeechDataset
from training.devices import is_out_of_memory
from training.flat import FlatParameters
from training.job import TrainJob
from training.optim import Moments, build_optimizer, moment_names, set_learning_rate
from training.portions import Portions, cut, undivided
from training.shapes import frame_multiple, rounded_up

log = logging.getLogger(__name__)


def mixed_precision(wanted: str, device: torch.device) -> bool:
    """Whether `train.amp` means bf16 on a device; `auto` does where a GPU has units for it and need not emulate it."""
    if wanted == "auto":
        return device.type == "cuda" and has_bf16(device)
    if wanted == "bf16" and not has_bf16(device):
        log.warning("train.amp is bf16, which this GPU only emulates: amp=off is likely faster")
    return wanted == "bf16"


def use_threads(configured: int, learners: int = 1) -> None:
    """Set the threads of a training step: one per core but one, shared by the learners of this machine."""
    torch.set_num_threads(configured or max(1, ((os.cpu_count() or 1) - 1) // learners))


def damage_folder(name: str) -> str:
    """Where a training notes the damaged shards of its set `train` or `valid`, below its output."""
    return f"damaged-shards/{name}"


def open_set(job: TrainJob, url: str, lenient: bool = False) -> SpeechDataset:
    """A job's training or validation set, from its shards; damaged ones are set aside below the job's output."""
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    reader = ShardReader(store, index, job.cache, job.cache_bytes)
    folder = damage_folder("valid" if lenient else "train")
    quarantine = ShardQuarantine(ObjectStore(job.output_url), len(index), job.train.max_unreadable, folder)
    return SpeechDataset(index, reader, job.spec.build_tokenizer(), lenient=lenient, quarantine=quarantine)


@dataclass
class Losses:
    """Sums over one learner's part of a step."""

    loss: float = 0.0
    """Sum of the objective, nats; over several learners `nan` if one of them is."""
    tokens: float = 0.0
    utterances: float = 0.0
    unalignable: float = 0.0
    """Utterances whose tokens do not fit their frames; their loss counts as zero."""
    seconds: float = 0.0
    """Audio."""
    unreadable: float = 0.0
    """Utterances that are lost with damaged shards."""
    divided: float = 0.0
    """Batches that the device's memory did not hold as a whole."""

    def to_list(self) -> list[float]:
        """For an all-reduce."""
        return [getattr(self, field.name) for field in fields(self)]


class Learner:
    """A model with flat parameters and its optimizer.

    Args:
        job: What to train.
        device: Where.

    Raises:
        TooLargeError: The device's memory does not hold the model, its gradients and the optimizer's state.

    Attributes:
        augmenter: Draws for batches, which come to `gradient` with what it has drawn.
        frame_multiple: Batches are padded to a multiple of so many feature frames.
        moments: The optimizer's state.
        held: In its block gradients of several backward passes add up before they go to other ranks.
    """

    def __init__(self, job: TrainJob, device: torch.device) -> None:
        self.job, self.cfg, self.device = job, job.train, device
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        self.frame_multiple = frame_multiple(device)
        self.objective = build_objective(self.cfg.objective)
        self._portions = Portions()
        self.amp = mixed_precision(self.cfg.amp, device)
        self.frontend = job.spec.build_frontend(job.speaker_stats()).to(device)
        self.model = self._initial_model()
        with self._in_memory():
            self.model.to(device)
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(self._updates, self.model)
            self.moments = Moments(self._updates, self.optimizer, self.flat)
        self.augmenter = Augmenter(self.cfg.augment, job.spec.sample_rate, job.seed)
        self.model.train()
        self._forward = torch.compile(self.model, dynamic=True) if self.cfg.compile else self.model

    def _initial_model(self) -> nn.Module:
        torch.manual_seed(derive_seed("init", self.job.seed))
        return self.job.spec.build_model()

    @property
    def _updates(self) -> OptimizerConfig:
        """The optimizer of this learner's own updates; without any it needs no state."""
        return self.cfg.optimizer if self.cfg.traits.own_updates else OptimizerConfig(kind="sgd", momentum=0.0)

    def _in_memory(self) -> AbstractContextManager[None]:
        """In its block everything is made that must fit into memory beside batches."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        values = 2 + len(moment_names(self._updates))
        other = ", train.optimizer.kind=sgd" if self._updates.kind == "adamw" else ""
        return undivided(
            f"{count:,} weights with their gradients and optimizer state, {4e-9 * values * count:.2f} GB",
            f"use a smaller model{other}, fewer learners a GPU, strategy pipeline on more of them, or a larger GPU",
        )

    def describe(self) -> dict[str, str]:
        """`device` and `precision` of this learner, for the record."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        has_lstm = any(isinstance(module, nn.LSTM | LstmLayers) for module in self.model.modules())
        return {"device": name, "precision": describe(self.device, self.amp, has_lstm)}

    def reset(self) -> None:
        """Go back to the initial weights and an optimizer without a past."""
        self.model.load_state_dict(self._initial_model().state_dict())
        self.moments.clear()

    def gradient(self, batch: Batch | None, seed: int) -> Losses:
        """Add the gradient of a batch's summed loss to the flat gradients, which are cleared first.

        Args:
            batch: Utterances, with what `augmenter` has drawn for them; None leaves the gradients zero (a rank without
                work in the last step of a lease).
            seed: Of dropout.
        """
        self.flat.zero_grad()
        if batch is None or not batch.ids:
            return Losses(unreadable=batch.unreadable if batch else 0)
        loss, unalignable, divided = self._add_gradients(batch, seed)
        tokens = self.objective.items(batch)
        counted = len(batch.ids), unalignable, batch.seconds, batch.unreadable
        return Losses(loss, tokens, *counted, divided=float(divided))

    def _add_gradients(self, batch: Batch, seed: int) -> tuple[float, int, bool]:
        """Loss, unalignable utterances, and whether the batch had to be divided since it does not fit into memory.

        Raises:
            TooLargeError: A single utterance does not fit.
        """
        size = self._portions.first(batch)
        if size == len(batch.ids):
            try:
                return *self._backward(batch, seed), False
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._portions.smaller(batch, size)
        # after the handler: the error's traceback holds on to what was computed
        with self.held():
            return *self._in_portions(batch, seed, size), True

    def _in_portions(self, batch: Batch, seed: int, size: int) -> tuple[float, int]:
        """As `_backward`, some utterances at a time; all again with fewer if these do not fit either."""
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
        """Add a batch's gradient; its summed loss, and how many of its utterances are unalignable."""
        torch.manual_seed(seed)
        feats, frames = self.augmenter.features(self.frontend, batch, self.device)
        feats = rounded_up(feats, self.frame_multiple)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            log_probs, out_frames = self._forward(feats, frames)
        losses, unalignable = self.objective.losses(log_probs, out_frames, batch)
        total = losses.sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach()), unalignable

    def _grad_norm(self) -> float:
        return float(self.flat.grad_norm())

    @torch.no_grad()
    def scale_gradient(self, tokens: float) -> float:
        """Turn summed gradients into those of the mean loss per token, clipped; one pass over the flat buffer.

        Args:
            tokens: Tokens that the gradients are summed over, at all learners of the node.

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
        """Apply the gradients."""
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
