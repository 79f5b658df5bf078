"""Rows of tables and lines of manifests that were silently lost.

One quotation mark too many in a CSV made one cell of everything up to the next one: of 60 rows 12 were read and none
was quarantined. A table that Excel had saved as UTF-16 ended in a traceback. Of a key or column that came twice, the
last one counted; of two different lines of a Kaldi table, too.
"""

import csv
import io
import json
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import write_tone

from speech.features.augment.bank import Bank, BankError
from storage.corpora import CorpusError, open_corpus
from storage.corpora.csv_rows import MOST_LINES, read_header, read_rows
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE, QUARANTINE

HEADER = ["id", "path", "text", "speaker"]
CELL = st.text(st.sampled_from("ab,\"' é"), max_size=12)
ROWS = st.lists(st.tuples(CELL, CELL, CELL, CELL), min_size=15, max_size=30)
DAMAGE = st.tuples(st.sampled_from(["quote", "newline", "cut"]), st.floats(0, 1, exclude_max=True))


def as_csv(rows, end="\r\n"):
    box = io.StringIO()
    csv.writer(box, lineterminator=end).writerows([HEADER, *rows])
    return box.getvalue()


def damaged(text, damages):
    """A table with marks inserted, newlines deleted, or its end cut off, anywhere behind the header."""
    for kind, share in damages:
        begin = text.index("\n") + 1
        place = begin + int(share * (len(text) - begin))
        if kind == "quote":
            text = text[:place] + '"' + text[place:]
        elif kind == "cut":
            text = text[:place]
        elif (end := text.find("\r\n", place)) >= 0:
            text = text[:end] + text[end + 2 :]
    return text


def numbered(text):
    return list(enumerate(text.split("\r\n"), start=1))


def read(text):
    lines = iter(numbered(text))
    width = len(read_header(lines))
    return list(read_rows(lines, width)), width


def whole_row(line):
    """Cells of a line that is a row by itself, by the standard library's strict reader; otherwise None."""
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError):
        return None
    return cells if len(cells) == len(HEADER) else None


def check_no_row_is_lost(text):
    results, width = read(text)
    given_back, previous = dict(results), []
    for number, line in numbered(text)[1:]:
        if whole_row(line) is not None:
            assert given_back[number] == whole_row(line)
        elif line and number not in given_back:  # it continues a cell of the row before
            assert isinstance(previous, list)
            assert any("\n" in cell for cell in previous)
        previous = given_back.get(number, previous)
    assert [number for number, _ in results] == sorted(given_back)
    return results, width


@settings(max_examples=70)
@given(ROWS, DAMAGE)
def test_one_damage_loses_only_the_rows_it_touches(rows, damage):
    text = damaged(as_csv(rows), [damage])
    results, width = check_no_row_is_lost(text)
    lines = [number for number, line in numbered(text)[1:] if line]
    assert [number for number, _ in results] == lines  # every row is either read or refused
    if damage[0] != "cut":
        good = [cells for _, cells in results if isinstance(cells, list) and len(cells) == width]
        assert sum(list(row) in good for row in rows) >= len(rows) - 2


@settings(max_examples=70)
@given(ROWS, st.lists(DAMAGE, min_size=2, max_size=8))
def test_no_damage_swallows_a_row(rows, damages):
    check_no_row_is_lost(damaged(as_csv(rows), damages))


def test_drawn_tables_contain_quotation_marks():
    sizes, quoted = [], []

    @settings(max_examples=50, database=None)
    @given(ROWS)
    def draw(rows):
        sizes.append(len(rows))
        quoted.append(as_csv(rows).count('"'))

    draw()
    assert median(sizes) >= 15
    assert median(quoted) >= 10


def test_a_transcript_over_several_lines_is_one_row():
    text = 'path,text,speaker\r\na.wav,"one\r\ntwo, ""three""\r\n\r\nfour",x\r\nb.wav,five,y\r\n'
    results, _ = read(text)
    assert results == [(2, ["a.wav", 'one\ntwo, "three"\n\nfour', "x"]), (6, ["b.wav", "five", "y"])]


@pytest.mark.parametrize(
    "cell",
    ["\r\n".join(["x"] * (MOST_LINES + 1)), "one\r\nb.wav,two,y\r\nthree", "one\r\n" + "x" * (1 << 20) + "\r\ny"],
)
def test_transcript_that_may_be_several_rows_is_refused(cell):
    text = f'path,text,speaker\r\na.wav,"{cell}",x\r\nc.wav,last,z\r\n'
    results, _ = read(text)
    assert "quotation mark" in results[0][1]
    assert results[-1][1] == ["c.wav", "last", "z"]
    assert len(results) == len([line for _, line in numbered(text)[1:] if line])


@pytest.mark.parametrize("rest", ['two",x,y,z', 'two"more,x', "two"])
def test_unterminated_cell_is_refused_line_by_line(rest):
    results, width = read(f'path,text,speaker\r\na.wav,"one\r\n{rest}\r\n')
    assert [number for number, _ in results] == [2, 3]
    assert "quotation mark" in results[0][1]
    assert isinstance(results[1][1], str) or len(results[1][1]) != width


def corpus(folder, count=60):
    """Rows of a table with a recording each."""
    write_tone(folder / "x.wav", seconds=0.5)
    return [[f"u{n}", "x.wav", f"word number {n}", f"s{n % 6}"] for n in range(count)]


def prepared(path, **fields):
    source = {"kind": "table", "path": str(path), "set": "train"}
    document = {"name": "p", "data": {"sources": [source], "max_quarantined": 1} | fields}
    result = PREPARE.execute(Run(parse_config(document), "r"))
    return result, read_table(result.store, QUARANTINE)


def test_stray_quotation_mark_loses_one_utterance(home, tmp_path):
    rows = corpus(tmp_path)
    text = as_csv(rows).replace("word number 11", '"word number 11')
    (tmp_path / "t.csv").write_text(text.replace("word number 58", '"word number 58"'), newline="")
    result, refused = prepared(tmp_path / "t.csv")
    assert result.counts == {"read": 60, "written": 59, "quarantined": 1}
    assert (refused[0]["id"], refused[0]["reason"]) == ("t.csv:13", "bad-line")
    assert refused[0]["detail"].startswith("line 13: a quotation mark opens a cell that does not end on this line")
    # each remedy of the message
    for mended in ("word number 11", '"""word number 11"', '"word number 11"'):
        (tmp_path / "t.csv").write_text(text.replace('"word number 11', mended), newline="")
        assert prepared(tmp_path / "t.csv")[0].counts["quarantined"] == 0


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("suffix", "mark"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_byte_order_mark_selects_encoding_of_tables(tmp_path, encoding, suffix, mark, end):
    rows = [["id", "path", "text", "speaker"], *corpus(tmp_path, 4)]
    rows[2][2] = "schön"
    path = tmp_path / f"t{suffix}"
    path.write_bytes("".join(mark.join(row) + end for row in rows).encode(encoding))
    reader = open_corpus("table", str(path))
    assert [u.text for u in reader] == ["word number 0", "schön", "word number 2", "word number 3"]
    assert not reader.problems


def test_byte_order_mark_selects_encoding_of_other_layouts(tmp_path):
    write_tone(tmp_path / "x.wav")
    (tmp_path / "wav.scp").write_bytes("u x.wav\n".encode("utf-16"))
    (tmp_path / "text").write_bytes("u schön\n".encode("utf-16"))
    assert [u.text for u in open_corpus("kaldi", str(tmp_path))] == ["schön"]
    row = {"audio_filepath": "x.wav", "text": "schön"}
    (tmp_path / "m.json").write_bytes((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-16"))
    assert [u.text for u in open_corpus("auto", str(tmp_path / "m.json"))] == ["schön"]


def test_wide_encodings_without_byte_order_mark_are_read(tmp_path):
    rows = corpus(tmp_path, 3)
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        (tmp_path / "t.csv").write_bytes(as_csv(rows).encode(encoding))
        assert len(list(open_corpus("table", str(tmp_path / "t.csv")))) == 3


def test_truncated_wide_character_is_one_bad_line(tmp_path):
    content = as_csv(corpus(tmp_path, 4), end="\n").encode("utf-16")
    (tmp_path / "t.csv").write_bytes(content[:-3])
    reader = open_corpus("table", str(tmp_path / "t.csv"))
    assert len(list(reader)) == 3
    assert [problem.reason for problem in reader.problems] == ["bad-line"]


@pytest.mark.parametrize("header", ['id,"path,text,speaker', "id,path,text,text", "id\tpath\ttext\ttext"])
def test_ambiguous_header_is_refused(tmp_path, header):
    path = tmp_path / ("t.tsv" if "\t" in header else "t.csv")
    path.write_text(header + '\nu,x.wav,"word",s\n')
    with pytest.raises(CorpusError, match="line 1: the header cannot be read|has the column 'text' twice"):
        list(open_corpus("table", str(path)))


def test_duplicate_key_in_a_line_is_a_bad_line(tmp_path):
    write_tone(tmp_path / "x.wav")
    lines = ['{"audio": "x.wav", "text": "one", "id": "a"}', '{"audio": "x.wav", "text": "a", "id": "b", "text": "b"}']
    torn = lines[0].replace('"a"', '"c"')
    (tmp_path / "m.jsonl").write_text("\n".join([*lines, torn + torn, torn[:20], torn.replace('"c"', '"d"')]))
    reader = open_corpus("table", str(tmp_path / "m.jsonl"))
    assert [u.id for u in reader] == ["a", "d"]
    assert [(p.id, p.reason) for p in reader.problems] == [(f"m.jsonl:{n}", "bad-line") for n in (2, 3, 4)]
    assert "'text' is given twice" in reader.problems[0].detail


@pytest.mark.parametrize(
    "text", ['path,x\n"short.wav,1\nlong.wav,2\n', 'path,x\n"short.wav\nlong.wav",2\n', "path,x\na\n"]
)
def test_table_of_noises_loses_no_row(tmp_path, text):
    (tmp_path / "noises.csv").write_text(text)
    with pytest.raises(BankError, match=r"noises\.csv"):
        Bank([str(tmp_path / "noises.csv")], 16000)


def test_duplicate_key_in_kaldi_table_is_reported(tmp_path):
    for name in ("x", "y"):
        write_tone(tmp_path / f"{name}.wav", seconds=1.0)
    tables = {
        "wav.scp": "r x.wav\nr y.wav\nr2 y.wav\nr2 y.wav\n",
        "segments": "a r 0.0 0.5\na r 0.5 0.9\nb r2 0.0 0.5\n",
        "utt2spk": "a s1\na s2\nb s3\n",
        "text": "a ONE\nb TWO\nc THREE\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    reader = open_corpus("kaldi", str(tmp_path))
    assert [(u.id, u.audio[-5:], u.end, u.speaker) for u in reader] == [
        ("a", "x.wav", 0.5, "s1"),
        ("b", "y.wav", 0.5, "s3"),
    ]
    expected = {
        "wav.scp:r": "duplicate-id",
        "segments:a": "duplicate-id",
        "utt2spk:a": "duplicate-id",
        "c": "missing-audio",
    }
    assert {p.id: p.reason for p in reader.problems} == expected


def test_bad_entry_in_a_line_keeps_the_others(tmp_path):
    for name in ("a", "b"):
        write_tone(tmp_path / f"{name}.wav")
    names, milliseconds = ["a.wav", "", "b.wav", "c.wav"], [500, 500, 500, "long"]
    data = {"name": names, "label": ["one", "two", "three", "four"], "duration_ms": milliseconds}
    (tmp_path / "m.json").write_text(json.dumps({"identifier": "s", "training_data": data}) + "\n")
    reader = open_corpus("peoples_speech", str(tmp_path / "m.json"))
    assert [u.text for u in reader] == ["one", "three"]
    assert [p.reason for p in reader.problems] == ["bad-line", "bad-line"]


def test_handle_without_recording_is_reported(tmp_path):
    part = tmp_path / "mls_german" / "train"
    write_tone(part / "audio" / "1" / "2" / "1_2_000.flac")
    (part / "transcripts.txt").write_text("1_2_000\tEINS\n")
    (part / "handles.txt").write_text("1_2_000\n1_2_001\n")
    reader = open_corpus("mls", str(part), handles="handles.txt")
    assert [u.id for u in reader] == ["1_2_000"]
    assert [tuple(p)[:2] for p in reader.problems] == [("1_2_001", "missing-transcript")]


def test_two_recordings_with_one_id_are_reported(tmp_path):
    for name in ("x", "y"):
        write_tone(tmp_path / f"{name}.wav", seconds=1.0)
    recordings = [
        {"id": "r", "duration": 1.0, "sources": [{"type": "file", "channels": [0], "source": f"{name}.wav"}]}
        for name in ("x", "y")
    ]
    supervision = {"id": "u", "recording_id": "r", "start": 0.0, "duration": 1.0, "channel": 0, "text": "ONE"}
    (tmp_path / "recordings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in recordings))
    (tmp_path / "supervisions.jsonl").write_text(json.dumps(supervision) + "\n")
    reader = open_corpus("lhotse", str(tmp_path))
    assert [u.audio[-5:] for u in reader] == ["x.wav"]
    assert [p.reason for p in reader.problems] == ["duplicate-id"]
