"""`starling transcribe` on 2,000 clips of half a second took 260 seconds of CPU, and `starling evaluate` eight.

Each file had a call of the network of its own, and the detector's tiny steps ran in several threads.
"""

import sys
from itertools import islice

import numpy as np
import pytest
import soundfile
import torch
from support import load_beside
from typer.testing import CliRunner

from flows.cli.app import app
from recognition.bundle import load_bundle, save_bundle
from recognition.transcriber import Transcriber
from speech.models import ConformerConfig
from speech.vad import SileroConfig, build_vad, cutting, silero

pytestmark = pytest.mark.usefixtures("tones_are_speech")
said = load_beside(__file__, "../recognition/test_transcriber.py")
RATE, WORDS, folder, speak = said.RATE, said.WORDS, said.folder, said.speak


class Counting(said.LoudestBand):
    """Counts its calls."""

    calls = 0

    def forward(self, feats, lengths):
        self.calls += 1
        return super().forward(feats, lengths)


@pytest.fixture
def model(monkeypatch):
    """Makes no errors, in all transcribers."""
    counting, original = Counting(), Transcriber.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.recognizer.model = counting

    monkeypatch.setattr(Transcriber, "__init__", init)
    return counting


@pytest.mark.parametrize("speakers", ["file", "one"])
def test_command_recognizes_short_files_together(folder, model, tmp_path, speakers):
    texts = [WORDS[n % 6] for n in range(60)]
    for n, text in enumerate(texts):
        soundfile.write(tmp_path / f"{n:02}.wav", speak(text), RATE)
    (tmp_path / "30.wav").write_bytes(b"damaged")
    words = ["transcribe", str(tmp_path), "--model", str(folder), "--speakers", speakers]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    lines = [f"{tmp_path}/{n:02}.wav: {text}" for n, text in enumerate(texts) if n != 30]
    assert result.stdout.splitlines() == lines
    assert "59 of 60 recognized, 1 failed" in result.stderr
    assert model.calls <= 4


@pytest.mark.parametrize("speech", [True, False])
def test_transcripts_come_while_later_files_are_not_yet_read(folder, model, monkeypatch, speech):
    """The first soon, the others at intervals, with or without speech in them: memory is bounded, too."""
    read, lag = [], []

    def recordings():
        for n in range(1000):
            read.append(n)
            yield speak("alpha"), n

    transcriber = Transcriber(folder, batch_seconds=20)
    if not speech:
        monkeypatch.setattr(transcriber.vad, "speech", lambda *_: [])
        monkeypatch.setattr(cutting, "_may_be_word", lambda *_: False)
    for n, transcript in enumerate(transcriber.stream(recordings())):
        assert transcript.text == ("alpha" if speech else "")
        lag.append(len(read) - n)
    assert len(lag) == 1000
    assert lag[0] <= 10
    assert max(lag) <= 4 * 20 / 0.4 + 2


def test_standard_input_is_not_read_before_its_turn(folder, model):
    order = []

    def recordings():
        for n in range(100):
            order.append(n)
            yield speak("echo"), n
        pytest.fail("it was read too early")

    transcripts = Transcriber(folder, batch_seconds=20).stream(recordings())
    assert [transcript.text for transcript in islice(transcripts, 5)] == ["echo"] * 5
    assert len(order) < 20


def test_a_file_has_the_same_transcript_alone_and_among_others(folder, tmp_path):
    spec, _ = load_bundle(folder)
    spec = spec.model_copy(update={"model": ConformerConfig(dim=16, layers=2, channels=4, heads=2)})
    torch.manual_seed(1)
    save_bundle(tmp_path, spec, dict(spec.build_model().state_dict()))
    transcriber = Transcriber(tmp_path)
    network = transcriber.recognizer.model
    for parameter in network.parameters():
        parameter.data *= 3  # an untrained network is unsure of everything, and finds no word
    rng = np.random.default_rng(0)
    waves = [speak(" ".join(rng.choice(WORDS, n % 7 + 1))) + 1e-3 for n in range(30)]
    among = transcriber.transcribe(waves, words=True)
    assert len({transcript.text for transcript in among}) > 5
    for wave, other in zip(waves, among, strict=True):
        (alone,) = transcriber.transcribe([wave], words=True)
        assert alone.text == other.text
        assert alone.confidence == pytest.approx(other.confidence, abs=1e-5)
        assert [word.word for word in alone.words] == [word.word for word in other.words]
        assert [word.start for word in alone.words] == pytest.approx([word.start for word in other.words])
        assert [word.duration for word in alone.words] == pytest.approx([word.duration for word in other.words])


@pytest.mark.skipif(sys.platform != "linux", reason="other builds of torch have one thread")
def test_detector_computes_in_one_thread(monkeypatch, two_threads):
    seen, compute = [], silero._Network.probabilities

    def probabilities(network, wave):
        seen.append(torch.get_num_threads())
        return compute(network, wave)

    monkeypatch.setattr(silero._Network, "probabilities", probabilities)
    build_vad(SileroConfig()).speech(torch.zeros(RATE), RATE)
    assert (seen, torch.get_num_threads()) == ([1], 2)
