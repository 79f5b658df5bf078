"""Reasons in the quarantine that were wrong, or in the words of a library, so that their remedies did not help.

A file that is a folder, pipe or device, or behind a broken link "does not exist"; a line with null characters, as a
crash leaves them, was to be saved in UTF-8; a long cell exceeded a "field limit"; a long number asked to call a
function of Python's; a line of Kaldi's segments without an end had a "list index out of range". Channel 1.5 was 1.
"""

import os

import pytest
from support import write_tone

from storage.corpora import open_corpus


def details(path, kind="table"):
    reader = open_corpus(kind, str(path))
    used = [utterance.id for utterance in reader]
    return used, {problem.id: problem.detail for problem in reader.problems}


def test_what_is_no_file_is_named(tmp_path):
    write_tone(tmp_path / "good.wav")
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "link.wav").symlink_to("gone.wav")
    (tmp_path / "loop.wav").symlink_to("loop.wav")
    names = ["good", "folder", "pipe", "link", "loop", "none"]
    (tmp_path / "t.csv").write_text("path,text\n" + "".join(f"{name}.wav,word\n" for name in names))
    used, reasons = details(tmp_path / "t.csv")
    assert used == ["good"]
    assert reasons["folder"].endswith("folder.wav is a folder, not a file")
    assert reasons["pipe"].endswith("pipe.wav is a device, pipe or socket, not a file")
    assert reasons["link"].endswith("link.wav is a link to gone.wav, which does not exist: mend the link")
    assert "cannot be looked at (Too many levels of symbolic links)" in reasons["loop"]
    assert reasons["none"].endswith("none.wav does not exist")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.wav,o\0ne", "null characters"),
        ("a.wav," + "x" * 200_000, "a cell has more than 131,072 characters: shorten it"),
    ],
)
def test_bad_line_of_a_table_is_explained(tmp_path, line, words):
    write_tone(tmp_path / "a.wav")
    write_tone(tmp_path / "b.wav")
    (tmp_path / "t.csv").write_text(f"path,text\nb.wav,one\n{line}\n")
    used, reasons = details(tmp_path / "t.csv")
    assert used == ["b"]
    assert words in reasons["t.csv:3"]


def test_bad_lines_of_json_are_explained(tmp_path):
    write_tone(tmp_path / "b.wav")
    lines = ['{"path": "b.wav", "text": "one"}', '{"path": "b.wav", "text": ' + "9" * 5000 + "}", '"a\0b"', "[1]"]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    used, reasons = details(tmp_path / "t.jsonl")
    assert used == ["b"]
    assert "a number has 5,000 digits: if it is a text, write it in quotation marks" in reasons["t.jsonl:2"]
    assert "null characters" in reasons["t.jsonl:3"]
    assert reasons["t.jsonl:4"] == "line 4: not a JSON object"


def test_channel_must_be_a_whole_number(tmp_path):
    write_tone(tmp_path / "a.wav")
    write_tone(tmp_path / "b.wav")
    (tmp_path / "t.csv").write_text("path,text,channel,sample_rate\na.wav,one,0.5,\nb.wav,two,0.0,16000.0\n")
    used, reasons = details(tmp_path / "t.csv")
    assert used == ["b"]
    assert "channel is '0.5': it must be a whole number" in reasons["a"]


def test_bad_segments_of_kaldi_are_explained(tmp_path):
    write_tone(tmp_path / "a.wav", seconds=3)
    (tmp_path / "wav.scp").write_text(f"r {tmp_path}/a.wav\n")
    (tmp_path / "segments").write_text("u r 0 1\nv r 1\nw r 0,5 1,0\n")
    (tmp_path / "text").write_text("u one\nv two\nw three\n")
    used, reasons = details(tmp_path, "kaldi")
    assert used == ["u"]
    assert reasons["v"].endswith("'r 1': write: utterance recording start end")
    assert reasons["w"].endswith("'0,5' is no number of seconds, such as 1.25")
