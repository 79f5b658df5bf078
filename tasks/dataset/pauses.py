"""Pauses that are put around training utterances when shards are written, where labels are to be aligned with them.

An utterance's pauses depend on the run's seed and the utterance's id only: a shard that is written again is the same.
"""

import torch
from torch import Tensor

from speech.features.augment import PauseConfig, utterance_seeds
from speech.features.augment.pauses import Pauses


class ShardPauses:
    """Draws and inserts the pauses.

    Args:
        config: `data.pauses`.
        sample_rate: Of the shards, Hz.
        seed: The run's seed.
    """

    def __init__(self, config: PauseConfig, sample_rate: int, seed: int) -> None:
        self._pauses, self._seed = Pauses(config, sample_rate), seed

    def wanted(self, utterance: str) -> bool:
        """Whether an utterance, given by its id, gets any."""
        length = torch.ones(1, dtype=torch.long)
        return bool(self._pauses.lengths(length, self._seeds(utterance)) > length)

    def around(self, wave: Tensor, utterance: str) -> Tensor:
        """An utterance with its pauses.

        Args:
            wave: `[num_samples]` in ±1.
            utterance: Its id.

        Returns:
            `[num_samples']`.
        """
        changed, _ = self._pauses(wave[None], torch.tensor([len(wave)]), self._seeds(utterance))
        return changed[0]

    def _seeds(self, utterance: str) -> list[int]:
        return utterance_seeds(self._seed, 0, [utterance])
