"""Voice activity detection: what detectors find, and where recordings are cut."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forks import Forkable
from hypothesis import given, settings
from hypothesis import strategies as st
from silero_vad import load_silero_vad
from support import ROOT

from speech import vad as vads
from speech.audio import decode_audio
from speech.vad import (
    DETECTORS,
    EnergyConfig,
    EverythingConfig,
    SileroConfig,
    SpeechSegment,
    Vad,
    build_vad,
    cut,
    default_vad,
    silero,
)

RATE = 1000
EVERYTHING = build_vad(EverythingConfig())


class NonZero(Vad):
    """Finds speech where samples are not zero, to the sample."""

    def speech(self, wave, sample_rate):
        edges = np.flatnonzero(np.diff((wave.numpy() != 0).astype(int), prepend=0, append=0))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def told(**fields):
    return NonZero(EverythingConfig(**fields))


def recording(*parts):
    """Speech (ones) of some seconds, pauses where they are negative."""
    return torch.cat([torch.full((round(abs(part) * RATE),), float(part > 0)) for part in parts])


def cut_at(vad, wave, max_seconds=30.0, block=10**9, rate=RATE):
    pieces = list(cut(vad, [(part, rate) for part in wave.split(block)], max_seconds))
    for piece in pieces:
        start = round(piece.start * rate)
        assert torch.equal(piece.wave, wave[start : start + len(piece.wave)])
    return [(round(piece.start, 3), round(len(piece.wave) / rate, 3)) for piece in pieces]


# --- without a detector


@settings(max_examples=100)
@given(
    samples=st.integers(0, 5000),
    rate=st.sampled_from([100, 997, 8000]),
    max_seconds=st.floats(0.02, 3.0),
    seed=st.integers(0, 5),
)
def test_pieces_without_a_detector_cover_every_sample_once(samples, rate, max_seconds, seed):
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    pieces = [piece.wave for piece in cut(EVERYTHING, [(wave, rate)], max_seconds)]
    assert torch.equal(torch.cat([*pieces, torch.empty(0)]), wave)
    limit = max(3, int(max_seconds * rate))
    assert all(len(piece) <= limit for piece in pieces)
    assert all(len(piece) >= limit * 2 // 3 for piece in pieces[:-1])


def test_cut_is_at_the_quietest_place():
    wave = torch.ones(100_000)
    wave[25_000:25_800] = 0.0
    first, second = list(cut(EVERYTHING, [(wave, 1000)], 30.0))[:2]
    assert 25_000 <= len(first.wave) < 25_800
    assert len(second.wave) >= 20_000


@pytest.mark.parametrize("kind", ["told", "none"])
def test_blocks_are_cut_like_a_whole_recording(kind):
    wave = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    wave[700:1800] = wave[4000:4300] = 0.0
    vad = EVERYTHING if kind == "none" else told()
    assert cut_at(vad, wave, 8.0, block=700, rate=100) == cut_at(vad, wave, 8.0, rate=100)


# --- pieces


def test_pauses_separate_pieces_with_some_padding():
    wave = recording(-2, 1, -0.5, 1, -1, 2, -0.4)
    assert cut_at(told(pause_s=0.6, pad_s=0.3), wave) == [(1.7, 3.1), (5.2, 2.6)]
    assert cut_at(told(pause_s=0.4, pad_s=0.3), wave) == [(1.7, 1.55), (3.25, 1.55), (5.2, 2.6)]
    assert cut_at(told(pause_s=2, pad_s=0), wave) == [(2.0, 5.5)]


def test_neighbouring_pieces_share_a_pause_that_is_shorter_than_both_paddings():
    assert cut_at(told(pause_s=0.5, pad_s=2), recording(-1, 1, -0.8, 1, -5)) == [(0.0, 2.4), (2.4, 3.4)]


def test_recording_without_speech_gives_no_pieces():
    assert cut_at(told(), recording(-100)) == []
    assert cut_at(told(), torch.empty(0)) == []


def test_long_recordings_are_cut_in_their_last_pause():
    wave = recording(4, -0.2, 3, -0.2, 2, -0.2, 4)
    assert cut_at(told(pause_s=1, pad_s=0.1), wave, 10.0) == [(0.0, 9.5), (9.5, 4.1)]


def test_a_pause_at_the_end_of_the_window_is_cut_in_its_middle():
    assert cut_at(told(pad_s=1), recording(7, -8, 3), 10.0) == [(0.0, 8.0), (14.0, 4.0)]


def test_long_speech_without_a_pause_is_cut():
    pieces = cut_at(told(), torch.ones(25 * RATE), 10.0)
    assert sum(length for _, length in pieces) == pytest.approx(25.0)
    assert all(6.6 < length <= 10 for _, length in pieces[:-1])


@settings(max_examples=150)
@given(
    parts=st.lists(st.tuples(st.floats(0.03, 6.0), st.floats(0.03, 12.0)), min_size=1, max_size=12),
    max_seconds=st.floats(2.0, 9.0),
    pause_s=st.floats(0.0, 2.0),
    pad_s=st.floats(0.0, 1.0),
)
def test_every_sample_of_speech_is_in_one_piece(parts, max_seconds, pause_s, pad_s):
    wave = recording(*(part for speech, pause in parts for part in (speech, -pause)))
    pieces = [
        (round(piece.start * RATE), len(piece.wave))
        for piece in cut(told(pause_s=pause_s, pad_s=pad_s), [(wave, RATE)], max_seconds)
    ]
    assert all(0 < length <= max_seconds * RATE for _, length in pieces)
    assert all(start + length <= two for (start, length), (two, _) in pairwise(pieces))
    covered = torch.zeros(len(wave))
    for start, length in pieces:
        covered[start : start + length] += 1
    assert bool((covered[wave > 0] == 1).all())


# --- detectors


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("samples", [0, 1, 100])
def test_very_short_recordings_are_accepted(kind, samples):
    speech = build_vad(DETECTORS[kind]()).speech(torch.zeros(samples), 8000)
    assert all(0 <= start < end <= samples for start, end in speech)


@pytest.mark.parametrize("rate", [8000, 16000, 22050])
def test_energy_detector_finds_speech_in_noise(rate):
    generator = torch.Generator().manual_seed(1)
    wave = 0.003 * torch.randn(4 * rate, generator=generator)
    wave[rate : 2 * rate] += 0.1 * torch.randn(rate, generator=generator)
    wave[3 * rate : int(3.5 * rate)] += 0.05 * torch.randn(rate // 2, generator=generator)
    speech = build_vad(EnergyConfig()).speech(wave, rate)
    assert [edge / rate for interval in speech for edge in interval] == pytest.approx([1, 2, 3, 3.5], abs=0.03)


def test_energy_detector_finds_speech_without_pauses():
    wave = 0.1 * torch.randn(8000, generator=torch.Generator().manual_seed(1))
    assert build_vad(EnergyConfig()).speech(wave, 8000) == [(0, 8000)]


def test_short_pauses_belong_to_speech():
    generator = torch.Generator().manual_seed(1)
    wave = 0.1 * torch.randn(16000, generator=generator)
    wave[:4000] = wave[8000:9200] = wave[12000:] = 0.0
    assert build_vad(EnergyConfig(smooth_s=0.2)).speech(wave, 8000) == [pytest.approx((4000, 12000), abs=200)]
    assert len(build_vad(EnergyConfig(smooth_s=0.1)).speech(wave, 8000)) == 2


@pytest.mark.parametrize("kind", ["silero", "energy"])
def test_real_speech_is_found_between_pauses(kind, shared_data):
    digits = sorted((shared_data / "fsdd" / "recordings").glob("*.flac"))[100:500:100]
    waves = [decode_audio(path)[0] for path in digits]
    noise = torch.Generator().manual_seed(2)
    gap = 1e-4 * torch.randn(16000, generator=noise)
    wave = torch.cat([gap, *(part for digit in waves for part in (digit, gap))])
    pieces = list(cut(build_vad(DETECTORS[kind]()), [(wave, 8000)], 30.0))
    assert len(pieces) == 4
    begin = 2.0
    for piece, digit in zip(pieces, waves, strict=True):
        assert begin - 0.5 < piece.start < begin + 0.3
        assert piece.start + len(piece.wave) / 8000 > begin + len(digit) / 8000 - 0.2
        begin += len(digit) / 8000 + 2.0


def test_tones_and_noise_are_no_speech_to_silero():
    vad = build_vad(SileroConfig())
    noise = 0.1 * torch.randn(16000, generator=torch.Generator().manual_seed(1))
    assert vad.speech(noise, 8000) == []
    assert vad.speech(torch.sin(torch.arange(32000) * 0.3), 16000) == []


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("frames", [0.0, 0.3, 1.0, 63.5, 64.0, 150.25])
def test_silero_gives_frames_that_are_computed_together_the_probabilities_of_one_after_the_other(rate, frames):
    size = rate * 32 // 1000
    generator = torch.Generator().manual_seed(3)
    levels = torch.rand(200, generator=generator).repeat_interleave(size)[: int(frames * size)]
    wave = levels * torch.randn(len(levels), generator=generator)
    network = load_silero_vad()
    network.reset_states()
    parts = wave.split(size) if len(wave) else ()
    with torch.inference_mode():
        expected = [float(network(F.pad(part, (0, size - len(part))), rate)) for part in parts]
        found = silero._silero()[1][rate].probabilities(wave)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert len(found) < 60 or found.max() - found.min() > 0.02


def test_several_threads_find_speech_at_the_same_time(two_threads):
    vad = build_vad(SileroConfig())
    waves = [torch.randn(40000, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    waves = [wave * torch.rand(40).repeat_interleave(1000) ** 2 for wave in waves]
    expected = [vad.speech(wave, 16000) for wave in waves]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda wave: vad.speech(wave, 16000), waves)) == expected


def test_number_of_threads_is_not_changed():
    code = (
        "import torch\nfrom speech.vad import SileroConfig, build_vad\ntorch.set_num_threads(2)\n"
        "build_vad(SileroConfig()).speech(torch.zeros(16000), 16000)\nassert torch.get_num_threads() == 2"
    )
    subprocess.run([sys.executable, "-c", Forkable(code)], check=True, cwd=ROOT)


def test_piece_has_its_position():
    (piece,) = cut(told(pad_s=0), [(recording(-1, 1), RATE)], 10.0)
    assert isinstance(piece, SpeechSegment)
    assert (piece.start, piece.sample_rate) == (1.0, RATE)


@pytest.fixture
def without_silero(monkeypatch):
    """As where its package is not installed."""
    monkeypatch.setattr(silero, "find_spec", lambda name: None)
    default_vad.cache_clear()
    yield
    default_vad.cache_clear()


def test_silero_is_the_default():
    assert default_vad() == SileroConfig()


def test_without_silero_energy_is_the_default_with_one_warning(without_silero, caplog):
    assert [default_vad(), default_vad()] == [EnergyConfig()] * 2
    (said,) = caplog.records
    assert said.name == vads.__name__
    assert "pip install silero-vad" in said.message


def test_silero_without_its_package_names_the_remedy(without_silero):
    with pytest.raises(ValueError, match=r"pip install silero-vad.* or choose the detector energy"):
        build_vad(SileroConfig())


def test_threads_find_the_same_speech(shared_data):
    """The network keeps a state from frame to frame: two recordings at once would mix theirs."""
    digits = sorted((shared_data / "fsdd" / "recordings").glob("*.flac"))[::500]
    waves = [torch.cat([torch.zeros(4000), decode_audio(path)[0], torch.zeros(4000)]).repeat(4) for path in digits]
    vad = build_vad(SileroConfig())
    alone = [vad.speech(wave, 8000) for wave in waves]
    assert all(alone)
    by_thread = [[] for _ in waves]
    workers = [
        threading.Thread(target=lambda n=n: by_thread[n].extend(vad.speech(waves[n], 8000))) for n in range(len(waves))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert by_thread == alone
