"""Language models that are networks as a task: words of a text in, log probabilities of the following ones out.

Shards hold blocks of numbered words. In batches and figures a word counts as a second of audio, and a block as an
utterance: both are what the lengths of batches are limited by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from configurable.lazy import torch
from devices.transfers import known_on_host
from speech.lm import LmSpec
from speech.lm.next_word import next_word_losses, predicted_words
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardReader

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.data.dataset import Batch, SpeechDataset
    from recognition.systems.base import CalledNetwork
    from recognition.validation import Batching
    from speech.models.networks.base import TrainableNetwork


class LanguageModelTaskConfig(BaseModel):
    """What is trained, and on which text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)
    members: ClassVar[tuple[str, ...]] = LmSpec.members

    kind: Literal["language_model"] = "language_model"
    spec: LmSpec
    """The network and the words that it predicts."""
    train_url: str
    """Store of the training text's index and shards."""
    valid_url: str
    """Store of the validation text's index and shards."""

    def build_network(self) -> TrainableNetwork:
        """The network, with random weights."""
        return self.spec.build_model()

    def build(self, seed: int) -> LanguageModelTask:
        """The task at one process; nothing in it is random."""
        return LanguageModelTask()

    def open_set(
        self,
        name: Literal["train", "valid"],
        cache: Path,
        cache_bytes: int | None,
        quarantine: Callable[[int], ShardQuarantine],
        checked: bool = False,
    ) -> SpeechDataset:
        """Open the training or validation text, see `training.learner.task.TaskConfig`."""
        from recognition.data.dataset import SpeechDataset

        store = ObjectStore(self.train_url if name == "train" else self.valid_url)
        index = ShardIndex.read(store)
        return SpeechDataset(index, ShardReader(store, index, cache, cache_bytes), quarantine=quarantine(len(index)))

    def save(self, folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the model into a folder."""
        self.spec.model_copy(update={"provenance": {**self.spec.provenance, **about}}).save(folder, weights)


class LanguageModelTask:
    """A language model's task at one process, see `training.learner.task.Task`."""

    def to(self, device: torch.device) -> None:
        """Nothing is to be moved."""

    def prepare_draws(self) -> None:
        """Nothing is drawn."""

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """The batch: text is not augmented."""
        return batch

    def heard_seconds(self, ids: Sequence[str], seconds: NDArray[np.float64], epoch: int) -> NDArray[np.float64]:
        """The lengths as they are."""
        return seconds

    def losses(self, network: CalledNetwork, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
        """Sum over each block's words of the negative log probability."""
        inputs, lengths = (part.to(device, non_blocking=True) for part in (batch.inputs, batch.lengths))
        words = network.num_frames(batch.lengths)
        with known_on_host(frames=words, inputs=batch.inputs):
            outputs, _ = network(inputs, lengths)
        return next_word_losses(outputs, batch.inputs, batch.lengths), 0

    def items(self, batch: Batch) -> int:
        """Number of words that are predicted."""
        return predicted_words(batch.inputs, batch.lengths)

    def validate(
        self, network: TrainableNetwork, data: SpeechDataset, limits: Batching, device: torch.device
    ) -> dict[str, float]:
        """Loss per word of a set, and the utterances lost with damaged shards, if any."""
        from devices.padding import PaddedNetwork, frame_multiple
        from recognition.data.dataset import read_ahead

        padded = PaddedNetwork(network, network.num_frames, frame_multiple(device))
        loss, items, unreadable = 0.0, 0, 0
        plan = plan_epoch(data.durations, batch_seconds=limits.batch_seconds, max_batch=limits.max_batch)
        with torch.inference_mode():
            for batch in read_ahead(data.batch, plan):
                unreadable += batch.unreadable
                if batch.ids:
                    loss += float(self.losses(padded, batch, device)[0].double().sum())
                    items += self.items(batch)
        return {"loss": loss / max(1, items)} | ({"unreadable": float(unreadable)} if unreadable else {})
