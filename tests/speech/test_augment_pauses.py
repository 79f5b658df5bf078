"""Pauses as an augmentation; test_augment_batch.py tests properties of all augmentations."""

import math

import pytest
import torch
from pydantic import ValidationError

from speech.audio import level_db
from speech.features.augment import AUGMENTATIONS, AugmentConfig, PauseConfig, WaveAugment, utterance_seeds

RATE = 16000
BLOCK = RATE // 20


def utterance(seconds=1.0, hum=0.0):
    """A tone, with a gap of 0.1 s from 0.6 s on that has a softer hum of another frequency."""
    time = torch.arange(int(seconds * RATE)) / RATE
    wave = 0.3 * torch.sin(2 * math.pi * 400 * time)
    gap = slice(int(0.6 * RATE), int(0.7 * RATE))
    wave[gap] = hum * torch.sin(2 * math.pi * 1500 * time[gap])
    return wave


def paused(wave, seed=1, **options):
    """An utterance with its pauses, and the samples of these before, within and after it."""
    step = AUGMENTATIONS["pauses"].build(PauseConfig(**{"probability": 1.0} | options), RATE)
    seeds, lengths = utterance_seeds(seed, 0, ["u"]), torch.tensor([len(wave)])
    padded, count = step(wave[None], lengths, seeds)
    return padded[0, : int(count)], step._added(lengths, step._draws(seeds))[0].tolist()


def pieces(padded, wave, added):
    """The three pauses; asserts that the rest is the utterance, whole and in order."""
    before, within, after = added
    rest = padded[before : len(padded) - after]
    cut = int(0.6 * RATE) + BLOCK // 2  # the middle of the first of the quietest blocks
    assert torch.equal(torch.cat([rest[:cut], rest[cut + within :]]), wave)
    return padded[:before], rest[cut : cut + within], padded[len(padded) - after :]


@pytest.mark.parametrize("seed", range(5))
def test_utterance_is_complete_with_a_pause_at_its_quietest_place(seed):
    wave = utterance()
    padded, added = paused(wave, seed, kinds=("zeros",))
    assert all(not part.any() for part in pieces(padded, wave, added))
    assert 0 < sum(added) == len(padded) - len(wave)


def test_lengths_are_drawn_within_ranges_favouring_short_ones():
    config = PauseConfig(probability=0.5, edge_s=(0.1, 0.5), inner_s=(0.0, 0.2))
    step = AUGMENTATIONS["pauses"].build(config, RATE)
    seeds = utterance_seeds(1, 0, [str(number) for number in range(2000)])
    added = step._added(torch.full((2000,), RATE), step._draws(seeds)).double() / RATE
    given = added[added.sum(1) > 0]
    assert 0.45 < len(given) / 2000 < 0.55
    for column, (low, high) in enumerate(((0.1, 0.5), (0.0, 0.2), (0.1, 0.5))):
        values = given[:, column]
        assert low - 1e-4 <= values.min() < low + 0.02
        assert high - 0.02 < values.max() <= high
        assert (values < low + (high - low) / 4).double().mean() == pytest.approx(0.5, abs=0.06)
    assert torch.corrcoef(given.T).sub(torch.eye(3)).abs().max() < 0.1  # each drawn by itself


def test_noise_has_a_level_relative_to_the_utterance():
    for gain in (1.0, 0.01):
        wave = utterance() * gain
        options = {"kinds": ("noise",), "level_db": (-30.0, -30.0), "edge_s": (0.5, 0.5), "inner_s": (0.5, 0.5)}
        for seed in range(4):
            for part in pieces(*_with(wave, seed, options)):
                assert level_db(part) - level_db(wave) == pytest.approx(-30.0, abs=0.01)


def _with(wave, seed, options):
    padded, added = paused(wave, seed, **options)
    return padded, wave, added


def test_levels_are_drawn_from_their_range():
    wave, levels = utterance(), []
    for seed in range(60):
        padded, added = paused(wave, seed, kinds=("noise",), edge_s=(0.2, 0.2), level_db=(-50.0, -10.0))
        levels.append(level_db(padded[: added[0]]) - level_db(wave))
    assert -50.1 < min(levels) < -44
    assert -16 < max(levels) < -9.9


def test_room_tone_has_the_spectrum_of_the_quietest_part():
    wave = utterance(hum=0.003)
    options = {"kinds": ("room",), "edge_s": (0.4, 0.4), "inner_s": (0.4, 0.4)}
    quiet = wave[int(0.6 * RATE) : int(0.6 * RATE) + BLOCK]
    for part in pieces(*_with(wave, 1, options)):
        assert level_db(part) == pytest.approx(level_db(quiet), abs=0.01)
        power = torch.fft.rfft(part).abs().square()
        hertz = torch.arange(len(power)) * RATE / len(part)
        assert power[(hertz > 1400) & (hertz < 1600)].sum() > 0.9 * power.sum()


def test_room_tone_of_digital_silence_is_silent():
    padded, added = paused(utterance(), kinds=("room",))
    assert sum(added)
    assert all(not part.any() for part in pieces(padded, utterance(), added))


@pytest.mark.parametrize("length", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_shortest_utterances_get_pauses_too(length):
    wave = torch.randn(length, generator=torch.Generator().manual_seed(0))
    for kind in ("zeros", "noise", "room"):
        padded, added = paused(wave, kinds=(kind,), edge_s=(0.01, 0.01), inner_s=(0.01, 0.01))
        assert len(padded) == length + sum(added) == length + 3 * RATE // 100
        assert torch.isfinite(padded).all()


def test_room_tone_contains_noise_added_before():
    """Pauses come last: their room tone is that of the augmented utterance, and zeros stay zeros."""
    assert list(AUGMENTATIONS).index("pauses") == 4
    config = AugmentConfig(noise={"snr_db": (10, 10)}, pauses=PauseConfig(probability=1.0, kinds=("zeros",)))
    padded, _ = WaveAugment(config, RATE)(utterance()[None], torch.tensor([RATE]), utterance_seeds(1, 0, ["u"]))
    assert int((padded == 0).sum()) > 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("probability", 1.5), ("edge_s", (0.5, 0.1)), ("inner_s", (-0.1, 0.1)), ("edge_s", (0, 11)), ("kinds", ())],
)
def test_impossible_configurations_name_their_field(field, value):
    with pytest.raises(ValidationError, match=field):
        PauseConfig(**{field: value})
