"""A CSV with semicolons, as Excel writes it in Germany, or with tabs or "|", as LJSpeech's, had no column for audio."""

import json

import pytest
from support import write_tone

from storage.corpora import open_corpus
from storage.corpora.csv_rows import find_separator
from tasks.dataset.discovery import find_corpus

ROWS = [("path", "text", "speaker"), ("a.wav", "one, two", "ann"), ("b.wav", "three", "ben")]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_separator_is_told_by_the_header(tmp_path, separator, suffix):
    for name in ("a", "b"):
        write_tone(tmp_path / f"{name}.wav")
    quote = '"' if separator in ",;" else ""
    lines = [[f"{quote}{cell}{quote}" if "," in cell else cell for cell in row] for row in ROWS]
    path = tmp_path / f"table{suffix}"
    path.write_text("".join(separator.join(cells) + "\n" for cells in lines))
    rows = [(u.text, u.speaker) for u in open_corpus("auto", str(path))]
    assert rows == [("one, two", "ann"), ("three", "ben")]


def test_columns_of_any_name_are_found_behind_semicolons(tmp_path, invoke):
    write_tone(tmp_path / "a.wav")
    (tmp_path / "metadata.csv").write_text("Dateiname;label;wer, was\na.wav;one, two;x\n")
    (source,) = find_corpus(tmp_path).sources
    assert source.columns == {"audio": "Dateiname", "text": "label"}
    report = json.loads(invoke("corpus", "inspect", str(tmp_path), "--json").stdout.splitlines()[-1])
    assert (report["written"], report["words"]) == (1, 2)


def test_semicolon_rows_with_stray_quotation_marks_affect_only_themselves(tmp_path):
    write_tone(tmp_path / "a.wav")
    rows = ['a.wav;"one; two";1', 'a.wav;"three;2', 'a.wav;say ""four"";3', 'a.wav;"five ""six""";4', "a.wav;x"]
    (tmp_path / "t.csv").write_text("path;text;id\n" + "\n".join(rows) + "\n")
    reader = open_corpus("table", str(tmp_path / "t.csv"))
    assert [(u.id, u.text) for u in reader] == [("1", "one; two"), ("3", 'say ""four""'), ("4", 'five "six"')]
    assert [p.id for p in reader.problems] == ["t.csv:3", "t.csv:6"]


@pytest.mark.parametrize(
    ("header", "separator"),
    [
        ("path,text", ","),
        ("path;text, as read", ";"),
        ("text|path;x;y;z", "|"),
        ("a;b", ";"),
        ("text", ","),
        ("", ","),
        ('"path";"text,a,b,c"', ";"),
    ],
)
def test_known_names_tell_the_separator(header, separator):
    assert find_separator(header, {"path", "text"}, ",") == separator


def test_ljspeech_is_found_by_its_folder_and_by_its_table(tmp_path):
    write_tone(tmp_path / "wavs" / "a.wav")
    (tmp_path / "metadata.csv").write_text("a|Printing, in the only sense|Printing, in the only sense\n")
    for path in (tmp_path, tmp_path / "metadata.csv"):
        assert [source.kind for source in find_corpus(path).sources] == ["ljspeech"]
        assert [u.text for u in open_corpus("auto", str(path))] == ["Printing, in the only sense"]
