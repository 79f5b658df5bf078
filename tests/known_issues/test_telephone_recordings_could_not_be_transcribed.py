"""Recordings in GSM 6.10, G.721 and other codings in which libsndfile cannot seek were read by `prepare`, but were
refused by `starling transcribe` and by the server, after all of their samples had been read."""

import io

import numpy as np
import pytest
import soundfile
import torch

from speech import audio


@pytest.mark.parametrize(
    ("kind", "coding"), [("WAV", "GSM610"), ("AIFF", "GSM610"), ("WAV", "G721_32"), ("AU", "G723_24")]
)
def test_codings_without_seeking_are_read_block_by_block(kind, coding, monkeypatch):
    monkeypatch.setattr(audio, "_BLOCK_SAMPLES", 5000)
    soundfile.write(file := io.BytesIO(), 0.3 * np.sin(np.arange(24000) / 5), 8000, format=kind, subtype=coding)
    whole, _ = audio.decode_audio(file.getvalue())
    blocks = [block for block, rate in audio.stream_audio(file.getvalue()) if rate == 8000]
    assert len(blocks) > 2
    assert torch.equal(torch.cat(blocks), whole)


def test_a_file_without_samples_is_still_refused():
    soundfile.write(file := io.BytesIO(), np.zeros(0), 8000, format="WAV", subtype="GSM610")
    with pytest.raises(audio.AudioError, match="no sample") as refused:
        list(audio.stream_audio(file.getvalue()))
    assert refused.value.reason == "empty"
