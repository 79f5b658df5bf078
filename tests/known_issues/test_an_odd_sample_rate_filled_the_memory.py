"""A file at 8,001 Hz ended a run: its filters filled 2.6 GB. One at 192,001 Hz asked for 24 GB."""

import io
import struct

import numpy as np
import pytest
import soundfile
import torch
from support import write_table

from recognition.transcriber import Transcriber
from speech import audio
from speech.audio import AudioError, decode_audio, resample, stream_audio
from tasks.config.pipeline import parse_config
from tasks.dataset.audio import load_utterance_samples
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE
from tasks.stages.shard import make_sample

ODD = [(8001, 8000), (8000, 8001), (47_999, 16_000), (192_001, 16_000), (22_255, 16_000), (768_000, 4000)]
IMPOSSIBLE = [1, 8, 999, 768_001, 2**31 - 1]


def sine(rate, seconds=0.4, hertz=300):
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def encoded(samples, rate):
    soundfile.write(data := io.BytesIO(), samples, rate, format="WAV")
    return data.getvalue()


@pytest.fixture
def filters(monkeypatch):
    """The ratios for which filters are computed."""
    made, make = [], audio._resampler
    monkeypatch.setattr(audio, "_resampler", lambda *given: made.append(given[:2]) or make(*given))
    return made


@pytest.mark.parametrize(("from_rate", "to_rate"), ODD)
def test_odd_rates_are_resampled_with_small_filters(from_rate, to_rate, filters):
    resampled = resample(torch.from_numpy(sine(from_rate)).float(), from_rate, to_rate)
    assert len(resampled) == pytest.approx(0.4 * to_rate, rel=5e-4, abs=1)
    expected = torch.from_numpy(sine(to_rate, 0.41)).float()
    inner = slice(len(resampled) // 10, len(resampled) * 9 // 10)
    torch.testing.assert_close(resampled[inner], expected[inner], atol=0.05, rtol=0)
    assert all(max(ratio) <= 2000 for ratio in filters)


def test_usual_rates_are_resampled_exactly(filters):
    for rate in (8000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000):
        resample(torch.zeros(10), rate, 16_000)
        assert rate == 16_000 or filters[-1][0] * 16_000 == filters[-1][1] * rate


@pytest.mark.parametrize("rate", IMPOSSIBLE)
def test_impossible_rates_are_refused_by_name(rate):
    data = encoded(np.zeros(4000), rate)
    for read in (decode_audio, lambda source: list(stream_audio(source))):
        with pytest.raises(AudioError, match=rf"has a sample rate of {rate} Hz; 1000 to 768000 Hz") as it:
            read(data)
        assert it.value.reason == "unreadable"


def test_one_odd_file_does_not_stop_a_corpus(home, tmp_path):
    rows = []
    for n, rate in enumerate([8000, 8001, 8000, 47_999, 8000, 1]):
        (tmp_path / f"{n}.wav").write_bytes(encoded(sine(max(rate, 4000), hertz=300 + n), rate))
        rows.append((f"u{n}", f"{n}.wav", "some text", f"s{n}"))
    source = {"kind": "table", "path": str(write_table(tmp_path, rows))}
    document = {"name": "p", "data": {"sources": [source], "sample_rate": 8000, "max_quarantined": 1}}
    result = PREPARE.execute(Run(parse_config(document), "r"))
    assert {row["id"]: row["reason"] for row in read_table(result.store, QUARANTINE)} == {"u5": "unreadable"}
    kept = read_table(result.store, MANIFEST)
    assert result.counts == {"read": 6, "written": 5, "quarantined": 1}
    assert [make_sample(row, 8000).row["num_frames"] for row in kept] == pytest.approx([3200] * 5, abs=2)


def test_odd_files_do_not_silence_the_others(bundle, tones_are_speech):
    given = [encoded(sine(rate), rate) for rate in (8000, 192_001, 1, 8001, 8000)]
    first, odd, impossible, near, last = Transcriber(bundle).transcribe(given)
    assert "sample rate of 1 Hz" in impossible.error
    assert [transcript.error for transcript in (first, odd, near, last)] == [""] * 4
    assert [transcript.seconds for transcript in (first, odd, near, last)] == pytest.approx([0.4] * 4, abs=0.001)
    assert (first.text, near.text) == (last.text, last.text)


@pytest.mark.parametrize("rate", [-8000, 1, 10**9])
def test_arrays_of_an_impossible_rate_are_refused(bundle, rate):
    (transcript,) = Transcriber(bundle).transcribe([np.zeros(4000, dtype=np.float32)], rate)
    assert f"sample rate of {rate} Hz" in transcript.error


def test_long_utterances_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "hours.flac"
    soundfile.write(path, np.zeros(8000 * 60), 8000)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("it was decoded"))
    row = {"audio": str(path), "start": 0.0, "end": None, "channel": None}
    with pytest.raises(AudioError, match=r"has at least 60\.000 s, more than 30 s") as it:
        load_utterance_samples(row, max_seconds=30.0)
    assert it.value.reason == "too-long"


def test_lengths_that_a_header_only_claims_are_not_allocated():
    data = bytearray(encoded(sine(8000), 8000))
    data[40:44] = struct.pack("<I", 0x7FFFFFF0)
    assert len(decode_audio(bytes(data))[0]) == 3200


@pytest.mark.parametrize(("start", "end"), [(float("nan"), None), (0.0, float("nan")), (float("inf"), None)])
def test_segments_without_numbers_are_refused(start, end):
    with pytest.raises(AudioError, match="has no duration"):
        decode_audio(encoded(sine(8000), 8000), start=start, end=end)
    assert len(decode_audio(encoded(sine(8000), 8000), end=float("inf"))[0]) == 3200


def test_a_thousand_channels_are_mixed():
    data = encoded(np.repeat(sine(8000, 0.1)[:, None], 1000, axis=1), 8000)
    wave, _ = decode_audio(data)
    torch.testing.assert_close(wave, torch.from_numpy(sine(8000, 0.1)).float(), atol=1e-4, rtol=0)
