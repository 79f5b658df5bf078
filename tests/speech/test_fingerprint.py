import io

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.audio import decode_audio, resample
from speech.fingerprint import HOP, NO_WORD, RATE, bit_errors, certain_limit, fingerprint, sketch


def noise(seed, seconds=2.0, rate=16000):
    """Band-limited noise whose level rises and falls, as that of speech does."""
    rng = np.random.default_rng(seed)
    wave = np.repeat(rng.uniform(0.1, 1, int(seconds * 10) + 1), rate // 10)[: int(seconds * rate)]
    wave = resample(torch.from_numpy(wave * rng.normal(0, 0.3, len(wave))).float(), 4000, 16000)[: int(seconds * rate)]
    return wave.clip(-1, 1)


def test_gain_and_rate_hardly_change_the_fingerprint():
    wave = noise(1)
    words = fingerprint(wave, 16000)
    assert len(words) == pytest.approx(2.0 * RATE / HOP, abs=2)
    assert bit_errors(words, fingerprint(wave * 0.05, 16000), 0) == (pytest.approx(0, abs=0.001), 1.0)
    for rate in (8000, 22050, 48000):
        errors, share = bit_errors(words, fingerprint(resample(wave, 16000, rate), rate), 0)
        assert errors < 0.02
        assert share > 0.97


def test_different_recordings_differ_in_half_of_the_bits():
    errors, _ = bit_errors(fingerprint(noise(1), 16000), fingerprint(noise(2), 16000), 0)
    assert errors == pytest.approx(0.5, abs=0.06)


def test_padding_shifts_fingerprint_words_and_silence_has_none():
    wave = noise(3)
    words = fingerprint(wave, 16000)
    longer = fingerprint(torch.cat([torch.zeros(100 * HOP * 4), wave, torch.zeros(8000)]), 16000)
    assert (longer[:80] == NO_WORD).all()
    errors, share = bit_errors(longer, words, 100)
    assert errors < 0.03
    assert share > 0.95
    assert bit_errors(words, longer, -100) == (errors, share)
    assert (fingerprint(torch.zeros(16000), 16000) == NO_WORD).all()
    assert len(fingerprint(torch.zeros(0), 16000)) <= 2


@pytest.mark.parametrize(("kind", "subtype"), [("OGG", "OPUS"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_coding_keeps_most_bits_and_some_lookup_words(kind, subtype):
    wave = noise(4, seconds=4)
    buffer = io.BytesIO()
    soundfile.write(buffer, wave.numpy(), 16000, format=kind, subtype=subtype)
    words, copy = fingerprint(wave, 16000), fingerprint(*decode_audio(buffer.getvalue()))
    assert bit_errors(words, copy, 0)[0] < 0.17
    assert np.intersect1d(sketch(words, 96)[0], sketch(copy, 96)[0]).size


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 20), min_size=10, max_size=60), st.integers(1, 40))
def test_sketch_depends_only_on_the_set_of_words(words, size):
    words = np.array(words, dtype=np.uint32)
    chosen, positions = sketch(words, size)
    assert len(chosen) == min(size, len(set(words.tolist()) - {NO_WORD}))
    assert (words[positions] == chosen).all()
    assert sketch(words[::-1], size)[0].tolist() == chosen.tolist()


def test_recordings_without_overlap_have_similarity_zero():
    words = fingerprint(noise(1), 16000)
    for offset in (len(words), -len(words), 10**6):
        assert bit_errors(words, words, offset) == (1.0, 0.0)


def test_short_recordings_need_higher_similarity():
    limits = [certain_limit(0.17, words) for words in (1, 45, 76, 600, 10_000)]
    assert limits == sorted(limits)
    assert limits[1] < 0.135
    assert limits[3:] == pytest.approx([0.16, 0.1675], abs=0.0003)
