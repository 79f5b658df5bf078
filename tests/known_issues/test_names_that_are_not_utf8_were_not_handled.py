"""Of a recording with a Latin-1 name, `starling transcribe` said "a PosixPath is not audio"."""

import json
import os
import subprocess
import sys

import pytest
from forks import Forkable
from support import write_tone

from storage.corpora import open_corpus
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE, QUARANTINE

CAFE = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path):
    """Four utterances, the last with a Latin-1 name, and a file of such a name that is passed over."""
    for name in ("a", "b", "c", CAFE):
        write_tone(tmp_path / "own" / "a.wav")
        (tmp_path / "own" / f"{name}.wav").write_bytes((tmp_path / "own" / "a.wav").read_bytes())
        (tmp_path / "own" / f"{name}.txt").write_text("one two")
    (tmp_path / "own" / f"{CAFE}.doc").touch()
    return tmp_path / "own"


def test_utterance_with_such_a_name_is_quarantined(folder, home):
    data = {"sources": [{"kind": "sidecar", "path": str(folder)}], "max_quarantined": 0.5}
    prepared = PREPARE.execute(
        Run(parse_config({"name": "k", "data": data | {"valid_share": 0, "test_share": 0}}), "r")
    )
    (row,) = read_table(prepared.store, QUARANTINE)
    assert (row["id"], row["reason"]) == (r"caf\udce9", "bad-name")
    assert r"own/caf\udce9.wav is not UTF-8: rename" in row["detail"]
    assert prepared.record["passed_over"]["first"] == [r"caf\udce9.doc"]
    assert prepared.counts == {"read": 4, "written": 3, "quarantined": 1}


def test_problems_with_such_names_can_be_printed(folder):
    (folder / f"{CAFE}.txt").unlink()
    reader = open_corpus("sidecar", str(folder))
    assert len(list(reader)) == 3
    assert [(p.id, p.detail.isprintable()) for p in reader.problems] == [(r"caf\udce9", True)]
    assert len(reader.fingerprint()) == 64


@pytest.mark.parametrize("name", ["lone\ud800.wav", "null\0.wav"])
def test_names_that_no_file_can_have_cost_one_row(tmp_path, name):
    write_tone(tmp_path / "a.wav")
    rows = [{"path": "a.wav", "text": "one"}, {"path": name, "text": "two"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = open_corpus("table", str(tmp_path / "t.jsonl"))
    assert [u.text for u in reader] == ["one"]
    assert [p.reason for p in reader.problems] == ["missing-audio"]
    assert len(reader.fingerprint()) == 64


@pytest.mark.parametrize("kind", ["text", "json", "ctm"])
@pytest.mark.parametrize("place", ["out.txt", "out/"])
def test_transcripts_of_recordings_with_such_names_are_written(folder, tmp_path, bundle, invoke, kind, place):
    where = str(tmp_path / place) + "/" * place.endswith("/")
    names = [str(folder / f"{name}.wav") for name in ("a", CAFE)]
    invoke("transcribe", "-m", str(bundle), "-f", kind, "-o", where, *names)
    written = list((tmp_path / "out").glob("*")) if place == "out/" else [tmp_path / place]
    assert len(written) == (2 if place == "out/" else 1)
    assert all(path.read_text(encoding="utf-8") or kind == "ctm" for path in written)


STRICT = """
import sys
sys.stdout = open(1, "w", encoding="utf-8", errors="strict", closefd=False)
from starling.__main__ import main
main()
"""
"""The command in a process whose output accepts nothing but UTF-8, as with PYTHONIOENCODING=utf-8:strict."""


@pytest.mark.parametrize("words", [["corpus", "inspect"], ["transcribe", "-m"]])
def test_such_names_are_printed_whatever_the_encoding(folder, bundle, words):
    more = [str(bundle), str(folder / "a.wav")] if "transcribe" in words else []
    path = folder / (f"{CAFE}.wav" if more else f"{CAFE}.doc")
    command = [sys.executable, "-c", Forkable(STRICT), *words, *more, str(path)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == (0 if more else 1), done.stderr
    assert (rb"caf\udce9.wav: " in done.stdout) if more else (rb"caf\udce9.doc is neither" in done.stderr)
