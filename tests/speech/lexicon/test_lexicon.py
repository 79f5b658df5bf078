"""Lexicons: reading four formats, what is quarantined, stress, words that a file lacks, Kaldi's files, suspicions."""

import json
import os
import sys
from collections import Counter
from functools import partial
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from speech.lexicon import (
    LEXICONS,
    EspeakConfig,
    FileLexiconConfig,
    GraphemesConfig,
    Lexicon,
    LexiconChoice,
    LexiconError,
    Pronunciation,
    build_lexicon,
    formats,
    read_lexicon,
)
from speech.lexicon.arpabet import from_ipa
from speech.lexicon.check import suspicions
from speech.lexicon.formats import parse_lines
from speech.lexicon.graphemes import letters
from speech.lexicon.stress import with_stress

KALDI = "a AH\nhello HH AH L OW\nhello HH EH L OW\n#dark D AA R K\n"
KALDIP = "a 0.4 AH\na 1.0 EY\nhello 1 HH AH L OW\n"
CMUDICT = ";;; a comment\nA  AH0\nA(1)  EY1\nHELLO  HH AH0 L OW1 # friendly\n"
MFA = "hello\thh ə l oʊ\nstraße\tʃ t ʁ aː s ə\n"
MFA_P = "hello\t0.9\thh ə l oʊ\nhello\t0.1\thh ɛ l oʊ\n"
MFA_SILENCE = "hello\t0.99\t0.2\t1.1\t0.9\thh ə l oʊ\nbye\t0.5\t0.2\t1.1\t0.9\tb aɪ\n"


def parsed(text, format_="auto"):
    return parse_lines(text.encode().split(b"\n"), format_)


@pytest.mark.parametrize("format_", ["kaldi", "kaldip", "cmudict", "mfa"])
def test_sample_in_the_documentation_of_a_format_is_read(format_):
    samples = dict(line.split(None, 1) for line in formats.__doc__.splitlines() if line.startswith("    "))
    entries = parsed(samples[format_].replace("<tab>", "\t"), format_).entries
    assert {word.upper(): [len(spoken.phones) for spoken in variants] for word, variants in entries.items()} == {
        "READ": [3]
    }


@pytest.mark.parametrize(
    ("text", "format_", "word", "pronunciations"),
    [
        (KALDI, "kaldi", "hello", [(("HH", "AH", "L", "OW"), None), (("HH", "EH", "L", "OW"), None)]),
        (KALDI, "kaldi", "#dark", [(("D", "AA", "R", "K"), None)]),
        (KALDIP, "kaldip", "a", [(("AH",), 0.4), (("EY",), 1.0)]),
        (CMUDICT, "cmudict", "A", [(("AH0",), None), (("EY1",), None)]),
        (CMUDICT, "cmudict", "HELLO", [(("HH", "AH0", "L", "OW1"), None)]),
        ("a AH0\na(2) EY1\n", "cmudict", "a", [(("AH0",), None), (("EY1",), None)]),
        (MFA, "mfa", "straße", [(("ʃ", "t", "ʁ", "aː", "s", "ə"), None)]),
        (MFA_P, "mfa", "hello", [(("hh", "ə", "l", "oʊ"), 0.9), (("hh", "ɛ", "l", "oʊ"), 0.1)]),
        (MFA_SILENCE, "mfa", "bye", [(("b", "aɪ"), 0.5)]),
    ],
)
def test_formats_are_detected_and_read(text, format_, word, pronunciations):
    lexicon = parsed(text)
    assert (lexicon.format, lexicon.bad) == (format_, [])
    assert [(spoken.phones, spoken.probability) for spoken in lexicon.entries[word]] == pronunciations
    assert parsed(text, format_).entries == lexicon.entries


@pytest.mark.parametrize(
    ("text", "format_", "reason"),
    [
        ("word", "kaldi", "no phones"),
        ("word 0.5", "kaldip", "no phones"),
        ("word", "kaldip", "no phones"),
        ("word AH B", "kaldip", "not a probability"),
        ("word 0 AH", "kaldip", "not above 0"),
        ("word 1.5 AH", "kaldip", "not above 0"),
        ("word nan AH", "kaldip", "not above 0"),
        ("word(2) # AH", "cmudict", "no phones"),
        ("\tAH", "mfa", "not one word"),
        ("two words\tAH", "mfa", "not one word"),
        ("word\t0.5\t0.5\tAH", "mfa", "2 numbers"),
        ("wo\x00rd AH", "kaldi", "control characters"),
    ],
)
def test_malformed_line_is_quarantined_with_its_number(text, format_, reason):
    good = {"kaldip": "good 1 G UH D", "mfa": "good\tG UH D"}.get(format_, "good G UH D")
    lexicon = parsed(f"{good}\n\n{text}\n", format_)
    assert list(lexicon.entries) == ["good"]
    assert [(line.number, line.text) for line in lexicon.bad] == [(3, text.strip())]
    assert reason in lexicon.bad[0].reason
    assert lexicon.lines == 2


def test_undecodable_bytes_are_quarantined():
    lexicon = parse_lines([b"a AH", b"caf\xe9 K AE F EY", b"\xef\xbb\xbfb B IY\r"], "kaldi")
    assert list(lexicon.entries) == ["a", "b"]
    assert [(line.number, line.reason) for line in lexicon.bad] == [(2, "it is not UTF-8")]


words = st.text(st.characters(categories=["L"]), min_size=1, max_size=8).map(partial(normalize, "NFC"))
phones = st.lists(st.sampled_from(["AA1", "B", "ˈeɪ", "t͡s", "SIL"]), min_size=1, max_size=6)


@given(st.dictionaries(words, st.lists(phones, min_size=1, max_size=3), min_size=1, max_size=8), st.booleans())
@settings(max_examples=40)
def test_kaldi_files_survive_a_round_trip(tmp_path_factory, entries, probabilities):
    lexicon = Lexicon(
        {word: [Pronunciation(tuple(phones), None) for phones in variants] for word, variants in entries.items()}
    )
    path = tmp_path_factory.mktemp("lexicon") / "lexicon.txt"
    lexicon.write(path, probabilities)
    again = read_lexicon(path, "kaldip" if probabilities else "kaldi")
    assert not again.bad
    assert {word: {spoken.phones for spoken in again.entries[word]} for word in again.entries} == {
        word: {spoken.phones for spoken in lexicon[word]} for word in lexicon
    }
    assert os.listdir(path.parent) == [path.name]


def test_probabilities_are_relative_to_the_likeliest():
    lexicon = Lexicon({"a": [Pronunciation(("AH",), 0.6), Pronunciation(("EY",), 0.3)]})
    assert list(lexicon.lines(True)) == ["<unk> 1 SPN", "a 1 AH", "a 0.5 EY"]
    assert list(lexicon.lines()) == ["<unk> SPN", "a AH", "a EY"]


def test_digest_depends_on_content_only():
    first, other = Pronunciation(("A",), 0.5), Pronunciation(("B",))
    digest = Lexicon({"a": [first, other], "b": [other]}).digest()
    assert Lexicon({"b": [other], "a": [other, first, first]}).digest() == digest
    others = [
        Lexicon({"a": [first], "b": [other]}),
        Lexicon({"a": [Pronunciation(("A",)), other], "b": [other]}),
        Lexicon({"a": [first, other], "b": [other]}, unknown="UNK"),
    ]
    assert len({digest, *(lexicon.digest() for lexicon in others)}) == 4


def test_words_phones_and_homophones_are_listed():
    pronunciations = {"too": [Pronunciation(("T", "UW"))], "two": [Pronunciation(("T", "UW"))]}
    lexicon = Lexicon(pronunciations)
    assert lexicon["nothing"] == lexicon["<unk>"] == (Pronunciation(("SPN",)),)
    assert "nothing" not in lexicon
    assert lexicon.phones() == Counter({"T": 2, "UW": 2, "SPN": 1})
    assert list(lexicon.phones()) == ["SPN", "T", "UW"]
    assert lexicon.homophones() == {("T", "UW"): ["too", "two"]}


@pytest.mark.parametrize(
    ("phone", "merged", "dropped"),
    [
        *[("AH0", "AH0", "AH"), ("AH1", "AH1", "AH"), ("AH2", "AH1", "AH"), ("B", "B", "B")],
        *[("ˌoʊ", "ˈoʊ", "oʊ"), ("ˈə", "ˈə", "ə"), ("i2", "i2", "i2"), ("SPN", "SPN", "SPN")],
    ],
)
def test_stress_is_kept_or_dropped(phone, merged, dropped):
    assert [with_stress(phone, how) for how in ("keep", "merge", "drop")] == [phone, merged, dropped]


def from_file(tmp_path, text, counts, **options):
    (tmp_path / "lexicon").write_text(text, encoding="utf-8")
    return build_lexicon(FileLexiconConfig(path=str(tmp_path / "lexicon"), **options), Counter(counts))


def test_pronunciations_that_dropped_stress_makes_equal_count_once(tmp_path):
    built = from_file(tmp_path, "a 0.5 AH0\na 1 AH1\n", {}, stress="drop", missing="unknown")
    assert built.lexicon["a"] == (Pronunciation(("AH",), 1.0),)


def test_counts_of_words_and_running_words(tmp_path):
    built = from_file(tmp_path, KALDI, {"a": 5, "hello": 2, "zzz": 3, "y": 1}, missing="unknown")
    assert built.coverage.to_dict() == {
        "words": 4,
        "running_words": 11,
        "origins": {"file": {"words": 2, "running": 7}, "unknown": {"words": 2, "running": 4}},
        "unknown": {"zzz": 3, "y": 1},
    }
    assert "zzz" not in built.lexicon
    assert built.record()["digest"] == built.lexicon.digest()
    assert json.loads(json.dumps(built.record())) == built.record()


def test_words_missing_in_cmudict_are_pronounced_in_its_phones(tmp_path):
    pytest.importorskip("espeakng_loader")
    every = "every IH0 Y UW1 AA2 P B T D K G F V TH DH S Z SH ZH HH M N NG L R W Y AE1 AH0 AH1 AY1 EH1 ER0 CH JH\\n"
    text = every.replace("\\n", "\n") + "a(2) EY1\n"
    built = from_file(tmp_path, text, {"nut": 1, "thinly": 1, "-": 2, "boy": 1})
    assert built.lexicon["nut"][0].phones == ("N", "AH1", "T")
    assert dict(built.coverage.types) == {"espeak": 1, "unknown": 3}  # IH1, IY0 and OY1 are not in the file
    assert built.coverage.unknown == Counter({"-": 2, "thinly": 1, "boy": 1})
    assert "2 words whose eSpeak NG phonemes have no counterpart among the file's phones" in built.notes
    dropped = from_file(tmp_path, text, {"nut": 1}, stress="drop")
    assert dropped.lexicon["nut"][0].phones == ("N", "AH", "T")
    assert set(dropped.lexicon.phones()) >= {"AH", "IH"}


def test_ipa_is_converted_to_arpabet():
    said = ["j", "ˌuː", "n", "ɪ", "v", "ˈɜː", "s", "ᵻ", "ɾ", "i"]
    assert from_ipa(said) == ("Y", "UW2", "N", "IH0", "V", "ER1", "S", "IH0", "T", "IY0")
    assert from_ipa(["m", "ˈɔːɹ"]) == ("M", "AO1", "R")
    assert from_ipa(["b", "ˈɑː", "ɾ", "əl"], digits=False) == ("B", "AA", "T", "AH", "L")
    assert from_ipa(["œ"]) is None


def test_without_espeak_missing_words_are_unknown_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    built = from_file(tmp_path, KALDI, {"a": 5, "zzz": 3})
    assert built.coverage.unknown == Counter({"zzz": 3})
    assert "pip install '.[espeak]'" in built.notes[0]
    with pytest.raises(LexiconError, match=r"lexicon.kind espeak: .*pip install '\.\[espeak\]'"):
        build_lexicon(EspeakConfig(), {"a": 1})


def test_espeak_languages_are_chosen_by_tag():
    pytest.importorskip("espeakng_loader")
    german = build_lexicon(EspeakConfig(language="de"), {"öl": 2, "schön": 1, "-": 1})
    assert german.lexicon["öl"][0].phones == ("ˈøː", "l")
    assert german.coverage.unknown == Counter({"-": 1})
    assert build_lexicon(EspeakConfig(language="de", stress="drop"), {"öl": 2}).lexicon["öl"][0].phones == ("øː", "l")
    english = build_lexicon(EspeakConfig(), {"hello": 1})
    assert english.lexicon["hello"][0].phones == ("h", "ə", "l", "ˈoʊ")
    with pytest.raises(LexiconError, match=r"lexicon.language: .*no voice 'no-such"):
        build_lexicon(EspeakConfig(language="no-such"), {"a": 1})


def test_graphemes_are_letters_with_diacritics():
    assert letters("cafe\u0301's") == ("c", "a", "f", "é", "s")
    assert letters("café", marks=False) == ("c", "a", "f", "e")
    assert letters("你好2") == ("你", "好", "2")
    assert letters("-'") == ()
    built = build_lexicon(GraphemesConfig(), {"it's": 4, "-": 2})
    assert built.lexicon["it's"][0].phones == ("i", "t", "s")
    assert built.coverage.unknown == Counter({"-": 2})


def test_case_is_converted_to_the_transcripts_case(tmp_path):
    built = from_file(tmp_path, "HELLO HH AH L OW\n", {"hello": 1}, missing="unknown")
    assert built.coverage.unknown
    assert "lexicon.case=lower" in built.notes[0]
    built = from_file(tmp_path, "HELLO HH AH L OW\n", {"hello": 1}, missing="unknown", case="lower")
    assert (dict(built.coverage.types), built.notes) == ({"file": 1}, [])


def test_lines_with_unlisted_phones_are_quarantined(tmp_path):
    (tmp_path / "phones").write_text("AH vowel\nHH aspirate\nL\nOW\n")
    built = from_file(tmp_path, KALDI, {"hello": 1}, missing="unknown", phones=str(tmp_path / "phones"))
    assert built.lexicon["hello"] == (Pronunciation(("HH", "AH", "L", "OW")),)
    assert built.record()["quarantined"] == {
        "phone EH is not in lexicon.phones": 1,
        "phone D is not in lexicon.phones": 1,
    }
    with pytest.raises(LexiconError, match="lexicon.phones"):
        from_file(tmp_path, KALDI, {}, phones=str(tmp_path / "none"))


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(LexiconError, match="none cannot be read"):
        build_lexicon(FileLexiconConfig(path=str(tmp_path / "none")), {})
    with pytest.raises(LexiconError, match="lexicon holds no pronunciation in the format kaldi, it is empty"):
        from_file(tmp_path, "\n", {})
    with pytest.raises(LexiconError, match="line 1: its second column is not a probability"):
        from_file(tmp_path, KALDI, {}, format="kaldip")


def test_suspicious_entries_are_reported(tmp_path):
    usual = "".join(f"{word} {' '.join(word.upper())}\n" for word in ("blue", "green", "yellow", "orange", "purple"))
    text = usual + "... D AA T\nwashington W\nox O X O X O X O X O X\nred R E D\nred R E D\nword\n"
    reported = suspicions(from_file(tmp_path, text, {}, missing="unknown"))
    assert {(suspicion.kind, suspicion.word) for suspicion in reported} == {
        ("no letters", "..."),
        ("short", "washington"),
        ("long", "ox"),
        ("duplicate", "red"),
        ("quarantined", "word"),
    }
    many = "".join(f"{a}{b}{c} A B\n" for a in "abcdefghijk" for b in "abcdefghijk" for c in "abcdefghijk")
    reported = suspicions(from_file(tmp_path, many + "odd A Q\n", {}, missing="unknown"))
    assert [(suspicion.kind, suspicion.word, suspicion.detail) for suspicion in reported] == [
        ("rare phone", "Q", "only in odd")
    ]


def test_lexicon_is_chosen_by_kind():
    class Holder(BaseModel):
        lexicon: LexiconChoice = GraphemesConfig()

    assert Holder(lexicon={"path": "x"}).lexicon == FileLexiconConfig(path="x")
    for kind in LEXICONS:
        given = {"kind": kind} | ({"path": "x"} if kind == "file" else {})
        assert TypeAdapter(LexiconChoice).validate_python(given).kind == kind
    for wrong in ({"kind": "file"}, {"kind": "dictionary"}, {"kind": "graphemes", "path": "x"}):
        with pytest.raises(ValidationError):
            Holder(lexicon=wrong)


@pytest.mark.slow
def test_real_cmudict_is_read(shared_data):
    folder = shared_data / "lexicon"
    cfg = FileLexiconConfig(
        path=str(folder / "cmudict.dict"), phones=str(folder / "cmudict.symbols"), stress="drop", missing="unknown"
    )
    built = build_lexicon(cfg, Counter({"the": 3, "starling": 1}))
    assert (len(built.lexicon), len(built.lexicon.phones())) == (126_053, 40)
    assert built.record()["quarantined"] == {}
    assert built.lexicon["starling"][0].phones == ("S", "T", "AA", "R", "L", "IH", "NG")
