"""What the engine trains: a task has a network, data, a loss and a validation, and the engine knows nothing else of it.

A task's configuration is part of the job, which all processes of a training read. The program that starts them
says which kinds it knows by `know_tasks`, see `training.processes.children.run_by`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import Tensor

    from devices.padding import CalledNetwork
    from storage.batching import BatchLimits
    from storage.index import ShardIndex
    from storage.quarantine import ShardQuarantine

Rows = NDArray[np.int64]
SetName = Literal["train", "valid"]


class TrainingBatch(Protocol):
    """Some utterances of a set, padded to the longest one; others than utterances are counted like them.

    Attributes:
        ids: Their ids.
        inputs: What the network's inputs are computed from [batch, longest, ...].
        lengths: Length of each [batch].
        seconds: Audio.
        unreadable: Utterances that are lost with damaged shards.
    """

    ids: list[str]
    inputs: Tensor
    lengths: Tensor
    seconds: float
    unreadable: int

    def part(self, which: slice) -> Self:
        """Some of its utterances."""

    def pinned(self) -> Self:
        """Copy to page-locked memory, from which copies to a GPU are asynchronous."""

    def tensors(self) -> list[Tensor]:
        """All its tensors, those of draws included."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each of `tensors`, in an order that depends on their names only."""


@runtime_checkable
class NetworkOfParts(Protocol):
    """A network whose encoder reads inputs and lengths alone, and whose other parts read more, such as tokens.

    Attributes:
        parts: Names of the other parts.
    """

    parts: ClassVar[tuple[str, ...]]

    def encode(self, inputs: Tensor, lengths: Tensor, /) -> tuple[Tensor, Tensor]:
        """What the other parts read [batch, frames, ...], and its frames [batch]."""

    def outputs(self, encoded: Tensor, frames: Tensor, /, *others: Tensor) -> Tensor:
        """The network's outputs for what `encode` gave, and for what else they read."""


class TrainingSet(Protocol):
    """A set's utterances, by row of its index.

    Attributes:
        index: The set's index.
        durations: Seconds of each utterance.
    """

    index: ShardIndex
    durations: NDArray[np.float64]

    @property
    def computed_seconds(self) -> NDArray[np.float64]:
        """Seconds that the network computes for each, without augmentation: batches are limited by them."""

    def __len__(self) -> int: ...

    def ids(self, rows: Rows) -> list[str]:
        """Ids of utterances."""

    def batch(self, rows: Rows) -> Any:
        """Load and pad utterances: a `TrainingBatch`.

        Raises:
            TooManyShardsError: If damaged shards hold more of the set than is tolerated.
        """

    def prefetch(self, rows: Rows) -> None:
        """Fetch the shards of coming utterances in the background, in that order; of none, nothing more is fetched."""

    def first_of_shards(self, rows: Rows) -> Rows:
        """The first row of each shard, in the order of `rows`."""

    def check(self) -> None:
        """Check that the loss to damaged shards is within the limit, including those that other processes found.

        Raises:
            TooManyShardsError: If it is not.
        """


B = TypeVar("B")


class DrawingTask(Protocol[B]):
    """What loading a batch needs of a task; the threads that do so share it."""

    def prepare_draws(self) -> None:
        """Compute now what draws share and what depends on the number of torch's threads."""

    def drawn(self, batch: B, epoch: int) -> B:
        """Add the random draws of an epoch's augmentation to a batch."""


class Task(DrawingTask[B], Protocol[B]):
    """A task at one process."""

    def to(self, device: torch.device) -> object:
        """Move what the task holds besides the network."""

    def heard_seconds(self, ids: Sequence[str], seconds: NDArray[np.float64], epoch: int) -> NDArray[np.float64]:
        """Seconds that the network computes for utterances in an epoch: their duration after augmentation, or more.

        Args:
            ids: Ids of the utterances.
            seconds: Duration of each as stored, seconds.
            epoch: The epoch.
        """

    def losses(self, network: CalledNetwork, batch: B, device: torch.device) -> tuple[Tensor, int]:
        """Losses of a batch with its draws.

        Args:
            network: The network, in the engine's precision.
            batch: Some utterances.
            device: Where the network is.

        Returns:
            Loss of each utterance in nats [batch] on the device, zero for one that the outputs cannot stand for, and
            how many of these there are. The host does not wait for the device.
        """

    def items(self, batch: B) -> int:
        """What the sum of losses is divided by: a number of tokens, frames or words."""

    def validate(
        self, network: Any, data: Any, limits: BatchLimits, device: torch.device, loss_only: bool = False
    ) -> dict[str, float]:
        """Loss and other figures of a set, without augmentation and in float32.

        Args:
            network: The network, in evaluation mode.
            data: The set.
            limits: Size of the batches.
            device: Where the network is.
            loss_only: Whether the loss suffices: figures that cost as much, such as what a search finds, are left out.

        Returns:
            `loss` per item in nats, NaN if the network's outputs are not finite, and further figures by name.
        """


class TaskConfig(Protocol):
    """A task's configuration: a pydantic model with a field `kind`, which is read without torch."""

    @property
    def train_url(self) -> str:
        """Store of the training set's index, whose rows the coordinator leases."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the files that `save` writes, in the order in which they are published."""

    def build_network(self) -> Any:
        """The network (`torch.nn.Module`) with the weights that training begins with, random or another model's."""

    def build(self, seed: int) -> Task[Any]:
        """The task at one process; `seed` is the training's."""

    def open_set(
        self,
        name: SetName,
        cache: Path,
        cache_bytes: int | None,
        quarantine: Callable[[int], ShardQuarantine],
        checked: bool = False,
    ) -> TrainingSet:
        """Open the training or validation set.

        Args:
            name: Which.
            cache: Local folder for copies of remote shards.
            cache_bytes: Limit of the cache; None for the folder's own.
            quarantine: Makes the record of damaged shards, given the number of utterances.
            checked: Another process has checked what is found in the index, such as the transcripts.
        """

    def save(self, folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the finished model into a folder.

        Args:
            folder: The folder.
            weights: The network's.
            about: How it was trained, for the model's record.
        """


_source: list[Callable[[], Mapping[str, type[BaseModel]]]] = [dict]


def know_tasks(source: Callable[[], Mapping[str, type[BaseModel]]]) -> None:
    """Set where the configurations of tasks come from.

    Args:
        source: Returns them by kind; called when a job is read, since some processes read none and start faster.
    """
    _source[:] = [source]


def known_tasks() -> Mapping[str, type[BaseModel]]:
    """Configurations of the tasks that this process knows, by kind."""
    return _source[0]()


# --- tasks whose network is split


class NetworkStage(Protocol):
    """Some consecutive layers of a network: a `torch.nn.Module`.

    Attributes:
        is_first: Whether it begins with the network's inputs.
        is_last: Whether it ends with the network's outputs.
        in_width: Values of a frame that comes in.
        out_width: Values of a frame that goes out.
    """

    is_first: bool
    is_last: bool
    in_width: int
    out_width: int

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of input frames."""


@runtime_checkable
class SplitTask(Protocol):
    """What a task offers besides if its network can be split over ranks."""

    def split(self, network: Any, stages: int) -> list[Any]:
        """The network as consecutive stages (`NetworkStage`).

        Raises:
            ValueError: If it has too few layers, or cannot be split.
        """

    def features(self, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """The network's inputs of a batch [batch, frames, width] on the device, and frames [batch] on the host."""

    def targets(self, batch: Any) -> dict[str, Tensor]:
        """What the last stage needs for the loss: integers, each [batch, ...]."""

    def stage_losses(self, outputs: Tensor, frames: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, int]:
        """As `Task.losses`, from the network's outputs."""

    def stage_items(self, targets: dict[str, Tensor]) -> int:
        """As `Task.items`."""


@runtime_checkable
class WarmTask(Protocol):
    """What a task's configuration offers besides if training may begin with another model's weights."""

    @property
    def new_parameters(self) -> frozenset[str] | None:
        """Names of the network's parameters that begin with random values; None if all do."""


@runtime_checkable
class LayeredNetwork(Protocol):
    """A network that numbers its layers."""

    def layer_of(self, parameter: str) -> int | None:
        """Number of the layer that a named parameter belongs to; None for what comes before or after the layers."""


@runtime_checkable
class ConstrainedNetwork(Protocol):
    """A network whose parameters are constrained."""

    def constrain(self) -> None:
        """Move the parameters towards what constrains them; called after each update."""
