"""Seven of 2,000 spoken digits of 0.2 to 0.4 s had empty transcripts: Silero VAD found no speech in them."""

import numpy as np
import pytest
import torch

from speech.audio import decode_audio
from speech.vad import EverythingConfig, SileroConfig, Vad, build_vad, cut

RATE = 8000


class Deaf(Vad):
    """Finds no speech."""

    def speech(self, wave, sample_rate):
        return []


def pieces(wave, vad=None, rate=RATE):
    return [(piece.start, len(piece.wave)) for piece in cut(vad or Deaf(EverythingConfig()), [(wave, rate)], 30.0)]


def noise(kind, level_db, samples, rate=RATE, seed=0):
    """Noise whose power falls by 0 (white), 1 (pink) or 2 (brown) times 3 dB per octave."""
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    spectrum = torch.fft.rfft(wave)
    bins = torch.arange(len(spectrum)).clamp(min=max(1, 20 * samples // rate))
    wave = torch.fft.irfft(spectrum * bins ** (-kind / 2), n=samples)
    return wave / wave.square().mean().sqrt() * 10 ** (level_db / 20)


def word(seconds=0.35, level=0.1):
    """A noise whose level falls by 20 dB, as in "four" without its surroundings."""
    wave = noise(1, 0, int(seconds * RATE))
    return level * wave * torch.logspace(0, -1, len(wave))


def test_short_clip_is_one_piece_though_no_speech_is_found_in_it():
    assert pieces(word()) == [(0.0, 2800)]
    assert pieces(torch.cat([torch.zeros(900), word(), torch.zeros(900)])) == [(0.0, 4600)]


def test_longer_or_very_quiet_clips_are_left_to_the_detector():
    assert pieces(word(1.1)) == []
    assert pieces(word(level=1e-5)) == []
    assert pieces(torch.cat([noise(0, -50, 40 * RATE), word()])) == []  # the last window of a long recording


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["white", "pink", "brown"])
def test_short_noise_and_silence_are_not_recognized(rate, kind):
    lengths = np.random.default_rng(0).integers(rate // 20, rate * 9 // 10, 60)
    for seed, (samples, level) in enumerate(zip(lengths.tolist(), [-60, -50, -40, -30] * 15, strict=True)):
        wave = noise(kind, level, samples, rate, seed)
        rounded = (wave * 32768).round() / 32768
        padded = torch.nn.functional.pad(rounded, (77, 55))  # begins and ends within frames
        assert [pieces(clip, rate=rate) for clip in (wave, rounded, padded)] == [[]] * 3
    for samples in (1, 2, 10, 150, 4000):
        assert pieces(torch.zeros(samples), rate=rate) == []
        assert pieces(torch.full((samples,), 0.1), rate=rate) == []  # an offset


def test_spoken_digits_without_context_are_found(shared_data):
    digits = sorted((shared_data / "fsdd" / "recordings").glob("[24]_nicolas_*.flac"))
    vad = build_vad(SileroConfig())
    waves = [decode_audio(path)[0] for path in digits]
    missed = [wave for wave in waves if not vad.speech(wave, RATE) and len(wave) <= RATE]
    assert len(missed) >= 5
    assert all(pieces(wave, vad) == [(0.0, len(wave))] for wave in missed)
