"""`starling transcribe --format table`: a table of utterances with confidences, which a training reads."""

import csv
import fcntl

import numpy as np
import pytest
import soundfile
from command_line import invoke
from support import load_beside

from recognition.transcriber import Transcriber
from storage.corpora import open_corpus

pytestmark = pytest.mark.usefixtures("tones_are_speech")
said = load_beside(__file__, "../recognition/test_transcriber.py")
RATE, TEXT, folder, speak = said.RATE, said.TEXT, said.folder, said.speak
model = said.perfect_model


@pytest.fixture
def recordings(tmp_path):
    """A short recording, one with two pieces, one without speech, and a bad file."""
    place = tmp_path / "recordings"
    (place / "calls").mkdir(parents=True)
    soundfile.write(place / "short.wav", speak("alpha bravo"), RATE)
    pause = np.zeros(2 * RATE, dtype=np.float32)
    soundfile.write(place / "calls" / "long.flac", np.concatenate([speak("delta echo"), pause, speak("foxtrot")]), RATE)
    soundfile.write(place / "silent.wav", pause, RATE)
    (place / "bad.wav").write_bytes(b"no audio")
    return place


def transcribe(recordings, model, output, *more, code=1):
    return invoke("transcribe", recordings, "--model", model, "--format", "table", "--output", output, *more, code=code)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_recordings_become_utterances_that_a_training_reads_and_a_bad_file_stops_no_other(recordings, model, tmp_path):
    table = tmp_path / "made" / "table.csv"
    shown = transcribe(recordings, model, table)
    assert "bad.wav: " in shown.stderr
    assert f"{table}: 3 utterances of 3 recordings; confidences: 3 of at least 0.5" in shown.stdout
    assert f"{{kind: table, path: {table}, set: train, min_confidence: 0.9}}" in shown.stdout
    reader = open_corpus("table", str(table))
    utterances = {utterance.id: utterance for utterance in reader}
    assert reader.problems == []
    first, second = sorted(name for name in utterances if name.startswith("calls/long-"))
    assert {name: utterance.text for name, utterance in utterances.items()} == {
        "short": "alpha bravo",
        first: "delta echo",
        second: "foxtrot",
    }
    short, start, end = utterances["short"], utterances[second].start, utterances[second].end
    assert (short.audio, short.start, short.end) == (str(recordings / "short.wav"), 0.0, None)
    assert utterances[second].audio == str(recordings / "calls" / "long.flac")
    assert start < 2 + len(speak("delta echo")) / RATE + 0.1 < end  # where the last word begins
    assert all(0.9 < utterance.confidence <= 1 for utterance in utterances.values())
    assert {utterance.speaker for utterance in utterances.values()} == {"short", "calls/long"}
    assert all(float(row["least_confidence"]) <= float(row["confidence"]) for row in rows(table))
    assert sorted(path.name for path in table.parent.iterdir()) == ["table.csv"]


@pytest.mark.parametrize(("speakers", "expected"), [("folder", {"recordings", "calls"}), ("one", {"speaker"})])
def test_speakers_are_files_folders_or_one(recordings, model, tmp_path, speakers, expected):
    transcribe(recordings, model, tmp_path / "table.csv", "--speakers", speakers)
    assert {row["speaker"] for row in rows(tmp_path / "table.csv")} == expected


@pytest.fixture
def interrupted(recordings, model, tmp_path, monkeypatch):
    """A table that was interrupted after the bad recording and the long one; what is heard after that."""
    heard, original = [], Transcriber.stream

    def stream(self, audio, **options):
        def noted():
            for path, voice in audio:
                heard.append(path.name)
                yield path, voice

        for count, transcript in enumerate(original(self, noted(), **options)):
            yield transcript
            if count == 1 and not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise KeyboardInterrupt

    monkeypatch.setattr(Transcriber, "stream", stream)
    transcribe(recordings, model, tmp_path / "table.csv", code=130)
    assert not (tmp_path / "table.csv").exists()
    assert (tmp_path / "table.csv.part").exists()
    heard.clear()
    return heard


def finish(recordings, model, tmp_path):
    """Give the same command again; whether its table is that of a command without an interruption."""
    shown = transcribe(recordings, model, tmp_path / "table.csv")
    assert not (tmp_path / "table.csv.part").exists()
    transcribe(recordings, model, tmp_path / "whole.csv")
    assert rows(tmp_path / "table.csv") == rows(tmp_path / "whole.csv")
    return shown


def test_the_same_command_goes_on_after_an_interruption(interrupted, recordings, model, tmp_path):
    (tmp_path / "table.csv.part").open("ab").write(b'{"audio": "half a li')
    shown = finish(recordings, model, tmp_path)
    said_first = "1 of 4 recordings have been transcribed by an interrupted command"
    assert said_first in " ".join(shown.stderr.split())
    assert len(interrupted) == 3 + 4


def test_a_recording_that_has_changed_is_transcribed_again(interrupted, recordings, model, tmp_path):
    for path in recordings.rglob("*.*"):
        soundfile.write(path, speak("charlie"), RATE)
    transcribe(recordings, model, tmp_path / "table.csv", code=0)
    assert len(interrupted) == 4
    assert {row["text"] for row in rows(tmp_path / "table.csv")} == {"charlie"}


def test_a_recording_that_has_become_unreadable_is_not_in_the_table(interrupted, recordings, model, tmp_path):
    (recordings / "calls" / "long.flac").write_bytes(b"no audio")
    shown = transcribe(recordings, model, tmp_path / "table.csv")
    assert "long.flac: " in shown.stderr
    assert [row["id"] for row in rows(tmp_path / "table.csv")] == ["short"]


def test_what_another_model_has_recognized_is_not_used(interrupted, recordings, model, tmp_path):
    said.write_bundle(tmp_path / "other")
    transcribe(recordings, tmp_path / "other", tmp_path / "table.csv")
    assert len(interrupted) == 4


def test_a_table_that_another_command_writes_is_left_alone(recordings, model, tmp_path):
    with (tmp_path / "table.csv.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        shown = transcribe(recordings, model, tmp_path / "table.csv")
    assert "another command is writing" in shown.stderr
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.parametrize(
    ("files", "more", "message"),
    [
        ("a.wav", ("--output", "table"), "give --output NAME.csv"),
        ("-", ("--output", "table.csv"), "standard input has no name: give files or folders"),
        ("a.wav", ("--output", "table.csv", "--nbest", "3"), "shows one hypothesis"),
        ("a.wav", ("--output", "table.csv", "--stream"), "--format table needs whole recordings"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_the_model_is_read(files, more, message):
    shown = invoke("transcribe", files, "--model", "none", "--format", "table", *more, code=1)
    assert message in " ".join(shown.stderr.split())
