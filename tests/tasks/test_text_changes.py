import csv
import json

import pytest
from support import write_tone

from speech.text_log import undo_changes
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.dataset.text_changes import read_text_changes
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE

TEXTS = {
    "plain": ("en", "hello there"),
    "typed": ("en", "It’s  5 o'clock, Ann!"),
    "capitals": ("en", "ALL OF IT IN CAPITALS"),
    "turkish": ("tr", "Ilık İstanbul"),
    "russian": ("ru", "Всё — хорошо́!"),
    "german": ("de", "Straße 12"),
}


def corpus(folder, texts):
    """A table of noises with these texts, each with a language."""
    folder.mkdir(parents=True)
    with (folder / "t.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "path", "text", "speaker", "language"])
        for n, (name, (language, text)) in enumerate(texts.items()):
            path = write_tone(folder / f"{name}.wav", seed=n)
            writer.writerow([name, path.name, text, f"s{n}", language])
    return str(folder / "t.csv")


def prepared(path, normalizer, **source):
    sources = [{"kind": "table", "path": path, "set": "train", **source}]
    data = {"sources": sources, "normalizer": normalizer, "max_quarantined": 1}
    return PREPARE.execute(Run(parse_config({"name": "p", "data": data}), "r"))


def test_original_transcripts_are_restored_from_the_changes(home, tmp_path):
    result = prepared(corpus(tmp_path / "c", TEXTS), {"kind": "auto"})
    rows = {row["id"]: row for row in read_table(result.store, MANIFEST)}
    assert {name: row["raw_text"] for name, row in rows.items()} == {name: text for name, (_, text) in TEXTS.items()}
    changes = read_text_changes(result.store, tmp_path)
    assert set(changes) == set(TEXTS) - {"plain"}
    for name, row in rows.items():
        assert undo_changes(row["text"], changes.get(name, ())) == row["raw_text"]


def test_each_utterance_is_normalized_by_its_language(home, tmp_path):
    result = prepared(corpus(tmp_path / "c", TEXTS), {"kind": "auto"})
    texts = {row["id"]: row["text"] for row in read_table(result.store, MANIFEST)}
    assert texts["typed"] == "it's five o'clock ann"
    assert texts["turkish"] == "ılık istanbul"
    assert texts["russian"] == "всё хорошо"
    assert texts["german"] == "straße 12"


def test_changes_are_counted_by_kind_and_language_with_examples(home, tmp_path, fragment):
    record = prepared(corpus(tmp_path / "c", TEXTS), {"kind": "auto"}).record["text"]
    assert {name: (entry["utterances"], entry["changed"]) for name, entry in record.items()} == {
        "de": (1, 1),
        "en": (3, 2),
        "ru": (1, 1),
        "tr": (1, 1),
    }
    english = record["en"]
    assert english["kinds"].keys() >= {"case", "number", "punctuation"}
    assert english["examples"].keys() == english["kinds"].keys()
    assert {"id": "capitals", "was": "ALL OF IT IN CAPITALS", "became": "all of it in capitals"} in english["examples"][
        "case"
    ]
    assert json.loads(json.dumps(record)) == record
    page = fragment("text", languages=record)
    assert "2 of 3 in en" in page
    assert "ALL OF IT IN CAPITALS → all of it in capitals" in page
    assert fragment("text", languages={"en": {"utterances": 1, "changed": 0, "kinds": {}, "examples": {}}}) == ""


def test_quotes_in_the_report_are_escaped(fragment):
    example = {"id": "a", "was": "<script>", "became": ""}
    entry = {"utterances": 1, "changed": 1, "kinds": {"punctuation": 1}, "examples": {"punctuation": [example]}}
    assert "&lt;script&gt; → (nothing)" in fragment("text", languages={"<b>": entry})
    assert "<b>" not in fragment("text", languages={"<b>": entry})


def test_source_in_language_without_number_words_is_refused(home, tmp_path):
    pytest.importorskip("num2words")
    path = corpus(tmp_path / "c", {"a": ("", "one")})
    with pytest.raises(ConfigError, match=r"data\.sources\.0 \(language 'xx'\).*numbers: keep"):
        prepared(path, {"kind": "auto", "numbers": "words"}, language="xx")


def test_utterance_in_language_without_number_words_is_quarantined(home, tmp_path):
    pytest.importorskip("num2words")
    texts = {"good": ("de", "Straße 12"), "bad": ("xx", "number 12"), "also": ("en", "number 12")}
    result = prepared(corpus(tmp_path / "c", texts), {"kind": "auto", "numbers": "words"})
    assert [(row["id"], row["reason"]) for row in read_table(result.store, QUARANTINE)] == [("bad", "language")]
    assert {row["id"]: row["text"] for row in read_table(result.store, MANIFEST)} == {
        "good": "straße zwölf",
        "also": "number twelve",
    }
    assert result.counts == {"read": 3, "written": 2, "quarantined": 1}
