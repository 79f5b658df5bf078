"""One learner's computation: batch to gradient, gradient to update, independent of other learners.

No random state is carried from step to step: each step seeds dropout, and the batch brings its augmentation's draws.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from devices.choice import is_out_of_memory, seed_device
from devices.compute_threads import usable_cores
from devices.padding import CalledNetwork, PaddedNetwork, frame_multiple
from devices.portions import Portions, cut, undivided
from devices.precision import describe, has_bf16
from devices.transfers import read_back
from storage.batching import derive_seed
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from training.config import OptimizerConfig, SgdConfig
from training.job import TrainJob
from training.learner.bf16_weights import Bf16Weights
from training.learner.checkpoint import cpu_weights
from training.learner.flat import EMA, EMA_STEPS, FlatParameters, MovingAverage
from training.learner.graphs import GraphedForward
from training.learner.moments import Moments
from training.learner.optim import build_optimizer, num_moments, set_learning_rate
from training.learner.prefetch import Loader
from training.learner.task import ConstrainedNetwork, NetworkOfParts, SetName, Task, TrainingBatch, TrainingSet
from training.learner.trained import initial_network
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
    """Set the threads of a training step; by default all usable cores but one, divided among a machine's learners."""
    torch.set_num_threads(configured or max(1, (usable_cores() - 1) // learners))


def damage_folder(name: str) -> str:
    """Folder below a training's output that records the damaged shards of its set `train` or `valid`."""
    return f"damaged-shards/{name}"


def open_set(job: TrainJob, name: SetName, checked: bool = False) -> TrainingSet:
    """Open a job's training or validation set; damaged shards are recorded below the job's output.

    Args:
        job: What to train.
        name: Which.
        checked: Another process has checked the transcripts.
    """

    def quarantine(total: int) -> ShardQuarantine:
        return ShardQuarantine(ObjectStore(job.output_url), total, job.train.max_unreadable, damage_folder(name))

    return job.known_task.open_set(name, job.cache, job.cache_bytes, quarantine, checked)


def open_loader(job: TrainJob, threads: int, rank: int) -> Loader:
    """Open a loader of a rank's training set in a process of its own, beside the rank's, which has checked the set.

    Args:
        job: What to train.
        threads: Threads of the rank's process, whose loader this one equals bit for bit.
        rank: Number of the rank, for the log.
    """
    logs.setup(f"[rank {rank}, loader]", rank=str(rank))
    torch.set_num_threads(threads)
    task = job.known_task.build(job.seed)
    task.prepare_draws()
    return Loader(open_set(job, "train", checked=True), task, torch.device("cpu"))


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
        task: What is trained; it makes the random draws of batches, which `gradient` applies.
        frame_multiple: Batches are padded to a multiple of this number of feature frames.
        moments: The optimizer's state.
        held: Context in which gradients of several backward passes accumulate before other ranks get them.
        ema: Moving average of the weights, if one is kept.
        alone: Whether no other rank adds to the gradients that `gradient` computes.
        norm: L2 norm of these gradients, read back together with the loss; None unless `alone`.
    """

    alone = True
    norm: float | None = None
    ema: MovingAverage | None = None
    _epoch: float = math.inf
    _thawing: tuple[tuple[Tensor, Tensor, int], ...] = ()

    def __init__(self, job: TrainJob, device: torch.device) -> None:
        self.job, self.cfg, self.device = job, job.train, device
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        self.frame_multiple = frame_multiple(device, self.cfg.compile)
        self._portions = Portions()
        self.amp = mixed_precision(self.cfg.amp, device)
        self.task: Task[Any] = job.known_task.build(job.seed)
        self.task.to(device)
        self.initial = initial_network(job)
        self.model = self._part_of(self.initial.network)
        with self._in_memory():
            self.model.to(device)
            self.flat = FlatParameters(self.model)
            self.optimizer = build_optimizer(self._updates, self.model, self.initial.rates)
            self.moments = Moments(self.optimizer, self.flat)
            if self.cfg.ema:
                self.ema = MovingAverage(self.flat, self.cfg.ema)
        self._thawing = tuple(
            (parameter, self.flat.grads[start:stop].view(parameter.shape), self.initial.rates[parameter].until)
            for parameter, (start, stop) in zip(self.flat.parameters, self.flat.spans, strict=True)
            if parameter in self.initial.rates and self.initial.rates[parameter].until
        )
        self.model.train()
        self._network = self._compiled() if self.cfg.compile else self.model
        self._weights = Bf16Weights(self.flat).in_use if self.cfg.flat_bf16 and self.amp else nullcontext
        self._forward = self._graphed() if self.cfg.cuda_graphs and device.type == "cuda" else self._scores

    def _compiled(self) -> Callable[..., Any]:
        if self.device.type == "cuda":
            from torch._inductor import config

            # its check fails for reductions over dynamic shapes (AssertionError in tiling_utils, torch 2.11)
            config.triton.coalesce_tiling_analysis = False
        # dynamic: the padded lengths and the numbers of utterances are too many for a program each
        return torch.compile(self.model, dynamic=True)

    def _graphed(self, **given: Any) -> GraphedForward:
        """The forward pass from graphs; of a network of parts, they contain the encoder."""
        if isinstance(self.model, NetworkOfParts):
            return GraphedForward(self._encoded, self.flat, rest=self._outputs, **given)
        return GraphedForward(self._scores, self.flat, **given)

    def _part_of(self, network: nn.Module) -> nn.Module:
        """The part of the network that this learner trains: all of it."""
        return network

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
        has_lstm = any(
            isinstance(module, nn.LSTM) or getattr(module, "runs_lstms", False) for module in self.model.modules()
        )
        return {"device": name, "precision": describe(self.device, self.amp, has_lstm)}

    def reset(self) -> None:
        """Reset the weights to their initial values, and the optimizer's state to zero."""
        self.model.load_state_dict(self._part_of(initial_network(self.job).network).state_dict())
        self.moments.clear()
        if self.ema:
            self.ema.restart()

    def enter(self, epoch: int) -> None:
        """Begin or continue an epoch, from 0: parameters that are frozen in it get no gradients, and do not change."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        frozen = [epoch < until for *_, until in self._thawing]
        if frozen == [not parameter.requires_grad for parameter, *_ in self._thawing]:
            return
        for (parameter, grads, _), now in zip(self._thawing, frozen, strict=True):
            parameter.requires_grad_(not now)
            # the optimizer skips it: AdamW's correction of young moments is for steps that they have seen
            parameter.grad = None if now else grads
        if isinstance(self._forward, GraphedForward):
            self._forward.forget()

    def gradient(self, batch: TrainingBatch | None, seed: int) -> Losses:
        """Compute the gradient of a batch's summed loss into the flat gradients, which are cleared first.

        Args:
            batch: Utterances, with the draws of `task`; None leaves the gradients zero (a rank without work in the
                last step of a lease).
            seed: Seed of dropout.
        """
        self.flat.zero_grad()
        self.norm = None
        if batch is None or not batch.ids:
            return Losses(unreadable=batch.unreadable if batch else 0)
        loss, unalignable, divided = self._add_gradients(batch, seed)
        tokens = self.task.items(batch)
        counted = len(batch.ids), unalignable, batch.seconds, batch.unreadable
        return Losses(loss, tokens, *counted, divided=float(divided))

    def _add_gradients(self, batch: TrainingBatch, seed: int) -> tuple[float, int, bool]:
        """Add a batch's gradient; returns loss, unalignable utterances, and whether it was divided to fit memory.

        Raises:
            TooLargeError: If a single utterance does not fit.
        """
        wanted = math.ceil(len(batch.ids) / self.cfg.accumulate)
        size = min(wanted, self._portions.first(batch))
        if size == len(batch.ids):
            try:
                return *self._backward(batch, seed), False
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._portions.smaller(batch, size)
        # outside the handler: the error's traceback keeps tensors alive
        with self.held():
            loss, unalignable, size = self._in_portions(batch, seed, size)
        return loss, unalignable, size < wanted

    def _in_portions(self, batch: TrainingBatch, seed: int, size: int) -> tuple[float, int, int]:
        """Like `_backward`, `size` utterances at a time; if these do not fit either, start over with fewer.

        Returns:
            The summed loss, the number of unalignable utterances, and the utterances at a time.
        """
        while True:
            self.flat.zero_grad()
            try:
                sums = [
                    self._backward(batch.part(some), derive_seed("portion", seed, some.start))
                    for some in cut(batch, size)
                ]
                return sum(loss for loss, _ in sums), sum(count for _, count in sums), size
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = self._portions.smaller(batch, size)

    def _backward(self, batch: TrainingBatch, seed: int) -> tuple[float, int]:
        """Add a batch's gradient; returns its summed loss and the number of unalignable utterances."""
        seed_device(self.device, seed)
        network = PaddedNetwork(self._forward, cast(CalledNetwork, self.model).num_frames, self.frame_multiple)
        losses, unalignable = self.task.losses(network, batch, self.device)
        total = losses.sum()
        total.backward()  # type: ignore[no-untyped-call]
        for parameter, grads, _ in self._thawing:
            if not parameter.requires_grad:  # weights that are converted to bf16 together get their gradients together
                grads.zero_()
        # one wait for the device, after everything has been launched
        loss, *norm = read_back(total, *([self.flat.grad_norm()] if self.alone else []))
        self.norm = norm[0] if norm else None
        return loss, unalignable

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Context in which the model computes: autocast, and weights that are converted at once."""
        with self._weights(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            yield

    def _scores(self, feats_BTF: Tensor, frames: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, T', V] and output frames [B] of features and what else the network reads."""
        with self._precision():
            scores: tuple[Tensor, Tensor] = self._network(feats_BTF, frames, *others)
        return scores

    def _encoded(self, feats_BTF: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder of a network of parts gives."""
        with self._precision():
            return cast(NetworkOfParts, self.model).encode(feats_BTF, frames)

    def _outputs(self, encoded_BTD: Tensor, frames: Tensor, *others: Tensor) -> Tensor:
        """What the other parts make of it."""
        with self._precision():
            return cast(NetworkOfParts, self.model).outputs(encoded_BTD, frames, *others)

    def _grad_norm(self) -> float:
        return read_back(self.flat.grad_norm())[0]

    @torch.no_grad()
    def scale_gradient(self, tokens: float, norm: float | None = None) -> float:
        """Scale summed gradients to those of the mean loss per token, and clip, in one pass over the flat buffer.

        Args:
            tokens: Number of tokens that the gradients are summed over, at all learners of the node.
            norm: The gradients' L2 norm if it is known; otherwise the host waits for the device to compute it.

        Returns:
            The gradient's L2 norm before clipping.
        """
        scale = 1.0 / max(1.0, tokens)
        norm = (self._grad_norm() if norm is None else norm) * scale
        clip = self.cfg.optimizer.clip_norm
        if clip and math.isfinite(norm) and norm > clip:
            scale *= clip / (norm + 1e-6)
        self.flat.grads.mul_(scale)
        return norm

    def update(self, lr: float) -> None:
        """Make one optimizer step with the gradients."""
        set_learning_rate(self.optimizer, lr, self._epoch)
        self.optimizer.step()
        if isinstance(self.model, ConstrainedNetwork):
            self.model.constrain()
        if self.ema:
            self.ema.add()

    # --- what is saved

    def state(self) -> dict[str, Tensor]:
        """Copies of what is trained, and of its moving average, by name, on the CPU."""
        return cpu_weights(self.model) | (self.ema.tensors() if self.ema else {})

    def load_state(self, weights: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; a moving average that is not there begins with the weights."""
        self.model.load_state_dict({name: tensor for name, tensor in weights.items() if not name.startswith(EMA)})
        if self.ema:
            self.ema.load(weights) if EMA_STEPS in weights else self.ema.restart()
