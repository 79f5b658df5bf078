"""A recorder that is interrupted leaves 0 as the length in the header: the recording was called empty, not unreadable.

Nothing told that the speech is still there, or how to read it.
"""

import io

import pytest
import soundfile

from speech.audio import AudioError, decode_samples, stream_audio


def test_audio_behind_a_header_that_announces_none_is_named_with_a_remedy(tmp_path):
    soundfile.write(file := io.BytesIO(), [0.1, -0.1] * 4000, 16000, format="WAV", subtype="PCM_16")
    head, length, samples = file.getvalue().partition(b"data")
    data = head + length + bytes(4) + samples[4:]
    (tmp_path / "a.wav").write_bytes(data)
    for source in (data, tmp_path / "a.wav"):
        for read in (decode_samples, lambda source: list(stream_audio(source))):
            with pytest.raises(AudioError, match=r"16000 bytes follow.*ffmpeg -i OLD NEW") as caught:
                read(source)
            assert caught.value.reason == "unreadable"


def test_recording_without_audio_is_empty():
    soundfile.write(file := io.BytesIO(), [], 16000, format="WAV")
    with pytest.raises(AudioError, match="has no sample") as caught:
        decode_samples(file.getvalue())
    assert caught.value.reason == "empty"
