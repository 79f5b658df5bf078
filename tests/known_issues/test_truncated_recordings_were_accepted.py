"""Recordings that were accepted although they were truncated or invalid.

From half a WAV or Ogg file libsndfile silently reads the first half, which was trained with the whole
transcript; likewise for RF64, W64, AIFF, AU and SPHERE. Float samples of 1e30 were accepted.
"""

import io
import struct

import numpy as np
import pytest
import soundfile
import torch
from support import tone, write_table, write_tone

from speech.audio import AudioError, check_samples, decode_audio, stream_audio
from speech.truncation import announced_times
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE

RATE = 16000
FORMATS = [
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("WAV", "IMA_ADPCM"),
    ("WAVEX", "PCM_24"),
    ("RF64", "PCM_16"),
    ("W64", "PCM_16"),
    ("AIFF", "PCM_16"),
    ("AU", "PCM_16"),
    ("NIST", "PCM_16"),
    ("NIST", "ULAW"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("CAF", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("MP3", None),
]


def encoded(form, subtype, seconds=4.0):
    box = io.BytesIO()
    soundfile.write(box, tone(seconds, rate=RATE, level=0.1), RATE, format=form, subtype=subtype)
    return box.getvalue()


def read_all(source):
    return decode_audio(source)[0], torch.cat([block for block, _ in stream_audio(source)])


@pytest.mark.parametrize(("form", "subtype"), FORMATS)
def test_truncated_recording_is_refused_by_every_reader(form, subtype, tmp_path, capfd):
    whole = encoded(form, subtype)
    (tmp_path / "whole").write_bytes(whole)
    for source in (whole, tmp_path / "whole", str(tmp_path / "whole")):
        assert all(len(wave) >= 4 * RATE for wave in read_all(source))
    for share in (0.3, 0.5, 0.75, 0.97):
        cut = whole[: int(len(whole) * share)]
        (tmp_path / "cut").write_bytes(cut)
        for read in (decode_audio, lambda source: list(stream_audio(source))):
            for source in (cut, tmp_path / "cut"):
                with pytest.raises(AudioError) as caught:
                    read(source)
                assert caught.value.reason == "unreadable"
                assert "truncated" in str(caught.value) or "cannot be decoded" in str(caught.value)
    capfd.readouterr()  # libmpg123 complains there


def test_message_says_how_much_audio_is_missing():
    whole = encoded("WAV", "PCM_16")
    with pytest.raises(AudioError, match=r"truncated: the header announces 4\.000 s, the file has 1\.000 s"):
        decode_audio(whole[: 44 + RATE * 2])
    with pytest.raises(AudioError, match=r"truncated: its end is missing, the file has [123]\.\d\d\d s"):
        decode_audio(encoded("OGG", "OPUS")[:-2000])


@pytest.mark.parametrize(
    ("form", "subtype"), [("WAV", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("W64", "PCM_16")]
)
def test_segments_before_the_truncation_can_be_read(form, subtype):
    whole = encoded(form, subtype, 8.0)
    cut = whole[: len(whole) * 3 // 4]
    assert len(decode_audio(cut, start=1.0, end=2.0)[0]) == RATE
    with pytest.raises(AudioError, match="truncated"):
        decode_audio(cut, start=1.0, end=7.5)
    with pytest.raises(AudioError, match="truncated"):
        decode_audio(cut, start=1.0)
    assert len(decode_audio(whole, start=1.0, end=99.0)[0]) >= 7 * RATE  # an end beyond the whole file is its end


def sized(riff, data, extra=b""):
    """A second of WAV whose header gives these sizes."""
    body = (tone(1.0, rate=RATE) * 32767).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    head = b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + extra + b"data" + struct.pack("<I", data) + body


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000, 0x7FFFFFFF, 2 * RATE, 2 * RATE + 44])
def test_placeholder_lengths_in_headers_are_accepted(size):
    for riff in (0, 0xFFFFFFFF, 36 + size & 0xFFFFFFFF):
        assert all(len(wave) == RATE for wave in read_all(sized(riff, size)))


def test_length_of_zero_is_not_treated_as_truncation():
    assert announced_times(sized(0, 0)) == 1.0


def test_chunks_before_the_audio_are_skipped():
    odd = b"LIST" + struct.pack("<I", 7) + b"data\xff\xff\xff\0"
    assert all(len(wave) == RATE for wave in read_all(sized(0, 2 * RATE, odd)))
    assert announced_times(sized(0, 4 * RATE, odd)) == 2.0


def test_chunks_of_wave64_are_aligned_to_eight_bytes():
    whole = encoded("W64", "PCM_16", 1.0)
    place = whole.index(b"data")
    odd = b"junk" + bytes(12) + (24 + 3).to_bytes(8, "little") + b"dat" + bytes(5)
    assert announced_times(whole[:place] + odd + whole[place:]) == 1.0
    assert announced_times(whole[:place] + odd + whole[place : 24 + place + RATE]) == 2.0


def test_ogg_without_last_page_is_truncated():
    whole = encoded("OGG", "VORBIS", 20.0)
    pages = [place for place in range(len(whole)) if whole.startswith(b"OggS", place)]
    assert len(pages) > 4
    for place in (*pages[2:], pages[-1] + 4, pages[-1] + 27, len(whole) - 1):
        assert announced_times(whole[:place]) > 1.0
    assert announced_times(whole) == 1.0
    assert announced_times(whole + b"TAG" + bytes(125)) == 1.0  # metadata appended by tagging programs


@pytest.mark.parametrize("value", [1e30, -1e30, 32768.0, np.nan, np.inf])
def test_samples_out_of_range_are_refused(value):
    wave = tone(0.5, rate=RATE)
    wave[4000] = value
    box = io.BytesIO()
    soundfile.write(box, wave, RATE, format="WAV", subtype="FLOAT")
    for read in (decode_audio, lambda source: list(stream_audio(source))):
        with pytest.raises(AudioError, match="write it again") as caught:
            read(box.getvalue())
        assert caught.value.reason == "unreadable"


def test_clipping_samples_are_accepted():
    check_samples(torch.tensor([0.0, -1.5, 3.0]), "x")
    check_samples(torch.empty(0), "x")


def test_truncated_and_invalid_recordings_are_quarantined_and_counted(home, tmp_path):
    rows = [(f"u{n}", f"{n}.wav", "some words", f"s{n}") for n in range(4)]
    for n in range(4):
        write_tone(tmp_path / f"{n}.wav", seconds=1.0, seed=n)
    content = (tmp_path / "1.wav").read_bytes()
    (tmp_path / "1.wav").write_bytes(content[: len(content) // 2])
    soundfile.write(tmp_path / "2.wav", np.full(RATE, 1e30), RATE, subtype="FLOAT")
    rows.append(("ogg", "x.ogg", "some words", "s5"))
    content = write_tone(tmp_path / "x.ogg", seconds=9.0).read_bytes()
    (tmp_path / "x.ogg").write_bytes(content[: len(content) // 2])
    source = {"kind": "table", "path": str(write_table(tmp_path, rows)), "set": "train"}
    result = PREPARE.execute(Run(parse_config({"name": "p", "data": {"sources": [source], "max_quarantined": 1}}), "r"))
    refused = {row["id"]: row for row in read_table(result.store, QUARANTINE)}
    assert result.counts == {"read": 5, "written": 2, "quarantined": 3}
    assert {row["id"] for row in read_table(result.store, MANIFEST)} == {"u0", "u3"}
    assert {row["reason"] for row in refused.values()} == {"unreadable"}
    assert "truncated: the header announces 1.000 s, the file has 0.499 s" in refused["u1"]["detail"]
    assert "a sample of 1e+30" in refused["u2"]["detail"]
    assert "truncated: its end is missing" in refused["ogg"]["detail"]
