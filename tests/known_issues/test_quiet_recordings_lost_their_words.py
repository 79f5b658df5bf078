"""Silero heard no speech in quiet recordings: 30 dB lower, the demo's WER was 30 % instead of 3 %."""

import pytest
import torch

from speech.audio import resample
from speech.vad import DETECTORS, EnergyConfig, SileroConfig, build_vad, cut
from speech.vad.levels import frame_levels, leveled

RATE = 16_000
GAINS_DB = (0.0, -20.0, -30.0, -40.0, 20.0)
KINDS = list(DETECTORS)


def gained(wave, gain_db):
    return wave * 10 ** (gain_db / 20)


def noise(seconds, level_db, seed=0):
    return gained(torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(seed)), level_db)


def pieces(kind, wave):
    parts = cut(build_vad(DETECTORS[kind]()), [(wave, RATE)], 30.0)
    return [(part.start, part.start + len(part.wave) / RATE) for part in parts]


@pytest.fixture(scope="module")
def spoken():
    """A command and another one at about −25 dB."""
    pytest.importorskip("espeakng_loader")
    from speech.synthesis.espeak import Engine

    with Engine() as engine:
        said = [engine.speak(text) for text in ("turn the kitchen lights on", "dial seven nine two")]
        waves = [resample(torch.from_numpy(samples / 32768).float(), engine.sample_rate, RATE) for samples in said]
    return [gained(wave / wave.square().mean().sqrt(), -25) for wave in waves]


def with_pauses(waves, level_db):
    parts = [noise(1.5, level_db)]
    for number, wave in enumerate(waves):
        parts += [wave, noise(1.5, level_db, number + 1)]
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_gain_does_not_change_the_pieces(kind, spoken):
    wave = with_pauses(spoken, -75.0)
    expected = pieces(kind, wave)
    assert len(expected) == (1 if kind == "none" else 2)
    for gain in GAINS_DB:
        quieter = pieces(kind, gained(wave, gain))
        assert len(quieter) == len(expected)
        for piece, other in zip(quieter, expected, strict=True):
            assert piece == pytest.approx(other, abs=0.1)


@pytest.mark.parametrize("noise_db", [None, -90.0])
@pytest.mark.parametrize("quiet_db", [-20.0, -40.0])
@pytest.mark.parametrize("kind", ["silero", "energy"])
def test_quiet_speaker_is_heard_beside_a_loud_one(kind, quiet_db, noise_db, spoken):
    loud, quiet = spoken[0], gained(spoken[1], quiet_db)
    wave = with_pauses([loud, quiet, loud, quiet], -200.0 if noise_db is None else noise_db)
    begin = 1.5
    heard = pieces(kind, wave)
    assert len(heard) == 4
    for (start, end), said in zip(heard, [loud, quiet, loud, quiet], strict=True):
        stop = begin + len(said) / RATE
        assert begin - 0.5 < start < begin + 0.1
        assert stop - 0.35 < end < stop + 0.7  # the last sound may be silence
        begin = stop + 1.5


@pytest.mark.parametrize("level_db", [-30.0, -60.0, -90.0])
@pytest.mark.parametrize("cfg", [SileroConfig()], ids=["silero"])
def test_quiet_noise_does_not_become_speech(cfg, level_db):
    assert build_vad(cfg).speech(noise(5, level_db), RATE) == []
    assert build_vad(cfg).speech(torch.zeros(5 * RATE), RATE) == []


def test_quiet_word_that_silero_misses_is_still_a_piece():
    word = noise(0.35, -30) * torch.logspace(0, -1, int(0.35 * RATE))
    for gain in GAINS_DB[:4]:
        assert pieces("silero", gained(word, gain)) == [(0.0, 0.35)]


def test_speakers_are_leveled_and_noise_stays_below():
    loud, quiet = noise(2, -20, 1), noise(2, -60, 2)
    wave = with_pauses([loud, quiet], -90.0)
    levels = frame_levels(leveled(wave, RATE), RATE)[0]
    seconds = [levels[int(start * 50) : int(end * 50)].mean() for start, end in ((2, 3), (5.5, 6.5), (0.1, 0.4))]
    assert seconds[0] == pytest.approx(-20, abs=1)
    assert seconds[1] == pytest.approx(-20, abs=1)
    assert seconds[2] < -45


@pytest.mark.parametrize("samples", [0, 1, 319, 320, 1000])
def test_short_recordings_are_leveled(samples):
    wave = noise(1, -30)[:samples]
    assert leveled(wave, RATE).shape == wave.shape
    assert torch.isfinite(leveled(wave, RATE)).all()


def test_energy_finds_quiet_bursts():
    wave = torch.cat([noise(1, -90, 1), noise(1, -20, 2), noise(2, -90, 3), noise(1, -65, 4), noise(1, -90, 5)])
    intervals = build_vad(EnergyConfig()).speech(wave, RATE)
    assert [edge / RATE for interval in intervals for edge in interval] == pytest.approx([1, 2, 4, 5], abs=0.03)
