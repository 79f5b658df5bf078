"""One generator drew for the whole batch, and pink noise was shaped over the batch's padded length: the augmentation of
an utterance depended on its position and its batch."""

import torch

from speech.features.augment import AugmentConfig, SpecAugment, perturb_waves, utterance_seeds

RATE = 16000


def test_augmentation_is_independent_of_batch_and_position():
    config = AugmentConfig(speed_factors=(0.9, 1.0, 1.1), noise={"snr_db": (5, 15)}, gain_db=6)
    wave = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0)) * 0.1
    alone, length = perturb_waves(wave, torch.tensor([8000]), RATE, config, utterance_seeds(1, 2, ["a"]))
    batch = torch.zeros(3, 20000)
    batch[:2], batch[2, :8000] = 0.05, wave
    together, lengths = perturb_waves(
        batch, torch.tensor([20000, 15000, 8000]), RATE, config, utterance_seeds(1, 2, ["x", "y", "a"])
    )
    assert lengths[2] == length[0]
    torch.testing.assert_close(together[2, : int(length)], alone[0], atol=1e-5, rtol=0)


def test_masks_are_independent_of_the_batch():
    spec, feats = SpecAugment(AugmentConfig()), torch.ones(3, 100, 20)
    together = spec(feats, torch.tensor([100, 50, 80]), utterance_seeds(1, 2, ["x", "y", "a"]))
    alone = spec(feats[2:, :80], torch.tensor([80]), utterance_seeds(1, 2, ["a"]))
    assert torch.equal(together[2, :80], alone[0])
