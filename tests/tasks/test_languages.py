"""Several languages in one attention model, from a table to scores; transcripts with capitals and punctuation."""

import csv
from types import SimpleNamespace

import pytest
from rich.console import Console
from support import tiny_document, write_tone

from flows.score_tables import print_scores
from recognition.bundle import load_spec
from recognition.recognizer import Recognizer
from speech.tokens import TokenConfig, tokenizer_from_dict, train_tokenizer
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages import train
from tasks.stages.base import Run, StageError, get_stage
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import DECODE
from tasks.stages.report import render_evaluation
from tasks.stages.score import SCORE, figures
from tasks.stages.train import TRAIN, check_languages, make_spec

TEXTS = {"de": "Guten Tag, Anna!", "en-GB": "Good day, Anna."}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Twelve recordings of each part, half of them in each language."""
    folder = tmp_path_factory.mktemp("corpus")
    with (folder / "metadata.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "text", "speaker", "part", "language"])
        for number in range(24):
            language = ("de", "en-GB")[number % 2]
            write_tone(folder / f"{number}.wav", rate=8000, seconds=0.6, seed=number)
            part = ("train", "valid", "test")[number // 2 % 3]
            rows.writerow([f"{number}.wav", TEXTS[language], f"s{number // 2 % 3}", part, language])
    return folder / "metadata.csv"


def document_of(table, **fields):
    sources = [
        {"kind": "table", "path": str(table), "set": s, "where": {"part": s}} for s in ("train", "valid", "test")
    ]
    network = {"dim": 16, "layers": 1, "heads": 2, "language": "auto"}
    made = tiny_document(recognizer={"kind": "attention", "decoder_network": network}, tokens={"kind": "words"})
    made["data"] = {"sources": sources, "sample_rate": 8000, "normalizer": {"kind": "none"}, "min_seconds": 0.1}
    made["train"] = made["train"] | {"objective": "attention", "epochs": 1}
    made["decode"] = {"kind": "attention", "beam": 2, "language": "given"}
    return made | fields


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STARLING_HOME", str(tmp_path_factory.mktemp("home")))
        made = Run(parse_config(document_of(table)), "r")
        for name in ("prepare", "shard", "features", "train", "decode", "score"):
            get_stage(name).execute(made)
        yield made


def test_tokens_of_the_training_sets_languages_are_trained_and_known_by_the_model(run, tmp_path):
    bundle = fetch_bundle(run.result("train").store, tmp_path / "bundle")
    tokenizer = load_spec(bundle).build_tokenizer()
    assert tokenizer.symbols[tokenizer.num_text :] == ["<|de|>", "<|en|>"]
    assert list(Recognizer.load(bundle, run.config.decode).languages) == ["de", "en"]
    assert {"loss", "token_accuracy", "wer"} <= TRAIN.record(run)["result"]["valid"].keys()


def test_scores_are_by_language_with_and_without_capitals_and_punctuation(run):
    record = SCORE.record(run)
    assert list(record["groups"]["test"]["languages"]) == ["de", "en-GB"]
    assert {"test.language.de.wer", "test.language.en-GB.wer", "test.wer_normalized"} <= figures(record).keys()
    console = Console(width=120, record=True)
    print_scores(record["sets"], console)
    assert "normalized WER" in console.export_text()
    page = render_evaluation(run, "a model")
    assert "test by language" in page
    assert "Without capitals and punctuation" in page


def test_capitals_and_punctuation_are_errors_of_one_rate_only(run, monkeypatch):
    rows = [row | {"hyp": row["ref"].lower().strip("!.")} for row in read_table(DECODE.output(run), "test.parquet")]
    monkeypatch.setattr("tasks.stages.score.read_table", lambda output, name: rows)
    record = SCORE.work(run, SCORE.output(run))
    scores = record["sets"]["test"]
    assert (scores["wer"], scores["wer_normalized"], scores["cer_normalized"]) == (5 / 6, 0.0, 0.0)


def test_normalized_transcripts_in_one_language_are_scored_as_ever(table):
    plain = parse_config(document_of(table) | {"data": {**document_of(table)["data"], "normalizer": {"kind": "basic"}}})
    assert [config.data.normalizer.keeps_form for config in (plain, parse_config(document_of(table)))] == [False, True]


@pytest.mark.parametrize(
    ("before", "spoken", "tells", "after"),
    [
        ([], ["de", "en-US"], True, ["de", "en"]),
        (["it", "en"], ["de", "en"], True, ["it", "en", "de"]),  # numbers of those that train.init knows stay
        (["it"], ["de"], False, []),
    ],
)
def test_new_languages_stand_behind_those_of_the_model_that_training_begins_with(
    run, monkeypatch, before, spoken, tells, after
):
    known = train_tokenizer(TokenConfig(kind="words"), ["a b"]).with_languages(before)
    monkeypatch.setattr(train, "initial_tokens", lambda run, texts: known.to_dict())
    monkeypatch.setattr(train, "_languages", lambda run, name: spoken)
    monkeypatch.setattr(train, "system_config", lambda run: SimpleNamespace(tells_languages=tells))
    made = tokenizer_from_dict(train._tokens(run))
    assert (list(made.languages), made.num_text) == (after, 3)


def test_training_set_without_languages_is_refused_with_the_remedy(run, monkeypatch):
    monkeypatch.setattr(train, "_languages", lambda run, name: [""])
    with pytest.raises(StageError, match=r"no utterance of the training set has a language: .* data\.sources"):
        make_spec(run)


def test_language_of_another_set_that_is_not_trained_is_refused_with_the_remedy(run, monkeypatch):
    spec = make_spec(run)
    monkeypatch.setattr(train, "_languages", lambda run, name: ["fr"] if name == "valid" else ["de"])
    with pytest.raises(
        StageError, match=r"the set valid cannot be trained: 'fr' is none .*\(de, en\).*, or none in recognizer"
    ):
        check_languages(run, spec)


@pytest.mark.parametrize("kind", ["ctc", "transducer"])
def test_recognizers_without_a_decoder_network_have_no_tokens_of_languages(table, kind):
    document = document_of(table, recognizer={"kind": kind, "language": "auto"}, decode="greedy")
    document["train"]["objective"] = kind
    with pytest.raises(ConfigError, match="language"):
        parse_config(document)
