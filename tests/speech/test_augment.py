"""Masks, speed, gain and generated noise; test_augment_batch.py tests properties of all augmentations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from speech.audio import level_db
from speech.features.augment import AugmentConfig, SpecAugment, perturb_waves
from speech.features.augment.draws import seeds_of, uniforms


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    time_masks=st.integers(0, 3),
    freq_masks=st.integers(0, 3),
    share=st.floats(0, 1),
)
def test_masks_are_bounded_and_never_touch_padding(lengths, seed, time_masks, freq_masks, share):
    config = AugmentConfig(
        time_masks=time_masks, freq_masks=freq_masks, time_mask_share=share, time_mask_frames=25, freq_mask_bins=6
    )
    feats = torch.ones(len(lengths), max(lengths) + 3, 20)
    masked = SpecAugment(config)(feats, torch.tensor(lengths), seeded(seed))
    assert feats.all()  # a copy
    for row, length in zip(masked, lengths, strict=True):
        assert row[length:].all()
        inside = row[:length] == 0
        if length == 0:
            continue
        frames, bins = inside.all(1).sum(), inside.all(0).sum()
        if bins < 20:
            assert frames <= time_masks * min(25, math.floor(share * length))
        if frames < length:
            assert bins <= freq_masks * 6
        # What is masked is exactly the union of whole rows and whole columns.
        assert torch.equal(inside, inside.all(1, keepdim=True) | inside.all(0, keepdim=True))


def test_masks_differ_by_utterance_and_depend_on_the_seed():
    feats, lengths = torch.ones(8, 100, 40), torch.full((8,), 100)
    augment = SpecAugment(AugmentConfig())
    first = augment(feats, lengths, seeded(1))
    assert torch.equal(first, augment(feats, lengths, seeded(1)))
    assert not torch.equal(first, augment(feats, lengths, seeded(2)))
    assert len({tuple(row.flatten().tolist()) for row in first}) == 8


def test_mask_widths_and_positions_are_uniform():
    config = AugmentConfig(time_masks=1, freq_masks=0, time_mask_frames=9, time_mask_share=1.0)
    masked = SpecAugment(config)(torch.ones(20000, 20, 1), torch.full((20000,), 20), seeded()).squeeze(2) == 0
    counts = torch.bincount(masked.sum(1), minlength=10) / 20000
    torch.testing.assert_close(counts, torch.full((10,), 0.1), atol=0.01, rtol=0)
    starts = masked[masked.sum(1) == 5].float().argmax(1)
    assert starts.min() == 0
    assert starts.max() == 15
    torch.testing.assert_close(
        torch.bincount(starts, minlength=16) / len(starts), torch.full((16,), 1 / 16), atol=0.02, rtol=0
    )


def test_disabled_masks_change_nothing():
    feats, lengths = torch.ones(2, 50, 10), torch.tensor([50, 50])
    assert SpecAugment(AugmentConfig(enabled=False))(feats, lengths, seeded()) is feats
    assert SpecAugment(AugmentConfig(time_masks=0, freq_masks=0))(feats, lengths, seeded()) is feats
    waves = torch.ones(2, 100)
    config = AugmentConfig(enabled=False, gain_db=6, speed_factors=(0.9,), noise={"snr_db": (0, 1)})
    assert perturb_waves(waves, torch.tensor([100, 100]), 16000, config, seeded())[0] is waves


def test_masks_wider_than_the_features_are_limited():
    masked = SpecAugment(AugmentConfig(freq_mask_bins=50))(torch.ones(4, 30, 8), torch.full((4,), 30), seeded())
    assert masked.shape == (4, 30, 8)


def tones(frequencies, rate=16000, seconds=1.0):
    time = torch.arange(int(rate * seconds)) / rate
    return torch.stack([0.3 * torch.sin(2 * math.pi * frequency * time) for frequency in frequencies])


def pitch(wave, rate=16000):
    spectrum = torch.fft.rfft(wave * torch.hann_window(len(wave)))
    return float(spectrum.abs().argmax()) * rate / len(wave)


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.25])
def test_speed_changes_length_and_pitch(factor):
    waves, lengths = tones([400.0, 1000.0]), torch.tensor([16000, 12000])
    config = AugmentConfig(speed_factors=(factor,))
    fast, new_lengths = perturb_waves(waves, lengths, 16000, config, seeded())
    assert new_lengths.tolist() == [math.ceil(16000 / factor - 1e-6), math.ceil(12000 / factor - 1e-6)]
    assert fast.shape == (2, int(new_lengths.max()))
    for row, frequency in enumerate((400.0, 1000.0)):
        assert pitch(fast[row, : new_lengths[row]]) == pytest.approx(frequency * factor, rel=0.01)
    assert not fast[1, new_lengths[1] :].any()


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(400, 4000), min_size=1, max_size=5))
def test_batch_with_mixed_speeds_equals_its_utterances(seed, lengths):
    config = AugmentConfig(speed_factors=(0.9, 1.0, 1.1))
    batch = torch.full((len(lengths), max(lengths)), math.nan)
    for row, length in enumerate(lengths):
        batch[row, :length] = torch.randn(length, generator=seeded(row)) * 0.1
    fast, new_lengths = perturb_waves(batch, torch.tensor(lengths), 16000, config, seeded(seed))
    assert torch.isfinite(fast).all()
    seeds = seeds_of(seeded(seed), len(lengths))
    factors = [config.speed_factors[int(draw * 3)] for draw in uniforms(seeds, "speed", 1)[:, 0].tolist()]
    for row, (length, factor) in enumerate(zip(lengths, factors, strict=True)):
        alone, count = perturb_waves(
            batch[row : row + 1, :length],
            torch.tensor([length]),
            16000,
            AugmentConfig(speed_factors=(factor,)),
            seeded(),
        )
        assert count.tolist() == [new_lengths[row]]
        torch.testing.assert_close(fast[row, : int(count)], alone[0], atol=1e-5, rtol=0)
        assert not fast[row, int(count) :].any()


@pytest.mark.parametrize("snr", [0.0, 10.0, 20.0])
def test_noise_has_the_requested_level(snr):
    waves, lengths = tones([400.0] * 6), torch.tensor([16000, 16000, 16000, 8000, 8000, 8000])
    noisy, new_lengths = perturb_waves(waves, lengths, 16000, AugmentConfig(noise={"snr_db": (snr, snr)}), seeded())
    assert torch.equal(new_lengths, lengths)
    for clean, mixed, length in zip(waves, noisy, lengths.tolist(), strict=True):
        noise = (mixed - clean)[:length]
        assert level_db(clean[:length]) - level_db(noise) == pytest.approx(snr, abs=0.05)
        assert not mixed[length:].any()


def test_noise_is_white_or_pink():
    waves = tones([400.0] * 40)
    noisy, _ = perturb_waves(waves, torch.full((40,), 16000), 16000, AugmentConfig(noise={"snr_db": (0, 0)}), seeded())
    power = torch.fft.rfft(noisy - waves).abs().square()
    slopes = (power[:, 100:400].mean(1) / power[:, 4000:8000].mean(1)).log10() * 10
    assert (slopes < 3).sum() + (slopes > 9).sum() == 40
    assert 8 < (slopes < 3).sum() < 32


def test_silence_stays_silent():
    noisy, _ = perturb_waves(
        torch.zeros(2, 1000), torch.tensor([1000, 0]), 16000, AugmentConfig(noise={"snr_db": (0, 20)}), seeded()
    )
    assert not noisy.any()


def test_gain_is_uniform_in_its_range():
    waves = tones([400.0], seconds=0.1).repeat(500, 1)
    louder, _ = perturb_waves(waves, torch.full((500,), 1600), 16000, AugmentConfig(gain_db=6.0), seeded())
    gains = 20 * (louder.abs().amax(1) / waves.abs().amax(1)).log10()
    assert gains.abs().max() <= 6.0001
    assert gains.min() < -5.5
    assert gains.max() > 5.5
    assert gains.mean().abs() < 0.6


def test_perturbation_is_determined_by_the_generator():
    waves, lengths = tones([300.0, 500.0, 700.0]), torch.tensor([16000, 15000, 14000])
    config = AugmentConfig(speed_factors=(0.9, 1.0, 1.1), noise={"snr_db": (5, 15)}, gain_db=3)
    first, second = (perturb_waves(waves, lengths, 16000, config, seeded(3)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(waves, tones([300.0, 500.0, 700.0]))


def test_empty_batch_is_accepted():
    config = AugmentConfig(speed_factors=(0.9,), noise={"snr_db": (5, 15)}, gain_db=3)
    waves, lengths = perturb_waves(torch.zeros(0, 100), torch.zeros(0, dtype=torch.long), 16000, config, seeded())
    assert waves.shape == (0, 100)
    assert lengths.shape == (0,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed_factors", (0.1,)), ("time_mask_share", 1.5), ("time_masks", -1)],
)
def test_impossible_configurations_name_their_field(field, value):
    with pytest.raises(ValidationError, match=field):
        AugmentConfig(**{field: value})


@pytest.mark.gpu
def test_gpu_equals_cpu():
    config = AugmentConfig(speed_factors=(0.9, 1.0, 1.1), noise={"snr_db": (5, 15)}, gain_db=3)
    waves, lengths = tones([300.0, 500.0, 700.0]), torch.tensor([16000, 15000, 14000])
    expected, counts = perturb_waves(waves, lengths, 16000, config, seeded(3))
    actual, gpu_counts = perturb_waves(waves.cuda(), lengths.cuda(), 16000, config, seeded(3))
    assert gpu_counts.tolist() == counts.tolist()
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=0)
    feats = torch.ones(3, 80, 20)
    masked = SpecAugment(config)(feats, torch.tensor([80, 60, 5]), seeded(4))
    on_gpu = SpecAugment(config)(feats.cuda(), torch.tensor([80, 60, 5]).cuda(), seeded(4))
    assert torch.equal(on_gpu.cpu(), masked)
