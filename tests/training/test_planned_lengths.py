"""Batches are planned with the lengths that augmentation gives their utterances."""

import numpy as np
import tones
import torch

from speech.features import WaveAugment
from speech.features.augment import utterance_seeds
from training.compute import Learner, open_set

LONGER = {"speed_factors": [0.7, 1.0], "pauses": {"probability": 0.3, "edge_s": [0.0, 2.0]}}


def test_a_learner_knows_the_lengths_that_it_will_train(corpus, tmp_path):
    job = corpus.job(tmp_path, augment=LONGER)
    learner, data = Learner(job, torch.device("cpu")), open_set(job, job.train_url)
    rows = np.arange(len(data))
    planned = learner.heard_seconds(data.ids(rows), data.durations, 3)
    batch = data.batch(rows)
    _, lengths = learner.wave_augment(batch.inputs, batch.lengths, utterance_seeds(job.seed, 3, batch.ids))
    np.testing.assert_allclose(planned, lengths.numpy() / tones.RATE)
    assert (planned > data.durations + 0.5).any()


def test_without_augmentation_they_are_those_of_the_index(corpus, tmp_path):
    job = corpus.job(tmp_path)
    learner, data = Learner(job, torch.device("cpu")), open_set(job, job.train_url)
    assert learner.heard_seconds(data.ids(np.arange(len(data))), data.durations, 0) is data.durations


def test_lengthened_batches_keep_to_batch_seconds(corpus, tmp_path, monkeypatch):
    made, change = [], WaveAugment.__call__

    def watched(self, waves, lengths, draws):
        made.append(change(self, waves, lengths, draws))
        return made[-1]

    monkeypatch.setattr(WaveAugment, "__call__", watched)
    tones.train_here(corpus.job(tmp_path, epochs=2, batch_seconds=4.0, augment=LONGER))
    sizes = [(len(waves), waves.shape[1] * len(waves) / tones.RATE) for waves, _ in made]
    assert sum(count for count, _ in sizes) == 2 * 48
    assert max(seconds for count, seconds in sizes if count > 1) <= 4.0
    assert max(seconds for _, seconds in sizes) > 2.0
