"""`starling lexicon`: coverage of the transcripts and of the decoder's words, pronunciations, phones."""

import json

import pytest
import yaml
from support import small_corpus, write_arpa
from typer.testing import CliRunner

from flows.cli.app import app


def phones_of(word):
    return " ".join(f"P{letter}" for letter in word)


@pytest.fixture
def config(home, tmp_path):
    """A configuration of a small corpus with a lexicon and a decoder beside it."""
    small_corpus(tmp_path / "corpus")
    words = ["number", "one", "two", "word", "zero"]  # what the normalizer makes of its texts
    known = words[:-1]
    lines = [f"{word} {phones_of(word)}" for word in known]
    (tmp_path / "lexicon.txt").write_text("\n".join([*lines, lines[0], "broken"]) + "\n")
    unigrams = {"<s>": (-99, 0), "</s>": (-1, None), known[0]: (-0.5, 0), "unheard": (-0.6, 0)}
    write_arpa(tmp_path / "lm.arpa", unigrams, {("<s>", known[0]): -0.1})
    document = {
        "name": "small",
        "data": {"sources": [{"kind": "table", "path": "corpus/metadata.csv"}]},
        "lexicon": {"path": "lexicon.txt", "missing": "unknown"},
        "decode": {"kind": "words", "lm": "lm.arpa"},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "small.yaml", words


def invoke(*words, code=0):
    result = CliRunner().invoke(app, ["lexicon", *map(str, words)])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_check_reports_coverage_by_pronunciations(config):
    path, words = config
    report = json.loads(invoke("check", path, "--json").stdout.splitlines()[-1])
    everything = report["record"]["coverage"]
    assert everything["words"] == len(words) + 1
    assert set(everything["unknown"]) == {words[-1], "unheard"}
    assert everything["unknown"]["unheard"] == 0 < everything["unknown"][words[-1]]
    assert report["sets"]["decoder's words"]["origins"] == {
        "file": {"words": 1, "running": 0},
        "unknown": {"words": 1, "running": 0},
    }
    assert {(suspicion["kind"], suspicion["word"]) for suspicion in report["suspicious"]} == {
        ("quarantined", "broken"),
        ("duplicate", words[0]),
    }
    assert report["record"]["quarantined"] == {"it has no phones": 1}
    text = invoke("check", path).stdout
    assert "Coverage" in text
    assert "quarantined" in text


def test_check_covers_the_words_of_the_language_model(config, tmp_path):
    """With the vocabulary that the stage lm will have, without the held-out text."""
    path, _ = config
    (tmp_path / "books.txt").write_text("Zwei zero\none two\n")
    lm = f"lm={{smoothing: witten-bell, text: [{tmp_path / 'books.txt'}]}}"
    given = ["--set", lm, "--set", "decode={kind: words}"]
    report = json.loads(invoke("check", path, "--json", *given).stdout.splitlines()[-1])
    assert "decoder's words" not in report["sets"]
    part = report["sets"]["language model's words"]
    assert part["origins"]["file"]["words"] >= 2
    assert "zwei" in part["unknown"]
    assert part["running_words"] == 0
    limited = ["--set", "lm={smoothing: witten-bell, vocabulary: 1}", "--set", "decode={kind: words}"]
    report = json.loads(invoke("check", path, "--json", *limited).stdout.splitlines()[-1])
    assert report["sets"]["language model's words"]["words"] == 1
    tokens = ["--set", "lm={smoothing: witten-bell, unit: token}", "--set", "decode={kind: tokens}"]
    report = json.loads(invoke("check", path, "--json", *tokens).stdout.splitlines()[-1])
    assert "language model's words" not in report["sets"]


def test_show_prints_pronunciations_and_writes_kaldis_file(config, tmp_path):
    path, words = config
    written = tmp_path / "out.txt"
    shown = invoke("show", path, words[0], "nowhere", "--write", written)
    assert f"{words[0]}  {phones_of(words[0])}" in shown.stdout
    assert "nowhere  SPN  (unknown)" in shown.stdout
    assert f"{words[0]} {phones_of(words[0])}\n" in written.read_text()
    report = json.loads(invoke("show", path, "--json").stdout.splitlines()[-1])
    assert report["phones"]["SPN"] == 1
    assert report["record"]["words"] == len(words)
    assert "phones" in invoke("show", path).stdout


def test_missing_lexicon_is_named(config):
    path, _ = config
    result = invoke("check", path, "--set", "lexicon.path=none.txt", code=1)
    assert "none.txt cannot be read" in result.stderr
