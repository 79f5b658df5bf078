"""Words with decomposed letters (NFD, as macOS writes them) were not those of transcripts, which are composed."""

import gzip
import json
import unicodedata

import pytest
from support import write_arpa
from typer.testing import CliRunner

from flows.cli.app import app
from speech.hmm.decoding_graph import word_graph
from speech.hmm.topology import PhoneSet
from speech.lexicon import FileLexiconConfig, build_lexicon
from speech.lm import read_arpa
from speech.lm.kenlm import arpa_copy, arpa_words, load_lm, read_words
from speech.scoring import ScoringRules, load_pairs, read_glm, score_sets
from speech.text import NormalizerConfig, TextNormalizer
from storage.corpora.base import Utterance
from tasks.dataset.sources import SourceConfig

WORD = "élève"
APART = unicodedata.normalize("NFD", WORD)


@pytest.mark.parametrize("line", [f"{APART} e l E v", f"{APART} 1.0 e l E v", f"{APART}\te l E v"])
def test_lexicon_has_words_with_accents(tmp_path, line):
    (tmp_path / "fr.lex").write_text(line + "\n")
    built = build_lexicon(FileLexiconConfig(path=str(tmp_path / "fr.lex"), missing="unknown"), {WORD: 1})
    assert dict(built.coverage.types) == {"file": 1}


def test_permitted_phones_may_have_accents(tmp_path):
    (tmp_path / "lex").write_text(unicodedata.normalize("NFC", "un ã\n"))
    (tmp_path / "phones").write_text(unicodedata.normalize("NFD", "ã\n"))
    cfg = FileLexiconConfig(path=str(tmp_path / "lex"), phones=str(tmp_path / "phones"), missing="unknown")
    assert build_lexicon(cfg, {"un": 1}).bad_lines == []


@pytest.mark.parametrize("packed", [False, True])
def test_language_models_score_words_with_accents(tmp_path, packed):
    path = tmp_path / ("lm.arpa.gz" if packed else "lm.arpa")
    unigrams = {"<unk>": (-9, None), "<s>": (-99, 0), "</s>": (-1, None), APART: (-0.5, 0), "a": (-0.6, 0)}
    write_arpa(tmp_path / "lm.arpa", unigrams, {("<s>", APART): -0.1})
    if packed:
        path.write_bytes(gzip.compress((tmp_path / "lm.arpa").read_bytes()))
    assert arpa_words(str(path)) == [WORD, "a"]
    lm = load_lm(str(path), [WORD])
    assert lm.score(lm.start(False), 0)[1] == pytest.approx(-0.1)
    model = read_arpa(path)
    assert model.score(model.start, model.words.index(WORD))[1] == pytest.approx(-0.1)
    with arpa_copy(path) as copy:
        assert unicodedata.is_normalized("NFC", copy.read_text())
    graph = word_graph(PhoneSet.of([("e",), ("v",)]), {WORD: [("e", "v")], "a": [("v",)]}, path)
    assert (graph.words.words, graph.unpronounced) == (("a", WORD), 0)


def test_lists_of_words_and_alphabets_are_composed(tmp_path):
    (tmp_path / "words").write_text(f"\ufeff{APART} e l E v\n")
    assert read_words(str(tmp_path / "words")) == [WORD]
    assert TextNormalizer(NormalizerConfig(kind="latin", alphabet=f"lv{APART}"))(APART) == WORD


@pytest.mark.parametrize(
    ("ref", "hyp", "names"),
    [
        ("{id} {text}\n", "{id} {text}\n", ("ref.txt", "hyp.txt")),
        ("{text} ({id})\n", "{text} ({id})\n", ("ref.trn", "hyp.trn")),
        ('{{"id": "{id}", "text": "{text}", "speaker": "{id}"}}\n',) * 2 + (("ref.jsonl", "hyp.jsonl"),),
        ("{id} A {id} 0 1 {text}\n", "{id} A 0.1 0.5 {text}\n", ("ref.stm", "hyp.ctm")),
    ],
)
@pytest.mark.parametrize("apart", [0, 1])
def test_transcripts_are_compared_in_composed_letters(tmp_path, ref, hyp, names, apart):
    paths = [tmp_path / name for name in names]
    for place, (path, line) in enumerate(zip(paths, (ref, hyp), strict=True)):
        spelling = APART if place == apart else WORD
        text = line.format(id=f"{spelling}-1", text=spelling)
        path.write_text(json.dumps(json.loads(text)) if line.startswith("{{") else text)  # JSON escapes the marks
    report = score_sets(load_pairs(*paths, ScoringRules()).rows)
    assert report.total.cor == 1
    assert unicodedata.is_normalized("NFC", "".join(report.speakers))


def test_scores_of_given_texts_and_mapping_rules_too(tmp_path):
    assert score_sets([("a", WORD, APART)]).wer == 0.0
    (tmp_path / "x.glm").write_text(f";;\n[{APART}] => [pupil] / [ ] __ [ ]\n")
    assert read_glm(tmp_path / "x.glm").filter("trn", "ref")(f"un {WORD}") == "un pupil"


def test_speakers_are_the_same_in_a_corpus_and_a_configuration():
    utterance = Utterance("a", "a.wav", "text", unicodedata.normalize("NFD", "Zoë"), "corpus")
    source = SourceConfig(kind="table", path="x.csv", speakers=[unicodedata.normalize("NFD", "Zoë")])
    assert utterance.speaker in source.speakers
    assert utterance.speaker == "Zoë"


def test_many_unknown_words_are_reported(home, tmp_path, monkeypatch):
    from support import small_corpus

    monkeypatch.setattr("flows.cli.common.err.width", 300, raising=False)
    small_corpus(tmp_path / "corpus")
    (tmp_path / "lexicon.txt").write_text("one W AH N\nWORD W ER D\n")
    (tmp_path / "c.yaml").write_text(
        json.dumps(
            {
                "name": "small",
                "data": {"sources": [{"kind": "table", "path": str(tmp_path / "corpus" / "metadata.csv")}]},
                "lexicon": {"path": str(tmp_path / "lexicon.txt"), "missing": "unknown"},
            }
        )
    )
    result = CliRunner().invoke(app, ["lexicon", "check", str(tmp_path / "c.yaml")])
    assert result.exit_code == 0, result.output
    assert "nothing looks wrong" not in result.stdout
    assert "no entry looks wrong" in result.stdout
    said = " ".join(result.stderr.split())
    assert "of the running words) have no pronunciation, such as" in said
    assert "correct its spelling, letter case or language" in said
