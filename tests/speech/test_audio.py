"""Decoding, resampling, encoding and levels of waveforms."""

import io
import math

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.audio import SILENCE_DB, AudioError, decode_audio, encode_flac, level_db, load_audio, resample


def tone(frequency=440.0, seconds=1.0, rate=16000, amplitude=0.5):
    return amplitude * torch.sin(2 * math.pi * frequency * torch.arange(int(seconds * rate)) / rate)


def encoded(samples, rate=16000, **options):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.asarray(samples), rate, **options)
    return buffer.getvalue()


def test_flac_round_trip_is_exact_to_16_bits():
    wave = torch.rand(12345, generator=torch.Generator().manual_seed(0)) * 1.9 - 0.95
    decoded, rate = decode_audio(encode_flac(wave, 8000))
    assert rate == 8000
    assert decoded.dtype == torch.float32
    assert decoded.shape == wave.shape
    assert (decoded - wave).abs().max() <= 0.5 / 32768 + 1e-7


def test_encoding_is_deterministic_and_idempotent():
    wave = tone()
    data = encode_flac(wave, 16000)
    assert data == encode_flac(wave.clone(), 16000)
    assert encode_flac(decode_audio(data)[0], 16000) == data


def test_loud_samples_are_clipped_not_wrapped():
    decoded, _ = decode_audio(encode_flac(torch.tensor([2.0, -2.0, 1.0, -1.0]), 16000))
    assert decoded.tolist() == [32767 / 32768, -1.0, 32767 / 32768, -1.0]


@pytest.mark.parametrize("encoding", ["FLAC", "WAV", "OGG", "MP3"])
def test_every_format_decodes_from_bytes_and_from_a_path(encoding, tmp_path):
    data = encoded(tone().numpy(), format=encoding)
    path = tmp_path / "speech.audio"
    path.write_bytes(data)
    from_bytes, rate = decode_audio(data)
    assert rate == 16000
    assert abs(len(from_bytes) - 16000) < 3000  # MP3 pads
    assert torch.equal(from_bytes, decode_audio(path)[0])
    assert torch.equal(from_bytes, decode_audio(str(path))[0])
    assert level_db(from_bytes) == pytest.approx(level_db(tone()), abs=1.0)


@settings(max_examples=40)
@given(start=st.integers(0, 900), length=st.integers(1, 1500))
def test_segment_is_a_slice_of_the_recording(start, length):
    wave = torch.arange(8000) / 8000
    data = encode_flac(wave, 8000)
    whole, _ = decode_audio(data)
    first, last = start / 1000, (start + length) / 1000
    segment, _ = decode_audio(data, start=first, end=last)
    assert torch.equal(segment, whole[round(first * 8000) : round(last * 8000)])


def test_stereo_is_averaged_or_one_channel_selected():
    data = encoded(np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1), format="WAV", subtype="FLOAT")
    assert torch.allclose(decode_audio(data)[0], torch.full((100,), 0.125))
    assert torch.allclose(decode_audio(data, channel=1)[0], torch.full((100,), -0.25))
    with pytest.raises(AudioError, match=r"2 channel.*no channel 2") as caught:
        decode_audio(data, channel=2)
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("data", [b"", b"nothing", b"RIFF1234WAVEfmt "])
def test_files_that_are_not_audio_are_unreadable(data):
    with pytest.raises(AudioError, match=r"cannot be decoded") as caught:
        decode_audio(data)
    assert caught.value.reason == "unreadable"
    assert "0x" not in str(caught.value)


def test_missing_file_is_unreadable_and_named(tmp_path):
    with pytest.raises(AudioError, match=r"gone\.flac") as caught:
        decode_audio(tmp_path / "gone.flac")
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_flac_is_unreadable(share):
    noise = torch.rand(50000, generator=torch.Generator().manual_seed(0)) - 0.5
    data = encode_flac(noise, 16000)
    with pytest.raises(AudioError) as caught:
        decode_audio(data[: int(len(data) * share)])
    assert caught.value.reason == "unreadable"


@settings(max_examples=60)
@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_damaged_bytes_give_audio_or_an_audio_error(position, value):
    data = bytearray(encode_flac(tone(seconds=0.2), 16000))
    data[position % len(data)] = value
    try:
        samples, _ = decode_audio(bytes(data))
    except AudioError as error:
        outcome = error.reason
    else:
        outcome = "finite" if torch.isfinite(samples).all() else "not finite"
    assert outcome in {"unreadable", "empty", "finite"}


@pytest.mark.parametrize("segment", [{"start": 2.0}, {"start": 0.5, "end": 0.5}, {"start": -1.0}, {"start": 1.0}])
def test_a_segment_without_samples_is_empty(segment):
    with pytest.raises(AudioError) as caught:
        decode_audio(encode_flac(tone(), 16000), **segment)
    assert caught.value.reason == "empty"


def test_a_file_without_samples_is_empty():
    with pytest.raises(AudioError) as caught:
        decode_audio(encoded(np.zeros(0), format="WAV"))
    assert caught.value.reason == "empty"


def test_samples_that_are_not_finite_are_refused():
    with pytest.raises(AudioError, match=r"not finite") as caught:
        decode_audio(encoded(np.array([0.0, np.nan, 0.5]), format="WAV", subtype="FLOAT"))
    assert caught.value.reason == "unreadable"
    with pytest.raises(AudioError, match=r"not finite"):
        encode_flac(torch.tensor([0.0, math.inf]), 16000)


def test_encoding_no_samples_is_refused():
    with pytest.raises(AudioError) as caught:
        encode_flac(torch.empty(0), 16000)
    assert caught.value.reason == "empty"
    with pytest.raises(ValueError, match=r"one dimension"):
        encode_flac(torch.zeros(2, 10), 16000)


@pytest.mark.parametrize(("from_rate", "to_rate"), [(22050, 16000), (8000, 16000), (44100, 16000), (16000, 8000)])
def test_resampling_keeps_a_tone(from_rate, to_rate):
    resampled = resample(tone(440, 1.0, from_rate), from_rate, to_rate)
    assert len(resampled) == to_rate
    inner = slice(to_rate // 10, -to_rate // 10)
    assert (resampled - tone(440, 1.0, to_rate))[inner].abs().max() < 5e-3


def test_resampling_to_the_same_rate_does_nothing():
    wave = tone()
    assert resample(wave, 16000, 16000) is wave


def test_resampling_refuses_impossible_rates():
    with pytest.raises(ValueError, match=r"0 Hz"):
        resample(tone(), 16000, 0)


def test_load_audio_decodes_and_resamples():
    assert len(load_audio(encode_flac(tone(rate=8000), 8000), 16000, start=0.25, end=0.75)) == 8000


def test_levels_are_in_decibels():
    assert level_db(tone(amplitude=1.0)) == pytest.approx(-3.01, abs=0.01)
    assert level_db(torch.full((10,), 0.1)) == pytest.approx(-20.0, abs=1e-4)
    assert level_db(torch.zeros(10)) == level_db(torch.empty(0)) == SILENCE_DB


def test_segments_of_real_speech_equal_the_whole(shared_data):
    for pattern in ("LibriSpeech/train-clean-5/*/*/*.opus", "LibriSpeech/dev-clean-5/*/*/*.flac"):
        path = min(shared_data.glob(pattern))
        whole, rate = decode_audio(path)
        assert rate == 16000
        assert -60 < level_db(whole) < -5
        segment, _ = decode_audio(path.read_bytes(), start=1.0, end=2.0)
        assert (segment - whole[rate : 2 * rate]).abs().max() < 1e-3
