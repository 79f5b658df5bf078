"""Language models that are networks as a task: words of a text in, log probabilities of the following ones out.

Shards hold blocks of numbered words. In batches and figures a word counts as a second of audio, and a block as an
utterance: both are what the lengths of batches are limited by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import torch
from devices.transfers import known_on_host
from recognition.systems.base import SystemTaskConfig
from speech.lm import LmSpec
from speech.lm.next_word import next_word_losses, predicted_words
from storage.batching import BatchLimits

if TYPE_CHECKING:
    from torch import Tensor

    from devices.padding import CalledNetwork
    from recognition.data.dataset import Batch, SpeechDataset
    from speech.models.networks.base import TrainableNetwork


class LanguageModelTaskConfig(SystemTaskConfig):
    """Which language model is trained, and on which text."""

    kind: Literal["language_model"] = "language_model"
    spec: LmSpec
    """The network and the words that it predicts."""

    def build_network(self) -> TrainableNetwork:
        """The network, with random weights."""
        return self.spec.build_model()

    def build(self, seed: int) -> LanguageModelTask:
        """The task at one process; nothing in it is random."""
        return LanguageModelTask()


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
        self,
        network: TrainableNetwork,
        data: SpeechDataset,
        limits: BatchLimits,
        device: torch.device,
        loss_only: bool = False,
    ) -> dict[str, float]:
        """Loss per word of a set, and the utterances lost with damaged shards, if any."""
        from devices.padding import PaddedNetwork, frame_multiple
        from recognition.validation import over_batches

        padded = PaddedNetwork(network, network.num_frames, frame_multiple(device))
        loss, items = 0.0, 0

        def add(batch: Batch) -> None:
            nonlocal loss, items
            loss += float(self.losses(padded, batch, device)[0].double().sum())
            items += self.items(batch)

        lost = over_batches(data, limits, add)
        return {"loss": loss / max(1, items)} | lost
