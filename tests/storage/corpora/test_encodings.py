"""Encodings of text files that are not UTF-8."""

import gzip

import pytest
from corpus_contract import write_audio

from storage.corpora import CorpusError, open_corpus
from storage.corpora.base import guess_encoding, read_lines

WESTERN = "a.wav|schöne Grüße, déjà vu €\nb.wav|plain\n"


def guess(tmp_path, *contents):
    files = [tmp_path / f"{number}.txt" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return guess_encoding(files)


def test_western_text_is_recognized(tmp_path):
    assert guess(tmp_path, WESTERN.encode("cp1252")) == "windows-1252"
    assert guess(tmp_path, b"plain\n", "café".encode("latin-1")) == "windows-1252"


def test_compressed_text_is_recognized(tmp_path):
    assert guess_encoding([_zipped(tmp_path / "a.gz", WESTERN.encode("cp1252"))]) == "windows-1252"


def _zipped(path, content):
    path.write_bytes(gzip.compress(content))
    return path


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_utf_encodings_need_no_name(tmp_path, encoding):
    text = "a|plain\n" if encoding == "ascii" else WESTERN
    assert guess(tmp_path, text.encode(encoding)) == ""


def test_a_damaged_line_is_no_reason_to_read_utf_8_otherwise(tmp_path):
    assert guess(tmp_path, WESTERN.encode() + b"c.wav|caf\xe9\n") == ""


@pytest.mark.parametrize("content", ["привет мир".encode("cp1251"), b"caf\xe9 \x81", b"caf\xe9 \x00", b""])
def test_what_cannot_be_western_text_is_not_taken_for_it(tmp_path, content):
    assert guess(tmp_path, content) == ""


def test_unreadable_files_are_passed_over(tmp_path):
    (tmp_path / "damaged.gz").write_bytes(b"\x1f\x8b nothing")
    assert guess_encoding([tmp_path / "none.txt", tmp_path / "damaged.gz"]) == ""


@pytest.mark.parametrize("encoding", ["windows-1252", "cp1251", "utf-16-le", "shift_jis"])
def test_lines_are_read_in_the_encoding_that_is_named(tmp_path, encoding):
    text = {"cp1251": "привет", "shift_jis": "こんにちは"}.get(encoding, "Grüße")
    (tmp_path / "a.txt").write_bytes(f"{text}\r\n{text}".encode(encoding))
    assert list(read_lines(tmp_path / "a.txt", encoding)) == [(1, text), (2, text)]


def test_a_line_that_is_not_of_the_encoding_is_none(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\n\x81\n")
    assert list(read_lines(tmp_path / "a.txt", "cp1252")) == [(1, "a"), (2, None)]


@pytest.mark.parametrize("name", ["utf-9", "hex", "rot13", 3, "a\0b"])
def test_unknown_encodings_are_refused(tmp_path, name):
    write_audio(tmp_path / "a.wav")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(CorpusError, match=r"option encoding is .*such as windows-1252 or utf-8"):
        open_corpus("sidecar", str(tmp_path), encoding=name)


@pytest.mark.parametrize("name", ["utf-8", "UTF8", "utf_8_sig"])
def test_utf_8_may_have_its_byte_order_mark(tmp_path, name):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfpath,text\na.wav,gr\xc3\xbcn\n")
    write_audio(tmp_path / "a.wav")
    (utterance,) = open_corpus("table", str(tmp_path / "t.csv"), encoding=name)
    assert utterance.text == "grün"


def test_kaldi_folders_have_the_option(tmp_path):
    write_audio(tmp_path / "a.wav")
    (tmp_path / "wav.scp").write_text("a a.wav\n")
    (tmp_path / "text").write_bytes("a grün\n".encode("latin-1"))
    reader = open_corpus("kaldi", str(tmp_path))
    assert [problem.detail.partition("not UTF-8")[2] for problem in list(reader) or reader.problems] != [""]
    assert "options: {encoding: windows-1252}" in reader.problems[0].detail
    assert [u.text for u in open_corpus("kaldi", str(tmp_path), encoding="windows-1252")] == ["grün"]
