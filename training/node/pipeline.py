"""A model whose layers are split over the ranks of a node: strategy `pipeline`, for models that one device cannot hold.

Each rank keeps one stage of the model (`training.learner.task.SplitTask`), its gradients and its optimizer. A batch
passes through the stages in micro-batches, so that several stages work at a time (GPipe: Huang et al. 2018,
arXiv:1811.06965; 1F1B: Narayanan et al. 2020, arXiv:2006.09503); torch.distributed.pipelining sends hidden frames
forward and their gradients back. Weights are updated once per batch, with the sum over its micro-batches, as on one
device.

Fully synchronous: staleness 0. A step sends the hidden frames of the batch forward, and as many bytes back, over each
border between two stages; weights are never sent. All stages wait for the slowest one; if one dies, the node restarts.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from devices.choice import seed_device
from devices.padding import rounded_up
from devices.portions import undivided
from devices.transfers import beside, known_on_host, read_back
from training.job import TrainJob
from training.learner.checkpoint import cpu_weights
from training.learner.compute import Learner, Losses
from training.learner.task import SplitTask, TrainingBatch
from training.node.process_group import NodeGroup
from training.node.step_counters import StepReport
from training.node.stepper import Rows, Stepped, Stepper, Weights
from training.strategies.pipeline import GPU_EACH, LayerPipelineConfig

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

# a schedule is built for every batch, and logs it every time
logging.getLogger("torch.distributed.pipelining").setLevel(logging.WARNING)


@dataclass(frozen=True)
class BatchPlan:
    """A batch as rank 0 announces it to all ranks.

    Attributes:
        frames: Feature frames of each utterance [batch].
        width: Feature frames that the batch is padded to.
        targets: What the last stage needs for the loss, integers by name, each [batch, ...].
        seconds: Audio.
        unreadable: Utterances lost with damaged shards.
    """

    frames: Tensor
    width: int
    targets: dict[str, Tensor]
    seconds: float
    unreadable: int

    def to_message(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "frames": self.frames.tolist(),
            "width": self.width,
            "targets": {name: tensor.tolist() for name, tensor in self.targets.items()},
            "seconds": self.seconds,
            "unreadable": self.unreadable,
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "BatchPlan":
        """Build from the result of `to_message`."""
        rest = {name: message[name] for name in ("width", "seconds", "unreadable")}
        # empty lists would become float tensors
        targets = {name: torch.tensor(value, dtype=torch.int64) for name, value in message["targets"].items()}
        return cls(torch.tensor(message["frames"], dtype=torch.int64), targets=targets, **rest)

    def cut(self, micro_batches: int) -> tuple[int, int]:
        """Size of a micro-batch in utterances, and number of micro-batches; the last one may need padding."""
        size = math.ceil(len(self.frames) / micro_batches)
        return size, math.ceil(len(self.frames) / size)


class _Mixed(nn.Module):
    """A stage in mixed precision, forward only."""

    def __init__(self, stage: nn.Module, amp: bool) -> None:
        super().__init__()
        self.stage: Any = stage  # a `NetworkStage`
        self.amp = amp

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """As the stage, with lengths on the host."""
        mixed = torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.amp)
        with mixed, known_on_host(frames=self.stage.num_frames(lengths)):
            out: Tensor = self.stage(x, beside(lengths, x))
        return out


class PipelineLearner(Learner):
    """One rank's stage of a model, with the interface of a `Learner`; all ranks of the node call it together.

    `model`, `flat` and `optimizer` are those of the stage.

    Args:
        job: What to train.
        device: Device of this stage.
        group: The node's ranks, one per stage; at least two.

    Raises:
        ValueError: If the model has fewer layers than the node has ranks, or ranks share a GPU.
    """

    def __init__(self, job: TrainJob, device: torch.device, group: NodeGroup) -> None:
        if group.shares_gpu:
            raise ValueError(f"learners of this node share a GPU, and {GPU_EACH}")
        self.group = group
        self._shapes: list[dict[str, Tensor]] = []
        super().__init__(job, device)
        self.stage: Any = self.model  # a `NetworkStage`
        assert isinstance(job.train.strategy, LayerPipelineConfig)
        self.constants = job.train.strategy

    @override
    def _part_of(self, network: nn.Module) -> nn.Module:
        stages: list[nn.Module] = self._split.split(network, self.group.size)
        self._shapes = [{n: t.to("meta") for n, t in stage.state_dict().items()} for stage in stages]
        return stages[self.group.rank]

    @property
    def _split(self) -> SplitTask:
        """The task.

        Raises:
            ValueError: If its network cannot be split.
        """
        if not isinstance(self.task, SplitTask):
            raise ValueError("what is trained here cannot be split into stages: use another strategy than pipeline")
        return self.task

    # --- a step

    def gradient(self, batch: TrainingBatch | None, seed: int) -> Losses:
        """Compute the gradient of a batch's summed loss into the flat gradients of all stages, which are cleared first.

        Args:
            batch: Utterances with what was drawn for their augmentation, or None; ignored except at rank 0.
            seed: Seed of this rank's dropout.

        Returns:
            The whole batch's sums, the same at all ranks.

        Raises:
            TooLargeError: A micro-batch does not fit into this stage's GPU.
        """
        self.flat.zero_grad()
        seed_device(self.device, seed)
        feats, message = self._front(batch) if self.group.rank == 0 else (None, {})
        plan = BatchPlan.from_message(self.group.tell(message))
        if not len(plan.frames):
            return Losses(unreadable=plan.unreadable)
        # the other stages wait for these micro-batches: the batch cannot be divided any further
        remedy = f"raise train.strategy.micro_batches ({self.constants.micro_batches}), or lower train.batch_seconds"
        with undivided("this stage's share of a batch", remedy):
            loss, unalignable = self._pass(feats, plan)
        # only the last stage computes the loss
        loss, unalignable = self.group.gather_numbers([loss, unalignable])[-1]
        tokens = self._split.stage_items(plan.targets)
        return Losses(loss, tokens, len(plan.frames), unalignable, plan.seconds, plan.unreadable)

    def _front(self, batch: TrainingBatch | None) -> tuple[Tensor | None, dict[str, Any]]:
        """Features of a batch, and the message that describes it to the other ranks."""
        lost = batch.unreadable if batch else 0
        if batch is None or not batch.ids:
            none = torch.zeros(0, dtype=torch.int64)
            return None, BatchPlan(none, 0, {}, 0.0, lost).to_message()
        feats, frames = self._split.features(batch, self.device)
        feats = rounded_up(feats, self.frame_multiple)
        targets = self._split.targets(batch)
        return feats, BatchPlan(frames, feats.shape[1], targets, batch.seconds, lost).to_message()

    def _pass(self, feats: Tensor | None, plan: BatchPlan) -> tuple[float, float]:
        """Run all micro-batches forward and backward; returns loss and unalignable utterances (at the last stage)."""
        size, parts = plan.cut(self.constants.micro_batches)
        fill = size * parts - len(plan.frames)
        lengths = F.pad(plan.frames, (0, fill))
        unalignable = 0

        def loss_of(log_probs: Tensor, rows: Tensor) -> Tensor:
            nonlocal unalignable
            rows = rows[rows < len(plan.frames)]  # without padding
            targets = {name: tensor[rows] for name, tensor in plan.targets.items()}
            frames = self.stage.num_frames(plan.frames[rows])
            losses, count = self._split.stage_losses(log_probs[: len(rows)], frames, targets)
            unalignable += count
            return losses.sum()

        # every rank imports this module, and importing torch.distributed.pipelining takes a second
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        # 1F1B needs at least as many micro-batches as stages
        alternates = self.constants.schedule == "1f1b" and parts >= self.group.size
        kind = Schedule1F1B if alternates else ScheduleGPipe
        schedule = kind(self._place(plan.width, size), parts, loss_of, scale_grads=False)
        inputs = () if feats is None else (F.pad(feats, (0, 0, 0, 0, 0, fill)),)
        losses: list[Tensor] = []
        rows = torch.arange(size * parts)
        schedule.step(*inputs, target=rows, losses=losses, return_outputs=False, lengths=lengths)
        return sum(read_back(*losses)) if losses else 0.0, unalignable

    def _place(self, width: int, size: int) -> "PipelineStage":
        """Build this stage for micro-batches of a given shape; without it, torch would exchange pickled shapes."""
        from torch.distributed.pipelining import PipelineStage

        stage = self.stage
        inner = int(stage.num_frames(torch.tensor(max(1, width))))
        shape_in = (size, width if stage.is_first else inner, stage.in_width)
        shape_out = (size, inner, stage.out_width)
        given, made = (torch.empty(shape, device="meta") for shape in (shape_in, shape_out))
        return PipelineStage(
            _Mixed(stage, self.amp), self.group.rank, self.group.size, self.device, input_args=given, output_args=made
        )

    def _grad_norm(self) -> float:
        """L2 norm over the gradients of all stages."""
        mine = super()._grad_norm()
        return math.sqrt(sum(square for (square,) in self.group.gather_numbers([mine * mine])))

    # --- the whole model's weights

    def gather_state(self) -> dict[str, Tensor] | None:
        """The whole model's state by name, on the CPU; None except at rank 0. All ranks call it together."""
        mine = list(cpu_weights(self.model).values())
        parts = self.group.collect(mine, [list(shapes.values()) for shapes in self._shapes])
        if self.group.rank:
            return None
        return {
            name: tensor
            for shapes, tensors in zip(self._shapes, parts, strict=True)
            for name, tensor in zip(shapes, tensors, strict=True)
        }

    @override
    def load_state(self, weights: Mapping[str, Tensor]) -> None:
        """Load this stage's part of the whole model's state.

        Raises:
            RuntimeError: If tensors are missing or have other shapes.
        """
        mine = self._shapes[self.group.rank]
        self.model.load_state_dict({name: tensor for name, tensor in weights.items() if name in mine})


# --- the stepper


class PipelineStepper(Stepper):
    """Stepper of strategy `pipeline`: every rank has a stage of the model, and all work on the same batch.

    Args:
        learner: This rank's stage.
    """

    def __init__(self, learner: PipelineLearner) -> None:
        super().__init__(learner, learner.group)
        self.learner: PipelineLearner = learner
        self._results: list[Stepped] = []

    @override
    def share(self, rows: Rows) -> Rows:
        # the first stage reads the whole batch
        return rows if self.group.rank == 0 else rows[:0]

    @override
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        # all ranks have the whole batch's losses: count them once
        part = StepReport(losses if self.group.rank == 0 else Losses(), False, lost=lost)
        parts = [StepReport.from_list(values) for values in self.group.gather_numbers(part.to_list())]
        norm = self.learner.scale_gradient(losses.tokens)
        good = math.isfinite(norm) and math.isfinite(losses.loss)
        if good and losses.utterances:
            self.learner.update(lr)
        self._results.append(Stepped(parts, norm, good))

    @override
    def results(self) -> list[Stepped]:
        results, self._results = self._results, []
        return results

    @override
    def model(self) -> Weights | None:
        return self.learner.gather_state()

    @override
    def merge(self, replicas: list[Weights]) -> None:
        # stages are parts of one model: nothing is averaged
        self.learner.load_state({name: tensor for part in replicas for name, tensor in part.items()})
