"""Base64 as `base64` and `encodebytes` write it was taken for a path, which the error repeated: 70,000 characters."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import soundfile

from recognition.transcriber import Transcriber
from speech.audio import AudioError, decode_audio
from tasks.tracking.pyfunc_model import SpeechRecognizer, decoded

pytestmark = pytest.mark.usefixtures("tones_are_speech")
SAMPLES = (0.1 * np.random.default_rng(0).standard_normal(8000)).astype(np.float32)


def encoded():
    soundfile.write(data := io.BytesIO(), SAMPLES, 8000, format="WAV")
    return data.getvalue()


WAV = encoded()
TEXT = base64.b64encode(WAV).decode()


@pytest.fixture
def model(bundle):
    recognizer = SpeechRecognizer()
    recognizer.load_context(SimpleNamespace(artifacts={"bundle": bundle}))
    return recognizer


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        base64.encodebytes(WAV).decode(),
        base64.encodebytes(WAV).decode().replace("\n", "\r\n"),
        f"data:audio/wav;base64,{base64.encodebytes(WAV).decode()}",
        f"  {TEXT}\n",
        base64.encodebytes(WAV),
        base64.b64encode(WAV),
    ],
    ids=["plain", "line breaks", "of Windows", "data URI", "around", "encodebytes", "b64encode"],
)
def test_base64_is_audio_with_and_without_line_breaks(text):
    assert decoded(text) == WAV


def test_encoded_audio_is_not_taken_for_base64():
    for kind in ("WAV", "FLAC", "AIFF", "OGG", "MP3"):
        soundfile.write(data := io.BytesIO(), SAMPLES, 8000, format=kind)
        assert decoded(data.getvalue()) == data.getvalue()


def test_wrong_text_has_a_short_error_and_does_not_fail_the_others(model):
    wrong = [TEXT[:-3] + "~", "a" * 1001, "x" * 5000 + "!", "no/such/" + "y" * 300 + ".wav"]
    answer = model.predict(None, [WAV, *wrong, TEXT])
    assert answer["error"].tolist()[0] == answer["error"].tolist()[-1] == ""
    assert answer["seconds"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert all(0 < len(error) < 600 for error in answer["error"].tolist()[1:-1])
    assert "neither a path nor base64" in answer["error"][1]
    assert len(model.predict(None, wrong[:1])) == 1


@pytest.mark.parametrize("given", ["z" * 70_000, ["z" * 70_000], [["z" * 70_000] * 9], ("z" * 9000,), "z\0" * 9000])
def test_errors_do_not_repeat_long_input(given, bundle):
    for transcript in Transcriber(bundle).transcribe(given):
        assert 0 < len(transcript.error) < 600
        assert "zzzz" in transcript.error or "z\\x00" in transcript.error or "str" in transcript.error


def test_short_names_are_repeated_in_full():
    name = "folder/" * 30 + "a.wav"
    with pytest.raises(AudioError, match=name):
        decode_audio(name)


def test_recording_without_samples_has_a_row(model):
    none = np.zeros(0, dtype=np.float32)
    # the last two are what MLflow makes of an array without samples, and of a table with one
    for given in (none, [none], {"audio": none}, pd.DataFrame([], columns=[0]), pd.DataFrame({"audio": [none]})):
        answer = model.predict(None, given)
        assert len(answer) == 1
        assert "is not audio" in answer["error"][0]
    assert len(model.predict(None, pd.DataFrame({"audio": [none, SAMPLES]}))) == 2
    assert len(model.predict(None, pd.DataFrame({"audio": []}))) == 0
