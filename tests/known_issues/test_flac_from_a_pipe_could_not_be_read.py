"""FLAC that was written into a pipe leaves its length open; reading it ended with "Internal psf_fseek() failed".

soundfile seeks after each read, which libsndfile cannot do in such a file.
"""

import io

import numpy as np
import pytest
import soundfile

from speech.audio import AudioError, decode_samples, stream_audio

RATE = 16000
WAVE = (np.random.default_rng(1).standard_normal(20 * RATE) * 0.1).astype(np.float32)


def flac_of_open_length():
    soundfile.write(file := io.BytesIO(), WAVE, RATE, format="FLAC", subtype="PCM_16")
    data = bytearray(file.getvalue())
    fields = int.from_bytes(data[18:26], "big")  # the last 36 bits are the number of samples; 0: unknown
    data[18:26] = (fields >> 36 << 36).to_bytes(8, "big")
    return bytes(data)


def test_all_samples_are_read(tmp_path):
    data = flac_of_open_length()
    (tmp_path / "piped.flac").write_bytes(data)
    for source in (data, tmp_path / "piped.flac"):
        samples, rate = decode_samples(source)
        assert rate == RATE
        np.testing.assert_allclose(samples, WAVE, atol=1e-4)
        np.testing.assert_allclose(np.concatenate([block for block, _ in stream_audio(source)]), WAVE, atol=1e-4)


@pytest.mark.parametrize("segment", [{"start": 12.5, "end": 13.0}, {"start": 19.5}, {"end": 0.1}])
def test_segments_are_read(segment):
    samples, _ = decode_samples(flac_of_open_length(), **segment)
    expected = WAVE[int(segment.get("start", 0) * RATE) : int(segment.get("end", 20) * RATE)]
    np.testing.assert_allclose(samples, expected, atol=1e-4)


def test_segment_beyond_the_end_and_a_long_file_are_refused():
    with pytest.raises(AudioError, match="has no sample between"):
        decode_samples(flac_of_open_length(), start=21)
    with pytest.raises(AudioError, match="more than 5 s") as caught:
        decode_samples(flac_of_open_length(), max_seconds=5)
    assert caught.value.reason == "too-long"


def test_truncated_file_is_refused():
    data = flac_of_open_length()
    with pytest.raises(AudioError, match="cannot be decoded"):
        decode_samples(data[: len(data) // 2])
