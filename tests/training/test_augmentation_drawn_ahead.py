"""Random values of augmentation are drawn when a batch is loaded; the training step only applies them."""

import numpy as np
import pytest
import soundfile
import tones
import torch

from recognition.data.augmentation import Augmenter
from speech.features import AugmentConfig
from speech.features.augment import draws
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader

CPU = torch.device("cpu")
EVERYTHING = {
    "speed_factors": [0.9, 1.0, 1.1],
    "reverb": {"probability": 0.6, "rooms": 5},
    "gain_db": 6,
    "pauses": {"probability": 0.8},
    "time_warp_frames": 5,
    "time_mask_frames": 3,
    "freq_mask_bins": 3,
}
ROWS = [3, 5, 3, 9, 3, 20]
"""Of a sampled epoch: one utterance comes three times."""
# Printed when the training step still drew, one utterance after the other: frames, and mean magnitudes of features.
GOLDEN_FRAMES = [98, 87, 72, 44, 69, 83]
GOLDEN = [4.157521, 1.293061, 0.404144, 0.744978, 3.518326, 0.478748]


@pytest.fixture(scope="module")
def parts(corpus, tmp_path_factory):
    """A learner whose job augments in every way, and its training set."""
    folder = tmp_path_factory.mktemp("augmented")
    rng = np.random.default_rng(1)
    for number, rate in enumerate((8000, 16000)):
        soundfile.write(folder / f"{number}.wav", rng.normal(0, 0.1, 9000), rate)
    noise = {"files": [str(folder)], "file_share": 0.5, "probability": 0.8}
    job = corpus.job(folder, augment={**EVERYTHING, "noise": noise})
    learner, data = Learner(job, CPU), open_set(job, "train")
    return learner, Loader(data, learner.task, CPU)


def features(learner, batch):
    return learner.task.features(batch, CPU)


def test_features_equal_those_of_augmentation_in_the_step(parts):
    learner, load = parts
    feats, frames = features(learner, load(ROWS, 4))
    means = [float(frames_of[:count].abs().mean()) for frames_of, count in zip(feats, frames.tolist(), strict=True)]
    assert frames.tolist() == GOLDEN_FRAMES
    assert means == pytest.approx(GOLDEN, rel=0, abs=1e-4), means


def test_every_occurrence_of_an_utterance_is_augmented_in_its_own_way(parts):
    learner, load = parts
    feats, frames = features(learner, load(ROWS, 4))
    alone, count = features(learner, load([3], 4))
    assert count[0] == frames[0]
    torch.testing.assert_close(alone[0], feats[0, : int(count)], atol=2e-3, rtol=1e-4)
    for row, other in ((0, 2), (0, 4), (2, 4)):
        assert not torch.equal(feats[row], feats[other])


@pytest.mark.parametrize("which", [slice(0, 3), slice(3, 6), slice(6, 11)])
def test_part_of_a_batch_is_augmented_as_if_loaded_separately(parts, which):
    learner, load = parts
    rows = list(range(11))
    wanted, got = features(learner, load(rows[which], 2)), features(learner, load(rows, 2).part(which))
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[0], wanted[0])


def test_draws_can_be_reused_for_portions_of_a_batch(parts):
    """A batch that does not fit into a GPU's memory is computed again, in portions."""
    learner, load = parts
    batch = load(ROWS, 1)
    first, again = features(learner, batch), features(learner, batch)
    assert torch.equal(first[0], again[0])


def test_a_training_step_draws_nothing(parts, monkeypatch):
    learner, load = parts
    batch = load(ROWS, 1)
    monkeypatch.setattr(draws, "stream", None)
    assert learner.gradient(batch, 1).loss > 0
    with pytest.raises(TypeError):
        load(ROWS, 1)


def test_masks_of_stored_features_are_drawn_by_the_loader(corpus, tmp_path):
    """Without waveforms there is nothing to draw for them."""
    job = corpus.job(tmp_path)
    data = open_set(job, "train")
    augmenter = Augmenter(AugmentConfig(freq_mask_bins=3), tones.RATE, 1)
    batch = data.batch(range(3))
    batch.inputs, batch.lengths = torch.ones(3, 40, 16), torch.tensor([40, 30, 20])
    drawn = augmenter.drawn(batch, 0)
    assert list(drawn.drawn) == ["masks"]
    feats, frames = augmenter.features(Learner(job, CPU).task.frontend, drawn, CPU)
    assert frames.tolist() == [40, 30, 20]
    assert bool((feats == 0).any())
