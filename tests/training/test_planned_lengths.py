"""Batches are planned with the lengths that augmentation gives their utterances."""

import numpy as np
import tones
import torch

from recognition.data.augmentation import Augmenter
from speech.features import WaveAugment
from training.learner.compute import Learner, open_set

LONGER = {"speed_factors": [0.7, 1.0], "pauses": {"probability": 0.3, "edge_s": [0.0, 2.0]}}


def test_planned_lengths_equal_the_augmented_ones(corpus, tmp_path):
    job = corpus.job(tmp_path, augment=LONGER)
    augmenter, data = Augmenter(job.task.augment, tones.RATE, job.seed), open_set(job, "train")
    rows = np.arange(len(data))
    planned = augmenter.heard_seconds(data.ids(rows), data.durations, 3)
    batch = augmenter.drawn(data.batch(rows), 3)
    _, lengths = WaveAugment(job.task.augment, tones.RATE).apply(batch.inputs, batch.lengths, batch.drawn)
    np.testing.assert_allclose(planned, lengths.numpy() / tones.RATE)
    assert (planned > data.durations + 0.5).any()


def test_pauses_are_planned_from_their_first_epoch_on(corpus, tmp_path):
    pauses = {"probability": 1.0, "edge_s": [1.0, 2.0]}
    job = corpus.job(tmp_path, augment={"gain_db": 3.0, "pauses": pauses | {"first_epoch": 3}})
    always = corpus.job(tmp_path, augment={"gain_db": 3.0, "pauses": pauses})
    data, rows = open_set(job, "train"), np.arange(4)
    seconds, learner = data.durations[rows], Learner(job, torch.device("cpu"))
    late, early = learner.task.augmenter, Augmenter(always.task.augment, tones.RATE, job.seed)
    for epoch in range(4):
        planned = late.heard_seconds(data.ids(rows), seconds, epoch)
        _, frames = late.features(learner.task.frontend, late.drawn(data.batch(rows), epoch), torch.device("cpu"))
        np.testing.assert_allclose(frames.numpy() / 100, planned, atol=0.03)
        expected = early.heard_seconds(data.ids(rows), seconds, epoch) if epoch >= 2 else seconds
        np.testing.assert_allclose(planned, expected)
        assert (planned > seconds + 1.9).all() == (epoch >= 2)


def test_planned_lengths_without_augmentation_are_those_of_the_index(corpus, tmp_path):
    job = corpus.job(tmp_path)
    augmenter, data = Augmenter(job.task.augment, tones.RATE, job.seed), open_set(job, "train")
    assert augmenter.heard_seconds(data.ids(np.arange(len(data))), data.durations, 0) is data.durations


def test_lengthened_batches_keep_to_batch_seconds(corpus, tmp_path, monkeypatch):
    made, change = [], WaveAugment.apply

    def watched(self, waves, lengths, drawn):
        made.append(change(self, waves, lengths, drawn))
        return made[-1]

    monkeypatch.setattr(WaveAugment, "apply", watched)
    tones.train_here(corpus.job(tmp_path, epochs=2, batch_seconds=4.0, augment=LONGER))
    sizes = [(len(waves), waves.shape[1] * len(waves) / tones.RATE) for waves, _ in made]
    assert sum(count for count, _ in sizes) == 2 * 48
    assert max(seconds for count, seconds in sizes if count > 1) <= 4.0
    assert max(seconds for _, seconds in sizes) > 2.0
