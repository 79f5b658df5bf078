"""FLAC files inspected without decoding, compared with libsndfile."""

import io

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.flac import is_whole, read_header


def encode(samples, rate=16000, channels=1, subtype="PCM_16", level=0.1, seed=0):
    buffer = io.BytesIO()
    wave = np.random.default_rng(seed).normal(0, level, (samples, channels)).clip(-1, 1)
    soundfile.write(buffer, wave, rate, format="FLAC", subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 96000])
@pytest.mark.parametrize("samples", [1, 191, 4096, 4097, 60_000])
def test_header_and_last_frame_are_read(rate, samples):
    data = encode(samples, rate)
    info = read_header(data)
    assert (info.sample_rate, info.channels, info.bits, info.num_samples) == (rate, 1, 16, samples)
    assert is_whole(data, info)


@pytest.mark.parametrize(("channels", "subtype", "bits"), [(2, "PCM_16", 16), (1, "PCM_24", 24), (1, "PCM_S8", 8)])
def test_other_stream_formats_are_read(channels, subtype, bits):
    info = read_header(encode(5000, channels=channels, subtype=subtype, level=0.01))
    assert (info.channels, info.bits) == (channels, bits)


@given(cut=st.integers(1, 20_000), seed=st.integers(0, 3))
@settings(max_examples=60)
def test_truncated_file_is_not_whole(cut, seed):
    data = encode(30_000, seed=seed)
    info = read_header(data)
    assert not is_whole(data[: max(info.header_bytes, len(data) - cut)], info)


@given(place=st.integers(1, 1000), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_file_with_a_damaged_end_is_not_whole(place, bit):
    data = bytearray(encode(9000))  # its last frame has 808 samples of noise
    data[-place] ^= 1 << bit
    info = read_header(bytes(data))
    assert not is_whole(bytes(data), info)


def test_file_without_length_or_with_trailing_data_is_refused():
    data = bytearray(encode(9000))
    info = read_header(bytes(data))
    assert not is_whole(bytes(data) + b"\1" * 64, info)
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert read_header(bytes(data)) is None


@given(st.binary(max_size=200))
def test_other_files_are_not_flac(data):
    info = read_header(b"fLaC" + data)
    assert info is None or not is_whole(b"fLaC" + data, info)
    assert read_header(data) is None or data[:4] == b"fLaC"


def test_real_files_are_whole(shared_data):
    folder = shared_data / "LibriSpeech" / "dev-clean-5"
    for path in sorted(folder.rglob("*.flac"))[:40]:
        data, about = path.read_bytes(), soundfile.info(str(path))
        info = read_header(data)
        assert (info.sample_rate, info.num_samples) == (about.samplerate, about.frames)
        assert is_whole(data, info)
