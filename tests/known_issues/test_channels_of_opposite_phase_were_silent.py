"""A stereo file whose channels have opposite signs had an empty transcript: their mean is silence."""

import io

import numpy as np
import pytest
import soundfile
import torch

from recognition.transcriber import Transcriber
from speech.audio import decode_audio, level_db, stream_audio

RATE = 8000
RNG = np.random.default_rng(0)
VOICE, OTHER = (0.1 * RNG.standard_normal(4000) for _ in range(2))


def encoded(*channels):
    soundfile.write(data := io.BytesIO(), np.stack(channels, axis=1), RATE, format="WAV", subtype="FLOAT")
    return data.getvalue()


def mixed(*channels):
    wave, _ = decode_audio(encoded(*channels))
    assert torch.equal(torch.cat([block for block, _ in stream_audio(encoded(*channels))]), wave)
    return wave.double().numpy()


def likeness(wave, voice):
    return np.corrcoef(wave, voice)[0, 1]


@pytest.mark.parametrize(
    "channels",
    [
        (VOICE, -VOICE),
        (VOICE, -0.5 * VOICE),
        (VOICE, -VOICE, VOICE, -VOICE),
        (0 * VOICE, VOICE, -VOICE),
        (VOICE + 0.2 * OTHER, -VOICE),
        (VOICE + 0.3, -VOICE - 0.3),
    ],
    ids=["opposite", "one softer", "four", "one silent", "some noise", "offsets"],
)
def test_opposite_channels_are_heard(channels):
    wave = mixed(*channels)
    assert likeness(wave, VOICE) > 0.98
    assert np.std(wave) > 0.5 * np.std(VOICE)


def test_opposite_channels_do_not_hide_behind_a_third():
    wave = mixed(OTHER, VOICE, -VOICE)
    assert likeness(wave, VOICE) > 0.6


@pytest.mark.parametrize("second", [VOICE, OTHER, 0.2 * VOICE, VOICE - 0.5 * OTHER, 0 * VOICE, OTHER - 0.5 * VOICE])
def test_other_channels_are_averaged(second):
    np.testing.assert_allclose(mixed(VOICE, second), (VOICE + second) / 2, atol=1e-6)


def test_offsets_of_opposite_signs_change_no_sign():
    np.testing.assert_allclose(mixed(VOICE + 0.5, VOICE - 0.5), VOICE, atol=1e-6)


def test_transcriber_hears_opposite_channels(bundle, tones_are_speech):
    transcriber = Transcriber(bundle)
    mono, opposite = transcriber.transcribe([encoded(VOICE), encoded(VOICE, -VOICE)])
    assert (opposite.text, opposite.seconds) == (mono.text, mono.seconds)
    assert opposite.confidence == pytest.approx(mono.confidence)


def test_one_channel_of_a_pair_is_as_loud_as_the_mix():
    data = encoded(VOICE, -VOICE)
    assert level_db(decode_audio(data)[0]) == pytest.approx(level_db(decode_audio(data, channel=1)[0]), abs=0.01)
