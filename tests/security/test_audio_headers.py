"""Audio whose header claims more than the file has, and small files that decode to huge audio."""

import io
import struct
import tracemalloc

import numpy as np
import pytest
import soundfile

from speech import audio
from speech.audio import AudioError, decode_audio, stream_audio
from speech.flac import read_header


def wav(data_bytes, samples=100, channels=1, rate=16000):
    """A WAV file whose header claims the given values."""
    body = b"\0\0" * samples
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels & 0xFFFFFFFF, 2 * channels & 0xFFFF, 16)
    parts = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", data_bytes) + body
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + parts


def flac(samples=1600, claimed=None):
    box = io.BytesIO()
    soundfile.write(box, np.zeros(samples), 16000, format="FLAC")
    data = bytearray(box.getvalue())
    if claimed is not None:
        packed = int.from_bytes(data[18:26], "big") & ~((1 << 36) - 1) | claimed
        data[18:26] = packed.to_bytes(8, "big")
    return bytes(data)


CLAIMS = {
    "wav of 4 GB": wav(0xFFFFFFF0),
    "wav of 4 GB in 65535 channels": wav(0xFFFFFFF0, channels=65535),
    "wav at no rate": wav(200, rate=0),
    "wav at 4 GHz": wav(200, rate=0xFFFFFFFF),
    "flac of 49 days": flac(claimed=(1 << 36) - 1),
    "sphere": b"NIST_1A\n   1024\nsample_count -i 99999999999999\nsample_rate -i 16000\nend_head\n".ljust(1024)
    + b"\0" * 64,
    "sphere without an end": b"NIST_1A\n99999999\n" + b"x" * 600,
    "mp3 frame": b"\xff\xfb\x90\x00" * 4,
    "mp3 with a tag of 256 MB": b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + b"\0" * 64,
    "ogg": b"OggS\x00\x02" + b"\xff" * 60,
    "aiff": b"FORM\xff\xff\xff\xffAIFFCOMM\xff\xff\xff\xff" + b"\xff" * 60,
    "core audio": b"caff\x00\x01\x00\x00desc" + b"\x7f" * 60,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_false_headers_allocate_no_memory_and_raise_audio_errors(name):
    tracemalloc.start()
    try:
        for read in (decode_audio, lambda data: list(stream_audio(data))):
            try:
                read(CLAIMS[name])
            except AudioError as error:
                assert error.reason in ("unreadable", "empty")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    read_header(CLAIMS[name])


def test_highly_compressed_silence_is_refused_before_it_fills_memory(monkeypatch):
    data = flac(samples=400_000)
    assert len(data) < 400_000 * 2 / 50
    monkeypatch.setattr(audio, "MAX_SAMPLES", 100_000)
    with pytest.raises(AudioError, match="more than the limit of 100000: use segments"):
        decode_audio(data)
    assert len(decode_audio(data, start=1.0, end=2.0)[0]) == 16000
    assert sum(len(block) for block, _ in stream_audio(data)) == 400_000  # which holds one block at a time


def test_decoding_of_unknown_length_is_limited(monkeypatch):
    data = flac(samples=400_000, claimed=0)
    monkeypatch.setattr(audio, "MAX_SAMPLES", 100_000)
    monkeypatch.setattr(audio, "_BLOCK_SAMPLES", 50_000)
    with pytest.raises(AudioError):
        decode_audio(data)


def test_many_channels_are_decoded_in_smaller_blocks():
    box = io.BytesIO()
    soundfile.write(box, np.full((3000, 8), 0.25), 16000, format="FLAC")
    wave, _ = decode_audio(box.getvalue())
    assert wave.shape == (3000,)
    assert float(wave.mean()) == pytest.approx(0.25, abs=1e-3)
