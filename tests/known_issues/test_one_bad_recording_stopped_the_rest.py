"""A float WAV at 1e30 ended `starling transcribe` with "log_probs holds NaN", no name, and no text of later files.

Missing files, folders, empty files and texts had a "System error".
"""

import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import soundfile
import torch
from support import write_tone
from typer.testing import CliRunner

from flows.cli.app import app
from recognition.bundle import BundleSpec, save_bundle
from recognition.transcriber import Transcriber
from speech.audio import MAX_AMPLITUDE, AudioError, check_samples, decode_audio, stream_audio
from speech.features import LogMelConfig
from speech.models import BlstmConfig
from speech.tokens import TokenConfig, train_tokenizer
from tasks.tracking import pyfunc_model

pytestmark = pytest.mark.usefixtures("tones_are_speech")
RATE = 8000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """An untrained model."""
    folder = tmp_path_factory.mktemp("bundle")
    spec = BundleSpec(
        sample_rate=RATE,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(), ["a b"]).to_dict(),
        model=BlstmConfig(dim=8, layers=1, channels=1),
    )
    save_bundle(folder, spec, dict(spec.build_model().state_dict()))
    return folder


def write_floats(path, *samples):
    """A WAV of floats that begins with these samples."""
    wave = np.zeros(4000, dtype=np.float32)
    wave[: len(samples)] = samples
    soundfile.write(path, wave, RATE, subtype="FLOAT")
    return path


@pytest.fixture
def files(tmp_path):
    """Good and bad files, and what the message of each must say; nothing for the good ones."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("Grüße, this is no audio\n" * 40)
    (tmp_path / "noise.wav").write_bytes(np.random.default_rng(0).bytes(3000))
    return {
        write_tone(tmp_path / "good.wav", seconds=0.5, rate=RATE): "",
        write_floats(tmp_path / "loud.wav", 1e30): "sample of 1e+30",
        write_floats(tmp_path / "nan.wav", 0.1, np.nan): "not finite",
        write_floats(tmp_path / "inf.wav", -np.inf): "not finite",
        tmp_path / "missing.wav": "does not exist",
        tmp_path / "folder": "is a folder",
        tmp_path / "empty.wav": "0 bytes",
        tmp_path / "text.wav": "contains text, not audio",
        tmp_path / "noise.wav": "cannot be decoded",
        write_floats(tmp_path / "over.wav", 1.5): "",
        write_tone(tmp_path / "good2.wav", seconds=0.5, rate=RATE): "",
    }


def test_every_file_has_a_transcript_or_an_error(bundle, files, monkeypatch):
    monkeypatch.setattr("flows.cli.common.err.width", 300, raising=False)
    good = [path for path, reason in files.items() if not reason]
    result = CliRunner().invoke(app, ["transcribe", *map(str, files), "--model", str(bundle)])
    assert result.exit_code == 1
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == list(map(str, good))
    lines = result.stderr.splitlines()
    for path, reason in files.items():
        about = [line for line in lines if line.startswith(f"{path}: ")]
        assert len(about) == bool(reason)
        assert not reason or reason in about[0]
    assert lines[-1] == "3 of 11 recognized, 8 failed"
    assert "Traceback" not in result.stderr


def test_json_and_text_files_have_the_same_transcripts(bundle, files, tmp_path):
    result = CliRunner().invoke(app, ["transcribe", *map(str, files), "--model", str(bundle), "--json"])
    errors = {entry["file"]: entry["error"] for entry in json.loads(result.stdout)["files"]}
    assert (result.exit_code, list(errors)) == (1, list(map(str, files)))
    assert all((reason in errors[str(path)]) if reason else not errors[str(path)] for path, reason in files.items())
    out = tmp_path / "texts"
    result = CliRunner().invoke(app, ["transcribe", *map(str, files), "--model", str(bundle), "-o", f"{out}/"])
    assert (result.exit_code, sorted(path.name for path in out.iterdir())) == (1, ["good.txt", "good2.txt", "over.txt"])


def test_output_device_is_written_to_and_not_replaced(bundle, tmp_path):
    audio, pipe = write_tone(tmp_path / "good.wav", seconds=0.5, rate=RATE), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = CliRunner().invoke(app, ["transcribe", str(audio), "--model", str(bundle), "-o", str(pipe), "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(os.read(reader, 100_000))["files"][0]["file"] == str(audio)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_failed_write_leaves_no_partial_file(bundle, tmp_path, monkeypatch):
    audio, out = write_tone(tmp_path / "good.wav", seconds=0.5, rate=RATE), tmp_path / "out" / "all.txt"
    monkeypatch.setattr(Transcriber, "stream", lambda *_, **__: 1 / 0)
    result = CliRunner().invoke(app, ["transcribe", str(audio), "--model", str(bundle), "-o", str(out)])
    assert isinstance(result.exception, ZeroDivisionError)
    assert list(out.parent.iterdir()) == []


class SometimesNan(torch.nn.Module):
    """A model whose output is NaN for loud input."""

    def forward(self, feats, lengths):
        scores = torch.zeros(*feats.shape[:2], 4).log_softmax(-1)
        scores[feats.amax(dim=(1, 2)) > 15.0] = torch.nan
        return scores, lengths


def test_recording_with_nan_outputs_does_not_affect_others(bundle):
    transcriber = Transcriber(bundle)
    transcriber.recognizer.model = SometimesNan()
    quiet, loud = np.full(4000, 1e-4, dtype=np.float32), np.random.default_rng(0).normal(0, 0.5, 4000)
    transcripts = transcriber.transcribe([quiet, loud, quiet, loud.astype(np.float32)], words=True)
    assert [bool(transcript.error) for transcript in transcripts] == [False, True, False, True]
    assert all("NaN" in transcript.error and "check the audio" in transcript.error for transcript in transcripts[1::2])


def test_registered_model_transcribes_good_recordings_among_bad(bundle, files, monkeypatch):
    model = pyfunc_model.SpeechRecognizer()
    model.transcriber = Transcriber(bundle)
    table = model.predict(None, pd.DataFrame({"audio": [str(path) for path in files]}))
    assert [reason in error for reason, error in zip(files.values(), table["error"], strict=True)] == [True] * 11
    assert [error == "" for error in table["error"]] == [not reason for reason in files.values()]
    # a server takes no paths, but answers the rest of the request
    monkeypatch.setitem(sys.modules, pyfunc_model._SERVER, sys)
    good = next(iter(files)).read_bytes()
    table = model.predict(None, ["/etc/passwd", good, b""])
    assert ["not paths" in table["error"][0], table["error"][1], "is empty" in table["error"][2]] == [True, "", True]
    assert list(table["seconds"]) == [0.0, 0.5, 0.0]
    with pytest.raises(pyfunc_model.RefusedRequest, match="not paths"):
        model.predict(None, ["/etc/passwd"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user for a moment")
def test_unreadable_file_of_another_user_is_named():
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter the folders above tmp_path
        Path(folder).chmod(0o755)
        path = write_tone(Path(folder) / "theirs.wav")
        path.chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(AudioError, match=r"theirs\.wav' may not be read by this user"):
                decode_audio(path)
        finally:
            os.seteuid(0)


def test_samples_beyond_the_limit_are_refused():
    check_samples(torch.empty(0), "x")
    check_samples(torch.tensor([MAX_AMPLITUDE, -MAX_AMPLITUDE]), "x")
    for bad in (MAX_AMPLITUDE * 1.01, -65.0, float("nan"), float("-inf")):
        with pytest.raises(AudioError, match=r"^x has"):
            check_samples(torch.tensor([0.0, bad, 0.0]), "x")


def test_both_readers_enforce_the_sample_limit(tmp_path):
    path = write_floats(tmp_path / "loud.wav", 1e30)
    for read in (decode_audio, lambda path: list(stream_audio(path))):
        with pytest.raises(AudioError, match=r"loud\.wav.*1e\+30"):
            read(path)
