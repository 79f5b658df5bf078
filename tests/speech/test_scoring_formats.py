"""Transcripts of all formats: what is read, which line is wrong and why, and how utterances are paired."""

import sys
from pathlib import Path

import pytest

from speech.scoring import (
    FORMATS,
    PairingRules,
    ScoringError,
    ScoringRules,
    TranscriptError,
    load_pairs,
    read_transcript,
    share_extra,
)
from speech.scoring.formats import find_format

MARKS = ScoringRules(alternatives=True, optional=True)


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def rows(pairs):
    return [(row.id, row.ref, row.hyp, row.speaker) for row in pairs.rows]


SAME = {
    "ref.trn": "the cat (ann-1)\n;; comment\nyes (bob-2)\nno (ann-3)\n",
    "text": "ann-1 the cat\n\nbob-2 yes\nann-3 no\n",
    "ref.jsonl": '{"id": "ann-1", "text": "the cat"}\n{"id": "bob-2", "text": "yes"}\n{"id": "ann-3", "text": "no"}\n',
}


@pytest.mark.parametrize("ref", SAME)
@pytest.mark.parametrize("hyp", SAME)
def test_utterance_formats_have_the_same_content(write, ref, hyp):
    pairs = load_pairs(write(ref, SAME[ref]), write(hyp, SAME[hyp]), MARKS)
    texts = [("ann-1", "the cat", "the cat", "ann"), ("bob-2", "yes", "yes", "bob"), ("ann-3", "no", "no", "ann")]
    assert rows(pairs) == texts
    assert pairs.speakers == "the part of the ids before the first hyphen"


@pytest.mark.parametrize(
    "ids",
    [
        ["call_1", "call_2", "call_3"],
        ["ann-1", "ann-2", "bob"],
        ["1f0a-1", "77bc-2", "90de-3", "1f0a-4", "aa10-5"],  # one prefix in three occurs again
        ["-1", "-2"],
        ["ann-", "ann-1"],
    ],
)
def test_speakers_are_unknown_if_ids_do_not_name_them(write, ids):
    path = write("text", "".join(f"{id_} a\n" for id_ in ids))
    pairs = load_pairs(path, path, MARKS)
    assert ({row.speaker for row in pairs.rows}, pairs.speakers) == ({""}, "")
    write("utt2spk", "".join(f"{id_} s{number % 2}\n" for number, id_ in enumerate(ids)))
    pairs = load_pairs(path, path, MARKS)
    assert [row.speaker for row in pairs.rows] == [f"s{number % 2}" for number in range(len(ids))]
    assert pairs.speakers == "from utt2spk beside text"
    write("utt2spk", f"{ids[0]} s0 more\n")
    with pytest.raises(TranscriptError, match="utt2spk, line 1: write: utterance-id speaker"):
        load_pairs(path, path, MARKS)


def test_format_is_recognized_by_name_unless_given(write):
    assert {find_format(Path(f"x{format_.suffixes[0]}")).name for format_ in FORMATS.values()} == set(FORMATS)
    path = write("ref.out", "a b\n")
    assert read_transcript(path, "ref", "kaldi").utterances[0].text == "b"
    with pytest.raises(TranscriptError, match="give --format, one of trn, kaldi, jsonl, ctm, stm"):
        read_transcript(path, "ref")
    with pytest.raises(TranscriptError, match="'sgml' is not a format"):
        read_transcript(path, "ref", "sgml")


def test_json_lines_of_manifests_are_read(write):
    path = write(
        "both.jsonl",
        '{"audio_filepath": "x.wav", "text": "a b", "pred_text": "a", "speaker": "ann", "domain": "phone"}\n',
    )
    (row,) = load_pairs(path, path, MARKS).rows
    assert (row.id, row.ref, row.hyp, row.speaker, row.domain) == ("x.wav", "a b", "a", "ann", "phone")


def test_speaker_and_domain_come_from_the_reference(write):
    ref = write("ref.jsonl", '{"id": "u", "text": "a", "speaker": "ann", "domain": "phone"}\n')
    hyp = write("hyp.jsonl", '{"id": "u", "text": "a", "speaker": "bob", "domain": "read"}\n')
    (row,) = load_pairs(ref, hyp, MARKS).rows
    assert (row.speaker, row.domain) == ("ann", "phone")


def test_byte_order_mark_is_not_part_of_the_first_id(write):
    assert read_transcript(write("x.txt", "\ufeffu1 a\n"), "ref").utterances[0].id == "u1"


def test_kaldi_files_have_no_comments(write):
    assert [entry.id for entry in read_transcript(write("x.txt", ";;1 a\nu2 b\n"), "ref").utterances] == [";;1", "u2"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.trn", "a (u1)\nno id\n", r"x\.trn, line 2: no utterance id in parentheses"),
        ("x.trn", "a (u1)\nb (u1)\n", r"line 2: utterance 'u1' was already in line 1: keep one"),
        ("x.txt", "u1 a\nu1 b\n", r"line 2: utterance 'u1' was already in line 1"),
        ("x.jsonl", '{"id": "a", "text": "b"}\n{"id"\n', r"line 2: not a JSON object on one line"),
        ("x.jsonl", "[1]\n", r"line 1: not a JSON object: write"),
        ("x.jsonl", '{"id": "a", "words": "b"}\n', r"line 1: no text in ref or text; fields there: id, words"),
        ("x.ctm", "f A 0.1 0.2\n", r"line 1: 4 fields; write: file channel start duration word"),
        ("x.ctm", "f A 0.1 -1 a\n", r"line 1: duration '-1' must be a number of seconds, 0 or more"),
        ("x.ctm", "f A nan 1 a\n", r"line 1: start 'nan' must be a number"),
        ("x.ctm", "f A * * <ALT_BEGIN>\nf A 0 1 a\n", r"line 1: <ALT_BEGIN> without <ALT_END>: close"),
        ("x.ctm", "f A * * <ALT>\n", r"line 1: <ALT> is out of place"),
        ("x.stm", "f A s 1\n", r"line 1: 4 fields; write: file channel speaker start end"),
        ("x.stm", "f A s 2 1 a\n", r"line 1: the segment ends at 1 s, before it starts at 2 s"),
        ("x.stm", ";; only comments\n", r"there is nothing in it"),
    ],
)
def test_errors_are_named_by_line(write, name, text, message):
    with pytest.raises(TranscriptError, match=message):
        read_transcript(write(name, text), "ref")


def test_other_encodings_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "x.txt").write_bytes("u1 café\n".encode("latin-1"))
    with pytest.raises(TranscriptError, match="not UTF-8 text.*iconv"):
        read_transcript(tmp_path / "x.txt", "ref")


def test_unreadable_alternatives_are_named_by_line(write):
    ref, hyp = write("ref.txt", "u1 a\nu2 { b / \n"), write("hyp.txt", "u1 a\nu2 b\n")
    with pytest.raises(TranscriptError, match=r"ref\.txt, line 2: .*write @ for no word"):
        load_pairs(ref, hyp, MARKS)
    assert len(load_pairs(ref, hyp, ScoringRules()).rows) == 2


def test_missing_and_extra_utterances_are_refused_or_counted(write):
    ref, hyp = write("ref.txt", "u1 a b\nu2 c\n"), write("hyp.txt", "u2 c\nu3 x\n")
    with pytest.raises(ScoringError, match=r"lacks 1 utterance: 'u1' of .*--missing delete"):
        load_pairs(ref, hyp, MARKS)
    with pytest.raises(ScoringError, match=r"has 1 utterance: 'u3' that .*--extra insert .*--extra ignore"):
        load_pairs(ref, hyp, MARKS, PairingRules(missing="delete"))
    pairs = load_pairs(ref, hyp, MARKS, PairingRules(missing="delete", extra="insert"))
    assert (pairs.missing, pairs.extra) == (["u1"], ["u3"])
    assert rows(pairs) == [("u1", "a b", "", ""), ("u2", "c", "c", ""), ("u3", "", "x", "")]
    pairs = load_pairs(ref, hyp, MARKS, PairingRules(missing="delete", extra="ignore"))
    assert [row.id for row in pairs.rows] == ["u1", "u2"]


def test_systems_share_their_extra_utterances_with_empty_hypotheses(write):
    ref, inserting = write("ref.txt", "u1 a\n"), PairingRules(extra="insert")
    systems = [write("one.txt", "u1 a\nu2 x\n"), write("two.txt", "u1 b\nu3 y\n")]
    first, two = share_extra([load_pairs(ref, hyp, MARKS, inserting) for hyp in systems])
    assert [(row.id, row.ref, row.hyp) for row in first.rows] == [("u1", "a", "a"), ("u2", "", "x"), ("u3", "", "")]
    assert [(row.id, row.ref, row.hyp) for row in two.rows] == [("u1", "a", "b"), ("u3", "", "y"), ("u2", "", "")]


def test_ids_that_differ_in_case_are_one_utterance_if_case_is_ignored(write):
    ref, hyp = write("ref.trn", "a (S-1)\nb (s-2)\nc (S-2)\n"), write("hyp.trn", "c (S-2)\nb (s-2)\na (s-1)\n")
    folding = ScoringRules(alternatives=True, ignore_case=True)
    assert [(row.id, row.hyp) for row in load_pairs(ref, hyp, folding).rows] == [
        ("S-1", "a"),
        ("s-2", "b"),
        ("S-2", "c"),
    ]
    ref, only = write("two.trn", "a (S-1)\nb (s-1)\n"), write("one.trn", "b (s-1)\n")
    pairs = load_pairs(ref, only, folding, PairingRules(missing="delete"))
    assert [(row.id, row.hyp) for row in pairs.rows] == [("S-1", ""), ("s-1", "b")]
    ref = write("ref.trn", "a (S-1)\nb (s-2)\nc (S-2)\n")
    with pytest.raises(ScoringError, match=r"lacks 1 utterance: 'S-1'"):
        load_pairs(ref, hyp, MARKS)


def test_tags_of_words_are_left_out(write):
    ref = write("ref.trn", r"a;x;y {b;x/c\;d*} e* \* * (s-1)" + "\n")
    hyp = write("hyp.trn", r"a;;z c\;d e;x * ;q (s-1)" + "\n")
    # sclite reads the same words
    assert rows(load_pairs(ref, hyp, MARKS)) == [("s-1", "a { b / c;d } e * *", "a c;d e * ;q", "")]
    stm, ctm = write("ref.stm", "f A s 0 1 a;x\n"), write("hyp.ctm", "f A 0.1 0.1 a;y\n")
    assert rows(load_pairs(stm, ctm, MARKS)) == [("s-000", "a", "a", "s")]
    assert load_pairs(stm, ctm, ScoringRules()).rows[0][1:3] == ("a;x", "a;y")
    text = write("ref.txt", "s-1 a;x\n")
    assert rows(load_pairs(text, text, MARKS)) == [("s-1", "a;x", "a;x", "")]


@pytest.mark.parametrize(("ref", "said"), [("x.trn", "a b (s-1)\n"), ("x.stm", "f A s 0 1 a b\n")])
def test_an_empty_hypothesis_deletes_all_words_if_that_is_asked_for(write, ref, said):
    ref = write(ref, said)
    hyp = write("hyp.ctm" if ref.suffix == ".stm" else "hyp.trn", ";; nothing\n")
    with pytest.raises(TranscriptError, match=r"hyp.*nothing in it.*--missing delete"):
        load_pairs(ref, hyp, MARKS)
    assert [row[1:3] for row in load_pairs(ref, hyp, MARKS, PairingRules(missing="delete")).rows] == [("a b", "")]


def test_list_of_missing_utterances_is_shortened(write):
    ref = write("ref.txt", "".join(f"u{number} a\n" for number in range(9)))
    with pytest.raises(ScoringError, match="lacks 8 utterances: 'u1', 'u2', 'u3', 'u4', 'u5' and 3 more of"):
        load_pairs(ref, write("hyp.txt", "u0 a\n"), MARKS)


def test_incompatible_formats_are_refused(write):
    stm, text = write("ref.stm", "f A s 0 1 a\n"), write("hyp.txt", "u1 a\n")
    with pytest.raises(ScoringError, match=r"\(stm\) cannot be scored against .* \(kaldi\): give stm as reference"):
        load_pairs(stm, text, MARKS)


STM = """;; LABEL "O" "Overall" "all of it"
;; LABEL "CH" "CallHome" ""
en A ann 0 5 <O,CH,x> hello { there / @ } you
en A ann 5 6 <O,CH> IGNORE_TIME_SEGMENT_IN_SCORING
en A ann 6 8 <O,CH> fine
en B bob 1 4 go on
"""
CTM = """;; comment
en A 0.5 0.3 hello 0.9
en A 4.9 0.3 ignored 0.8
en A 5.85 0.2 ignored
en A 5.9 0.2 fine
en A 9 0.3 late
"""


def test_words_belong_to_the_segment_of_their_midpoint(write):
    pairs = load_pairs(write("ref.stm", STM), write("hyp.ctm", CTM), MARKS)
    # sclite gives the same
    assert rows(pairs) == [
        ("ann-000", "hello { there / @ } you", "hello", "ann"),
        ("ann-001", "fine", "fine late", "ann"),
        ("bob-000", "go on", "", "bob"),
    ]
    assert [row.labels for row in pairs.rows] == [("o", "ch"), ("o", "ch"), ()]
    assert pairs.titles == {"o": "Overall", "ch": "CallHome"}
    assert pairs.missing == ["en b"]


def test_labels_without_definitions_are_kept(write):
    stm, ctm = write("ref.stm", "f A s 0 1 <O,X> a\n"), write("hyp.ctm", "f A 0.1 0.1 a\n")
    assert load_pairs(stm, ctm, MARKS).rows[0].labels == ("o", "x")


def test_label_without_a_title_is_its_own_title(write):
    assert read_transcript(write("x.stm", ';; LABEL "CH" "" ""\nf A s 0 1 a\n'), "ref").labels == {"ch": "CH"}


def test_segment_without_length_is_read(write):
    (segment,) = read_transcript(write("x.stm", "f A s 1 1 a\n"), "ref").segments
    assert (segment.start, segment.end, segment.text) == (1, 1, "a")


def test_overlapping_segments_take_words_in_the_order_of_their_starts(write):
    stm = write("ref.stm", "f A s 1 2 inner\nf A s 0 5 outer\n")
    ctm = write("hyp.ctm", "f A 0.4 0.2 one\nf A 1.4 0.2 two\nf A 6 0.2 three\n")
    assert [(row.ref, row.hyp) for row in load_pairs(stm, ctm, MARKS).rows] == [
        ("outer", "one two"),
        ("inner", "three"),
    ]


@pytest.mark.parametrize(
    "text", ["ignore_time_segment_in_scoring", "IGNORETIMESEGMENTINSCORING", "%x IGNORE_TIME_SEGMENT_IN_SCORING"]
)
def test_ignored_segments_are_marked_in_several_ways(write, text):
    stm = write("ref.stm", f"f A s 0 1 a\nf A s 1 2 {text}\nf A s 2 3 b\n")
    ctm = write("hyp.ctm", "f A 0.5 0.1 a\nf A 1.5 0.1 x\nf A 2.5 0.1 b\n")
    assert [row.hyp for row in load_pairs(stm, ctm, MARKS).rows] == ["a", "b"]


def test_the_text_of_an_ignored_segment_is_not_read(write):
    stm = write("ref.stm", "f A s 0 1 a\nf A s 1 2 IGNORE_TIME_SEGMENT_IN_SCORING { a /\n")
    assert [row.ref for row in load_pairs(stm, write("hyp.ctm", "f A 0.5 0.1 a\n"), MARKS).rows] == ["a"]


def test_words_in_a_gap_belong_to_the_next_segment(write):
    stm = write("ref.stm", "f A s 1 2 a\nf A s 4 5 b\n")
    ctm = write("hyp.ctm", "F a 0.1 0.1 early\nf A 1.5 0.1 a\nf A 3 0.1 gap\nf A 7 0.1 late\n")
    assert [row.hyp for row in load_pairs(stm, ctm, MARKS).rows] == ["early a", "gap late"]


def test_channels_without_a_reference_are_refused_or_inserted(write):
    stm, ctm = write("ref.stm", "f A s 1 2 a\n"), write("hyp.ctm", "f A 1.5 0.1 a\ng A 0 0.1 y\nf B 1 0.1 x\n")
    with pytest.raises(ScoringError, match="has 2 utterances: 'f b', 'g a' that"):
        load_pairs(stm, ctm, MARKS)
    pairs = load_pairs(stm, ctm, MARKS, PairingRules(extra="insert"))
    assert [(row.ref, row.hyp) for row in pairs.rows] == [("a", "a"), ("", "x"), ("", "y")]
    assert len(load_pairs(stm, ctm, MARKS, PairingRules(extra="ignore")).rows) == 1


def test_alternatives_of_a_ctm_file_stay_together(write):
    alternatives = (
        "f A * * <ALT_BEGIN>\nf A 0.5 0.2 a\nf A 1.5 0.2 b\nf A * * <ALT>\nf A 0.6 0.2 c\nf A * * <ALT_END>\n"
    )
    stm, ctm = write("ref.stm", "f A s 0 1 a\nf A s 1 2 b\n"), write("hyp.ctm", f"{alternatives}f A 1.9 0.1 d\n")
    assert [row.hyp for row in load_pairs(stm, ctm, MARKS).rows] == ["", "{ a b / c } d"]


def test_alternatives_of_a_ctm_file_have_the_latest_middle_and_may_be_empty(write):
    alternatives = "f A * * <ALT_BEGIN>\nf A 0.5 2 a\nf A * * <ALT>\nf A 1 0.2 b\nf A * * <ALT_END>\n"
    stm = write("ref.stm", "f A s 0 1.3 a\nf A s 1.3 3 b\n")
    assert [row.hyp for row in load_pairs(stm, write("x.ctm", alternatives), MARKS).rows] == ["", "{ a / b }"]
    empty = "f A * * <ALT_BEGIN>\nf A 0.5 0.2 a\nf A * * <ALT>\nf A * * <ALT_END>\n"
    assert [row.hyp for row in load_pairs(stm, write("x.ctm", empty), MARKS).rows] == ["{ a / @ }", ""]


def test_the_first_word_of_a_ctm_line_may_be_a_number(write):
    stm, ctm = write("ref.stm", "f A s 0 1 7\n"), write("hyp.ctm", "f A 0.1 0.2 7 0.9\n")
    assert [row.hyp for row in load_pairs(stm, ctm, MARKS).rows] == ["7"]


@pytest.mark.parametrize("name", FORMATS)
def test_sample_in_the_documentation_of_a_format_is_read(write, name):
    format_ = FORMATS[name]
    documented = sys.modules[format_.read.__module__].__doc__
    lines = [line.strip() for line in documented.splitlines() if line.startswith("    ")]
    transcript = read_transcript(write("sample", "".join(f"{line}\n" for line in lines)), "ref", name)
    assert len(transcript) >= 1
    assert all(entry.text for entry in transcript.segments)
