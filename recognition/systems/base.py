"""What the tasks of all systems share: their sets are shards, and what they save says how it was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardReader

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.data.dataset import SpeechDataset


class SystemTaskConfig(BaseModel):
    """What is trained, and on which data, see `training.learner.task.TaskConfig`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    spec: Any
    """What the finished model is described by; it saves the model."""
    train_url: str
    """Store of the training set's index and shards."""
    valid_url: str
    """Store of the validation set's index and shards."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the files that `save` writes, in the order in which they are published."""
        names: tuple[str, ...] = self.spec.members
        return names

    def open_set(
        self,
        name: Literal["train", "valid"],
        cache: Path,
        cache_bytes: int | None,
        quarantine: Callable[[int], ShardQuarantine],
        checked: bool = False,
    ) -> SpeechDataset:
        """Open the training or validation set, see `training.learner.task.TaskConfig`."""
        from recognition.data.dataset import SpeechDataset

        store = ObjectStore(self.train_url if name == "train" else self.valid_url)
        index = ShardIndex.read(store)
        reader = ShardReader(store, index, cache, cache_bytes)
        more = self._further(name, index)
        return SpeechDataset(index, reader, quarantine=quarantine(len(index)), checked=checked, **more)

    def _further(self, name: Literal["train", "valid"], index: ShardIndex) -> dict[str, Any]:
        """Further arguments of a set's `SpeechDataset`."""
        return {}

    def save(self, folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the model into a folder."""
        self.spec.model_copy(update={"provenance": {**self.spec.provenance, **about}}).save(folder, weights)
