"""Recordings in a folder that a link leads to, and in one that cannot be listed, were left out without a word.

Large corpora are joined from several disks by links. Layouts, `starling transcribe`, banks of noise and object stores
walked only the real folders.
"""

import os
import shutil

import numpy as np
import pytest
import soundfile

from configurable.folders import files_below, walk_folders
from flows.cli.transcribe import find_audio
from storage.audit import usage
from storage.corpora import open_corpus
from storage.objects import ObjectStore
from storage.stages import StageOutput


@pytest.fixture
def speakers(tmp_path):
    """Two speakers on another disk."""
    for speaker in ("ann", "bob"):
        folder = tmp_path / "disk" / speaker
        folder.mkdir(parents=True)
        soundfile.write(folder / "1.wav", np.full(8000, 0.1), 8000)
        (folder / "1.txt").write_text("one")
    return tmp_path / "disk"


def test_recordings_behind_links_are_read_once(speakers, tmp_path):
    corpus = tmp_path / "corpus"
    shutil.copytree(speakers / "ann", corpus / "carl")
    (corpus / "ann").symlink_to(speakers / "ann")
    (corpus / "bob").symlink_to(speakers / "bob")
    (corpus / "bobby").symlink_to(speakers / "bob")
    (corpus / "carla").symlink_to("carl")
    reader = open_corpus("sidecar", str(corpus))
    assert [utterance.id for utterance in reader] == ["ann-1", "bob-1", "carl-1"]
    assert not reader.problems
    assert not reader.passed_over().kinds
    assert [str(name) for _, name in find_audio([corpus])] == ["ann/1", "bob/1", "carl/1"]


def test_links_in_a_circle_end(speakers):
    (speakers / "ann" / "up").symlink_to("..")
    (speakers / "ann" / "above").symlink_to("../..")
    (speakers / "bob" / "self").symlink_to(".")
    other = speakers.parent / "other"
    other.mkdir()
    (other / "back").symlink_to(speakers)
    (other / "again").symlink_to(other)
    (speakers / "other").symlink_to(other)
    folders = [os.path.relpath(folder, speakers) for folder, _, _ in walk_folders(speakers)]
    assert folders == [".", "ann", "bob", "other"]
    assert len(files_below(speakers, "*.wav")) == 2


def test_librispeech_of_linked_speakers_is_recognized(tmp_path):
    chapter = tmp_path / "disk" / "19" / "198"
    chapter.mkdir(parents=True)
    (chapter / "19-198.trans.txt").write_text("19-198-0000 GOOD MORNING\n")
    soundfile.write(chapter / "19-198-0000.flac", np.full(8000, 0.1), 8000)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "19").symlink_to(tmp_path / "disk" / "19")
    (utterance,) = open_corpus("auto", str(tmp_path / "corpus"))
    assert (utterance.id, utterance.speaker) == ("19-198-0000", "19")


@pytest.mark.parametrize("kind", ["sidecar", "librispeech"])
def test_folder_that_cannot_be_listed_is_a_problem(speakers, monkeypatch, kind):
    scandir = os.scandir

    def forbidden(path):
        if str(path).endswith("bob"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    reader = open_corpus(kind, str(speakers))
    monkeypatch.setattr(os, "scandir", forbidden)
    list(reader)
    (problem,) = [problem for problem in reader.problems if problem.reason == "unreadable"]
    assert problem.id == "bob"
    assert f"{speakers / 'bob'} cannot be listed (Permission denied)" in problem.detail


def test_stage_moved_to_another_disk_is_measured(tmp_path):
    store = ObjectStore(tmp_path / "objects")
    output = StageOutput(store, "shard", "0123456789abcdef")
    output.store.write("train/shard-000000.tar", b"audio")
    output.publish({})
    shutil.move(tmp_path / "objects" / "shard", tmp_path / "disk")
    (tmp_path / "objects" / "shard").symlink_to(tmp_path / "disk")
    assert not output.lacking()
    (measured,) = usage(store)
    assert measured.published
    assert "shard/0123456789abcdef/train/shard-000000.tar" in [entry.path for entry in measured.objects]
