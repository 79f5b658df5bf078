"""Recordings as m4a, and other files that a layout does not use, were left out of a folder without a word."""

import json

import pytest
from support import write_tone

from flows.cli.transcribe import find_audio
from storage.corpora import open_corpus
from storage.corpora.base import AUDIO_SUFFIXES
from tasks.config.pipeline import parse_config
from tasks.dataset.discovery import find_corpus
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE


@pytest.fixture
def folder(tmp_path):
    """Three utterances beside an m4a file and others."""
    for name in ("a", "b", "c"):
        write_tone(tmp_path / "own" / f"{name}.wav")
        (tmp_path / "own" / f"{name}.txt").write_text("one two")
    own = tmp_path / "own"
    (own / "d.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    (own / "d.txt").write_text("one")
    (own / "e.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    (own / "README.md").write_text("mine")
    (own / "cover.jpg").write_bytes(b"\xff\xd8")
    (own / "notes").write_text("x")
    (own / "f.wav").write_bytes(b"")
    (own / "f.txt").write_text("one")
    write_tone(own / "a.flac")
    (own / "._a.wav").write_bytes(b"\0\5\x16\7")
    (own / ".git").mkdir()
    (own / ".git" / "HEAD").write_text("ref")
    return own


def test_passed_over_files_are_counted_and_named(folder):
    reader = open_corpus("sidecar", str(folder))
    utterances = list(reader)
    assert [u.id for u in utterances] == ["a", "b", "c", "d", "f"]
    assert utterances[0].audio.endswith("a.flac")
    assert [(p.id, p.reason) for p in reader.problems] == [("e", "missing-transcript")]
    passed = reader.passed_over()
    assert passed.kinds == {".wav": 2, ".md": 1, ".jpg": 1, "without a suffix": 1}
    assert passed.first == ["._a.wav", "README.md", "a.wav"]


def test_inspect_init_and_the_run_name_them(folder, tmp_path, home, invoke):
    said = invoke("corpus", "inspect", str(folder)).stdout
    line = "passed over: 5 files in the folders of the corpus (2 .wav, 1 .md, 1 .jpg, 1 without a suffix): ._a.wav"
    assert line in said
    report = json.loads(invoke("corpus", "inspect", str(folder), "--json").stdout.splitlines()[-1])
    assert report["passed_over"]["files"] == 5
    assert report["reasons"] == {"unreadable": 2, "missing-transcript": 1}
    assert line in invoke("init", str(folder), "-o", str(tmp_path / "own.yaml")).stdout
    data = {"sources": [{"kind": "sidecar", "path": str(folder)}], "max_quarantined": 0.9}
    document = {"name": "k", "data": data | {"valid_share": 0, "test_share": 0, "min_seconds": 0.01}}
    record = PREPARE.execute(Run(parse_config(document), "r")).record
    assert record["passed_over"] == report["passed_over"]
    assert record["counts"] == {"read": 6, "written": 3, "quarantined": 3}


@pytest.mark.parametrize("kind", ["librispeech", "mls", "fsdd", "an4", "tedlium", "webdataset", "switchboard"])
def test_layouts_that_scan_folders_name_what_they_pass_over(tmp_path, kind):
    places = {
        "librispeech": ("1/2/1-2.trans.txt", "1/2/x.doc"),
        "mls": ("transcripts.txt", "audio/1/2/x.doc"),
        "fsdd": ("recordings/0_ann_0.wav", "recordings/x.doc"),
        "an4": ("etc/an4_train.fileids", "wav/x.doc"),
        "tedlium": ("stm/a.stm", "sph/x.doc"),
        "webdataset": ("a.tar", "x.doc"),
        "switchboard": ("swb_ms98_transcriptions/sw2001A-ms98-a-trans.text", "x.doc"),
    }[kind]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("")
    passed = open_corpus(kind, str(tmp_path)).passed_over()
    assert (dict(passed.kinds), passed.first) == ({".doc": 1}, [places[1]])


def test_layouts_whose_lists_name_all_files_pass_nothing_over(tmp_path):
    (tmp_path / "wav.scp").write_text("")
    (tmp_path / "text").write_text("")
    (tmp_path / "x.doc").write_text("")
    assert not open_corpus("kaldi", str(tmp_path)).passed_over().kinds


@pytest.mark.parametrize("suffix", sorted(AUDIO_SUFFIXES - {".opus", ".oga", ".mp3", ".sph", ".snd", ".aifc"}))
def test_formats_that_can_be_decoded_are_found(tmp_path, suffix):
    write_tone(tmp_path / f"a{suffix.upper()}") if suffix in (".wav", ".flac") else (tmp_path / f"a{suffix}").touch()
    (tmp_path / "a.txt").write_text("one")
    assert [u.id for u in open_corpus("auto", str(tmp_path))] == ["a"]


def test_transcribe_lists_recordings_that_cannot_be_decoded(folder):
    names = [path.name for path, _ in find_audio([folder])]
    assert names == ["._a.wav", "a.flac", "a.wav", "b.wav", "c.wav", "d.m4a", "e.m4a", "f.wav"]
    (folder / "b.m4a").touch()  # the same recording as b.wav
    assert [path.name for path, _ in find_audio([folder])] == names


def test_folder_with_recordings_that_cannot_be_decoded_only_is_explained(tmp_path):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    with pytest.raises(ValueError, match="has recordings \\(1 m4a\\), but no transcripts"):
        find_corpus(tmp_path)
    (tmp_path / "t.csv").write_text("Datei,text\na.m4a,one\n")
    assert find_corpus(tmp_path).sources[0].columns == {"audio": "Datei"}
