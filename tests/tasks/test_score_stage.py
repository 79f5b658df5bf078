import json
from types import SimpleNamespace

import pytest

from speech.scoring import score_sets
from tasks.dataset.tables import read_table
from tasks.scores import summarize
from tasks.stages import score
from tasks.stages.score import by_group, figures, learned_nothing, score_rows


def row(name, ref, hyp, speaker="s", domain=""):
    return {"id": name, "ref": ref, "hyp": hyp, "speaker": speaker, "domain": domain}


def test_error_rate_is_over_the_corpus_not_mean_of_utterances():
    rows = [
        row("a", "one two three four five six seven eight", "one two three four five six seven eight"),
        row("b", "no", "yes indeed"),
    ]
    summary = summarize(score_rows(rows), 0)
    assert (summary["sub"], summary["ins"], summary["del"], summary["words"], summary["utterances"]) == (1, 1, 0, 9, 2)
    assert summary["wer"] == pytest.approx(2 / 9)
    assert summary["wer_low"] <= summary["wer"] <= summary["wer_high"]


def test_interval_is_deterministic_for_a_seed():
    rows = [row(f"u{n}", "a b c", "a b c" if n % 3 else "a x") for n in range(30)]
    assert summarize(score_rows(rows), 1) == summarize(score_rows(rows), 1)


def test_set_without_words_has_no_error_rate():
    summary = summarize(score_rows([row("a", "", "noise")]), 0)
    assert (summary["wer"], summary["wer_low"], summary["wer_high"], summary["ins"]) == (None, None, None, 1)


def test_several_speakers_have_an_interval_over_speakers():
    alone = summarize(score_rows([row(f"u{n}", "a b c", "a x c") for n in range(9)]), 0)
    assert (alone["speakers"], alone["wer_speaker_low"], alone["wer_speaker_high"]) == (1, None, None)
    rows = [row(f"u{n}", "a b c", "x y z" if n < 20 else "a b c", speaker=f"s{n // 10}") for n in range(40)]
    summary = summarize(score_rows(rows), 0)
    assert summary["speakers"] == 4
    assert summary["wer_speaker_low"] < summary["wer_low"] < 0.5 < summary["wer_high"] < summary["wer_speaker_high"]
    metrics = figures({"sets": {"test": summary}})
    assert metrics["test.wer_speaker_low"] == summary["wer_speaker_low"]


def test_stage_agrees_with_scoring_its_decoded_table(finished):
    result = finished.result("score")
    rows = read_table(finished.result("decode").store, "test.parquet")
    report = score_sets([(r["id"], r["ref"], r["hyp"], r["speaker"], r["domain"]) for r in rows])
    scores = result.record["sets"]["test"]
    assert scores["wer"] == report.wer
    assert result.counts == {"words": scores["words"], "errors": scores["sub"] + scores["ins"] + scores["del"]}
    document = result.store.read_json("scores.json")
    assert document["sets"] == result.record["sets"]
    assert set(document["details"]["test"]["speakers"]) == {"f4", "m7"}
    assert sum(s["ref_words"] for s in document["details"]["test"]["speakers"].values()) == scores["words"]
    json.dumps(document, allow_nan=False)


def test_the_alignment_report_names_every_utterance(finished):
    text = finished.result("score").store.read("test.alignments.txt").decode()
    assert all(r["id"] in text for r in read_table(finished.result("decode").store, "test.parquet"))


def test_errors_are_listed_by_corpus_if_there_are_several():
    rows = [row("a", "x y", "x z") | {"corpus": "one"}, row("b", "x", "x") | {"corpus": "two"}]
    rows.append(row("c", "y y", "y") | {"corpus": "one"})
    by_name = by_group(score_rows(rows), (row["corpus"] for row in rows))
    assert {name: (counts["errors"], counts["ref_words"]) for name, counts in by_name.items()} == {
        "one": (2, 4),
        "two": (0, 1),
    }


def test_rates_by_corpus_and_domain_have_valid_metric_names():
    rates = {"wer": 0.1, "wer_low": 0.05, "wer_high": 0.2, "cer": None, "words": 9}
    domains = {"": {"wer": 0.3}, "phone/8 kHz é": {"wer": 0.4}, "silent": {"wer": None}}
    record = {"sets": {"test": rates}, "groups": {"test": {"domains": domains, "corpora": {"one": {"wer": 0.5}}}}}
    assert figures(record) == {
        "test.wer": 0.1,
        "test.wer_low": 0.05,
        "test.wer_high": 0.2,
        "test.domain.unnamed.wer": 0.3,
        "test.domain.phone_8_kHz__.wer": 0.4,
        "test.corpus.one.wer": 0.5,
    }


NOTHING_CORRECT = "no word of the test sets was recognized correctly"
WORSE = "its WER is {} % on the test sets, and that of answering {} every time {} %"


@pytest.mark.parametrize(
    ("pairs", "shows"),
    [
        ([("one two", ""), ("three", "x")], NOTHING_CORRECT),
        ([("one two", "one"), ("three", "one")], "all utterances of the test sets were recognized as 'one'"),
        ([("one two three", "one two"), ("four five six", "four x six")], ""),
        ([("one", "one"), ("one", "one")], ""),
        ([("", ""), ("", "noise")], ""),
        ([("one", "one"), ("two", "three")], WORSE.format("50.00", "'one'", "50.00")),
        ([("one", "one"), ("two", "two three four"), ("one", "one")], WORSE.format("66.67", "'one'", "33.33")),
        (
            [("one two three four", "one two three four"), ("five", "a b c d"), ("six", "e f")],
            WORSE.format("100.00", "no word", "100.00"),
        ),
    ],
)
def test_model_has_learned_nothing_if_the_same_text_for_all_is_as_good(monkeypatch, pairs, shows):
    names = "abc"[: len(pairs)]
    rows = {f"{name}.parquet": [row(f"u-{name}", *pair)] for name, pair in zip(names, pairs, strict=True)}
    monkeypatch.setattr(score, "read_table", lambda output, name: rows[name])
    sets = {name: summarize(score_rows(rows[f"{name}.parquet"]), 0) for name in names}
    results = {"score": SimpleNamespace(record={"sets": sets}), "decode": SimpleNamespace(output=None)}
    assert learned_nothing(SimpleNamespace(result=results.__getitem__)) == shows
