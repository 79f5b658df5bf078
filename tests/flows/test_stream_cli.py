"""`starling transcribe --stream`: results while a file or standard input is read."""

import io
import json
import struct

import numpy as np
import pytest
import soundfile
import torch
from support import load_beside, tiny_bundle
from typer.testing import CliRunner

from flows.cli.app import app
from recognition.bundle import save_bundle
from recognition.frame_stream import FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from speech.audio import AudioError, stream_pcm

said = load_beside(__file__, "../recognition/test_frame_stream.py")
RATE = said.RATE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = said.recognizer()
    save_bundle(folder, made.spec, dict(made.model.state_dict()))
    return folder


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, said.speech(5.0), RATE, subtype="PCM_16")
    return path


def transcribe(*words, model, code=0, stdin=None):
    result = CliRunner().invoke(app, ["transcribe", *map(str, words), "--stream", "--model", str(model)], input=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def finals(model, path, chunk_ms):
    wave, rate = soundfile.read(path, dtype="float32")
    stream = FrameStream(Recognizer.load(model), FrameStreamConfig(chunk_ms=chunk_ms), rate)
    return [result.text for result in said.streamed(stream, wave, 999) if result.final]


def test_final_results_are_lines_and_json_has_every_result(model, recording):
    expected = finals(model, recording, 160)
    assert any(expected)
    assert transcribe(recording, "--chunk-ms", 160, model=model).stdout.splitlines() == expected
    shown = transcribe(recording, "--chunk-ms", 160, "--json", model=model).stdout
    entries = [json.loads(line) for line in shown.splitlines()]
    assert [entry["text"] for entry in entries if entry["final"]] == expected
    assert any(not entry["final"] for entry in entries)
    assert {"segment", "text", "words", "final", "start_s", "end_s", "confidence"} == set(entries[0])


def test_standard_input_is_a_wav_file_or_samples(model, recording):
    expected = finals(model, recording, 640)
    data = recording.read_bytes()
    assert transcribe("-", model=model, stdin=data).stdout.splitlines() == expected
    samples = soundfile.read(recording, dtype="int16")[0].tobytes()
    assert transcribe("-", "--rate", RATE, model=model, stdin=samples).stdout.splitlines() == expected


def test_bad_file_stops_no_other(model, recording, tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"no audio")
    result = transcribe(tmp_path / "bad.wav", recording, model=model, code=1)
    assert result.stdout.splitlines() == [f"{recording}: {text}" for text in finals(model, recording, 640)]
    assert "bad.wav" in result.stderr


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--format", "srt"], "--format srt"),
        (["--output", "x"], "--output"),
        (["--vad", "energy"], "--vad"),
        (["--nbest", "3"], "--nbest"),
    ],
)
def test_options_for_whole_recordings_are_refused(model, recording, options, name):
    assert f"{name} needs whole recordings: leave it out" in transcribe(*options, recording, model=model, code=1).stderr


def test_model_of_whole_utterances_is_refused_with_a_remedy(recording, tmp_path):
    tiny_bundle(tmp_path / "model")
    result = transcribe(recording, model=tmp_path / "model", code=1)
    assert "train one with model.chunk" in result.stderr


def wav_bytes(wave, channels=1, data_bytes=None, extra=b""):
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, RATE, RATE * 2 * channels, 2 * channels, 16)
    size = len(wave) * 2 if data_bytes is None else data_bytes
    return b"RIFF\0\0\0\0WAVE" + extra + form + struct.pack("<4sI", b"data", size) + wave.astype("<i2").tobytes()


def read(data, raw_rate=RATE):
    blocks = list(stream_pcm(io.BytesIO(data), raw_rate))
    return torch.cat([block for block, _ in blocks]), {rate for _, rate in blocks}


def test_streamed_wav_may_leave_its_length_open_and_have_other_parts():
    wave = np.arange(-500, 500, dtype=np.int16)
    for size in (0, 0xFFFFFFFF, 0x7FFFFFFF, None):
        samples, rates = read(wav_bytes(wave, data_bytes=size, extra=struct.pack("<4sI", b"LIST", 3) + b"abc\0"))
        assert rates == {RATE}
        assert samples.tolist() == (wave / 32768).tolist()
    # what follows the data is none
    assert len(read(wav_bytes(wave) + b"LIST\2\0\0\0ab")[0]) == 1000
    stereo = np.repeat(wave, 2)
    assert read(wav_bytes(stereo, channels=2))[0].tolist() == (wave / 32768).tolist()
    # the last sample is not complete
    assert len(read(wav_bytes(wave, data_bytes=0)[:-1])[0]) == 999
    assert len(read(wave.astype("<i2").tobytes()[:-1])[0]) == 999


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no sample"),
        (b"\0", "has no sample"),
        (b"fLaC" + bytes(100), "no WAV file of 16-bit PCM: convert it"),
        (b"RIFF\0\0\0\0WAVE", "no WAV file of 16-bit PCM"),
        (b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd", "no WAV file of 16-bit PCM"),
        (b"RIFF\0\0\0\0WAVEfmt \xff\xff\xff\x7f", "no WAV file of 16-bit PCM"),
        (wav_bytes(np.zeros(8)).replace(struct.pack("<HH", 2, 16), struct.pack("<HH", 2, 24)), "no WAV file of 16-bit"),
    ],
)
def test_what_is_no_pcm_is_refused_with_a_remedy(data, message):
    with pytest.raises(AudioError, match=message):
        read(data)
