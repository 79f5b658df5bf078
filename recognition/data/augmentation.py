"""Augmentation in training: random draws are made when a batch is loaded, and applied on the training device.

An utterance's augmentation is a pure function of the run's seed, the epoch and the utterance's id, in any process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recognition.data.dataset import Batch
from recognition.data.state_targets import padded_states
from speech.features import SpecAugment, WaveAugment
from speech.features.augment import AugmentConfig, Drawn, utterance_seeds
from speech.frontend import FrontEnd


def distinct(ids: list[str]) -> list[str]:
    """Make ids distinct: a number is appended where a sampled epoch draws an utterance again for the same batch."""
    seen: Counter[str] = Counter()
    names = []
    for name in ids:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _row(drawn: Drawn, row: int) -> Drawn:
    """What was drawn for one utterance."""
    return {name: tensor[row] for name, tensor in drawn.items()}


class Augmenter:
    """The configured augmentation; threads may share it.

    Args:
        config: `train.augment`.
        sample_rate: Sample rate of the waveforms, in Hz.
        seed: The run's seed.
        states_per_frame: Aligned frames to a frame of features.
    """

    def __init__(self, config: AugmentConfig, sample_rate: int, seed: int, states_per_frame: float = 1.0) -> None:
        self._waves, self._feats = WaveAugment(config, sample_rate), SpecAugment(config)
        self._quiet_epochs = config.pauses.first_epoch - 1 if config.pauses else 0
        self._early_waves = WaveAugment(config.before_pauses(), sample_rate) if self._quiet_epochs else self._waves
        self._rate, self._seed, self._states_per_frame = sample_rate, seed, states_per_frame

    def _waves_in(self, epoch: int) -> WaveAugment:
        """The augmentation of waveforms in an epoch, from 0."""
        return self._early_waves if epoch < self._quiet_epochs else self._waves

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """Add the random draws of an epoch's augmentation to a batch, recorded noise included."""
        if not batch.ids:
            return batch
        seeds = utterance_seeds(self._seed, epoch, distinct(batch.ids))
        augment = self._waves_in(epoch)
        waves = augment.draw(batch.lengths, seeds) if batch.inputs.ndim == 2 else {}
        drawn = waves | self._feats.draw(seeds)
        if not drawn or not batch.states.numel():
            return replace(batch, drawn=drawn)
        states = []
        for row, (aligned, length) in enumerate(zip(batch.states, batch.state_lengths.tolist(), strict=True)):
            own = {name: _row(part, row) for name, part in drawn.items()}
            moved = augment.moved(aligned[:length], own) if waves else aligned[:length]
            states.append(self._feats.moved(moved, own, self._states_per_frame))
        lengths = torch.tensor([len(aligned) for aligned in states], dtype=torch.long)
        return replace(batch, drawn=drawn, states=padded_states(states), state_lengths=lengths)

    def features(self, frontend: FrontEnd, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Augmented features [batch, frames, dim] and frames [batch] of a batch from `drawn`, or of part of one.

        The host does not wait for a GPU; `num_frames` gives the frames on the host.
        """
        inputs, lengths = (x.to(device, non_blocking=True) for x in (batch.inputs, batch.lengths))
        if inputs.ndim == 2:
            inputs, lengths = self._waves_for(batch).apply(inputs, lengths, batch.drawn)

        def augment(feats: Tensor, frames: Tensor) -> Tensor:
            return self._feats.apply(feats, frames, batch.drawn)

        augmented: tuple[Tensor, Tensor] = frontend(inputs, lengths, batch.speakers, augment)
        return augmented

    def num_frames(self, frontend: FrontEnd, batch: Batch) -> Tensor:
        """Frames of each utterance that `features` gives [batch], on the host."""
        stored = batch.inputs.ndim == 3
        lengths = batch.lengths if stored else self._waves_for(batch).changed(batch.lengths, batch.drawn)
        return frontend.num_frames(lengths, stored)

    def _waves_for(self, batch: Batch) -> WaveAugment:
        """The augmentation of waveforms that a batch was drawn for."""
        return self._waves if self._waves.steps.keys() <= batch.drawn.keys() else self._early_waves

    def heard_seconds(self, ids: Sequence[str], seconds: NDArray[np.float64], epoch: int) -> NDArray[np.float64]:
        """Duration of utterances in an epoch, after augmentation with speed and pauses.

        Args:
            ids: Ids of the utterances.
            seconds: Duration of each as stored, seconds.
            epoch: The epoch.
        """
        augment = self._waves_in(epoch)
        if not augment.steps:
            return seconds
        samples = torch.from_numpy(np.rint(seconds * self._rate).astype(np.int64))
        heard = augment.lengths(samples, utterance_seeds(self._seed, epoch, ids))
        return heard.numpy() / self._rate
