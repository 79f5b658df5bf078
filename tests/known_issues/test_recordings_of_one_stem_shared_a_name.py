"""`take.wav` and `take.flac` were both "take" in a CTM, and `a b` and `a_b` both `a_b`, so they were one recording."""

from pathlib import Path

import pytest

from flows.cli.align import write_files
from flows.cli.transcribe import find_audio
from flows.cli.transcripts import TIMED, open_sink
from recognition.transcriber import Transcript
from speech.alignments import AlignedUtterance, Alignment, Span, distinct_names
from speech.hypotheses import Word
from tasks.alignment import AlignedCorpus

SAID = Transcript("hello", 1.0, 1.0, words=(Word("hello", 0.0, 0.5, 1.0),))


def made(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return [folder / name for name in names]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["take.wav", "take.flac"], ["take.wav", "take.flac"]),
        (["take.wav", "other.flac"], ["take", "other"]),
        (["take.wav", "take.flac", "take.wav.mp3"], ["in/take.wav", "take.flac", "in/take.wav.mp3"]),
        (["a/take.wav", "b/take.wav"], ["in/a/take.wav", "in/b/take.wav"]),
        (["Take.wav", "take.wav"], ["in/Take.wav", "in/take.wav-2"]),  # sclite ignores case
        (["a b.wav", "a_b.wav"], ["in/a b.wav", "in/a_b.wav-2"]),
        (["caf\u00e9.wav", "cafe\u0301.flac"], ["caf\u00e9.wav", "cafe\u0301.flac"]),
    ],
)
def test_given_files_have_names_of_their_own(tmp_path, monkeypatch, files, names):
    made(tmp_path / "in", *files)
    monkeypatch.chdir(tmp_path)
    assert [str(name) for _, name in find_audio([Path("in") / name for name in files])] == names


def test_files_of_a_folder_have_names_of_their_own(tmp_path):
    made(tmp_path, "x/take.flac", "x/take.wav", "x/deep/take.wav")
    names = [str(name) for _, name in find_audio([tmp_path / "x"])]
    assert sorted(names) == ["deep/take", "take.flac", "take.wav"]


def test_the_same_file_twice_has_two_names(tmp_path, monkeypatch):
    made(tmp_path, "take.wav")
    monkeypatch.chdir(tmp_path)
    assert [str(name) for _, name in find_audio([Path("take.wav")] * 2)] == ["take.wav", "take.wav-2"]


@pytest.mark.parametrize("kind", ["text", "json", *TIMED])
def test_a_folder_has_a_file_for_each_recording(tmp_path, kind):
    recordings = find_audio(made(tmp_path / "in", "take.wav", "take.flac", "a/take.wav", "Take.mp3"))
    with open_sink(kind, tmp_path / "out", "model", several=True, folder=True) as sink:
        for path, place in recordings:
            sink.add(path, place, SAID)
    assert len([path for path in (tmp_path / "out").rglob("*") if path.is_file()]) == len(recordings)


def test_a_ctm_file_tells_recordings_apart(tmp_path):
    recordings = find_audio(made(tmp_path / "in", "take.wav", "take.flac", "a b.wav", "a_b.wav"))
    with open_sink("ctm", tmp_path / "out.ctm", "model", several=True) as sink:
        for path, place in recordings:
            sink.add(path, place, SAID)
    labels = [line.split()[0].lower() for line in (tmp_path / "out.ctm").read_text().splitlines()]
    assert len(set(labels)) == len(recordings)


def test_aligned_utterances_have_names_of_their_own(tmp_path):
    ids = ["a b", "a_b", "A_b", "a_b-2"]
    assert distinct_names(ids) == ["a b", "a_b-3", "A_b-4", "a_b-2"]
    said = (Span("hello", 0, 50, 1.0),)
    corpus = AlignedCorpus([AlignedUtterance(name, "hello", Alignment(name, said, said)) for name in ids])
    write_files(corpus, [], tmp_path)
    for name in ("words", "phones"):
        labels = [line.split()[0].lower() for line in (tmp_path / f"{name}.ctm").read_text().splitlines()]
        assert len(set(labels)) == len(ids)
