"""A named pipe in the place of a transcript or table stopped the reading of a corpus for ever; so did /dev/zero.

The pipe waits for a program that writes to it, and the device has no end. As audio, a pipe was waited for, too.
"""

import os
import threading

import pytest
from support import write_tone

from speech.audio import AudioError, decode_samples, stream_audio
from storage.corpora import CorpusError, guess_kind, open_corpus
from storage.corpora.base import guess_encoding


def in_time(call):
    """What a call returns, or the error that it raises; fails if it takes long, without waiting for its end."""
    given = []

    def run():
        try:
            given.append(call())
        except Exception as error:
            given.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert given, "it still waits"
    return given[0]


def test_transcripts_that_are_no_files_are_quarantined_and_others_read(tmp_path):
    for name in ("good", "pipe", "device", "folder"):
        write_tone(tmp_path / f"{name}.wav")
    (tmp_path / "good.txt").write_text("one")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "sound.wav")
    (tmp_path / "sound.txt").write_text("two")
    reader = open_corpus("sidecar", str(tmp_path))
    assert [utterance.id for utterance in in_time(lambda: list(reader))] == ["good"]
    reasons = {problem.id: problem.detail for problem in reader.problems}
    assert reasons.keys() == {"pipe", "device", "folder", "sound"}
    for name in ("pipe", "device", "sound"):
        assert "a device, pipe or socket, not a file" in reasons[name]
    assert in_time(lambda: guess_encoding(tmp_path.glob("*.txt"))) == ""


@pytest.mark.parametrize("kind", ["auto", "table"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_table_that_is_a_pipe_is_refused(tmp_path, kind, suffix):
    os.mkfifo(tmp_path / f"t{suffix}")
    error = in_time(lambda: list(open_corpus(kind, str(tmp_path / f"t{suffix}"))))
    assert isinstance(error, CorpusError)
    assert f"t{suffix}" in str(error)


def test_audio_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    for read in (decode_samples, lambda path: list(stream_audio(path))):
        error = in_time(lambda read=read: read(tmp_path / "a.wav"))
        assert isinstance(error, AudioError)
        assert "is a device, pipe or socket: write its audio to a file first" in str(error)


@pytest.mark.parametrize("name", ["a.zip", "t.csv.gz", "shards.tar.gz"])
def test_packed_corpus_is_to_be_unpacked(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(CorpusError, match="archive or compressed: unpack it"):
        guess_kind(str(tmp_path / name))
