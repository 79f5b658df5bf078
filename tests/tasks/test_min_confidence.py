"""Training utterances whose confidence is too low are left out: doubtful transcripts, and pseudo-labels."""

import csv
from collections import Counter

import pytest
from support import small_corpus, tiny_bundle

from storage.corpora import READERS, reader_class
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.sources import SourceConfig
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.evaluation import evaluation_config
from tasks.stages.prepare import MANIFEST, PREPARE
from tasks.stages.quarantined import QuarantineError, left_out_lines
from tasks.stages.sources import source_problems


@pytest.fixture
def table(tmp_path):
    """24 utterances with confidences of 0.00, 0.04, …, 0.92."""
    path = small_corpus(tmp_path / "corpus", speakers=6, each=4)
    write(path, lambda number, row: {**row, "confidence": f"{number / 25:.2f}"})
    return path


def write(path, change):
    """Change the rows of a table by a function of their number."""
    with path.open(newline="") as file:
        rows = [change(number, row) for number, row in enumerate(csv.DictReader(file))]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def configured(path, *sources, **data):
    made = [{"kind": "table", "path": str(path), **source} for source in sources]
    data = {"sources": made, "valid_share": 0.2, "duplicates": {"fingerprint": False}, **data}
    return parse_config({"name": "confident", "seed": 1, "data": data})


def prepared(path, *sources, **data):
    return PREPARE.execute(Run(configured(path, *sources, **data), "r"))


def adds_up(counts):
    return counts["read"] == counts["written"] + counts["quarantined"] + counts["unused"]


def test_training_utterances_below_the_limit_are_left_out_and_counted(home, table):
    result = prepared(table, {"set": "train", "min_confidence": 0.48})  # that of the 13th
    kept = [row["id"] for row in read_table(result.store, MANIFEST)]
    assert len(kept) == 12
    assert result.counts == {"read": 24, "written": 12, "quarantined": 0, "unused": 12}
    assert result.record["unused"] == [{"source": 0, "field": "min_confidence", "value": 0.48, "utterances": 12}]
    assert left_out_lines(result.record) == [
        "unused: 12 training utterances of data.sources.0 have a confidence below 0.48"
    ]


def test_validation_and_test_sets_keep_what_is_doubtful(home, table):
    def by_set(result):
        return Counter(row["set"] for row in read_table(result.store, MANIFEST))

    every, sure = by_set(prepared(table, {})), prepared(table, {"min_confidence": 0.48})
    assert adds_up(sure.counts)
    assert sure.counts["unused"] == every["train"] - by_set(sure)["train"] > 0
    assert by_set(sure)["valid"] == every["valid"] > 0
    assert by_set(sure)["test"] == every["test"] > 0


def test_rows_without_a_number_from_0_to_1_are_quarantined_with_the_reason(home, table):
    bad = {3: "", 4: "93", 5: "high", 6: "-0.5", 7: "nan"}
    write(table, lambda number, row: {**row, "confidence": bad.get(number, row["confidence"])})
    result = prepared(table, {"set": "train", "min_confidence": 0.48}, max_quarantined=0.5)
    assert result.record["reasons"] == {"bad-confidence": 5}
    assert result.counts == {"read": 24, "written": 12, "quarantined": 5, "unused": 7}
    details = [row["detail"] for row in read_table(result.store, "quarantine.parquet")]
    assert details[:2] == [
        "it has no confidence: min_confidence needs a number from 0 to 1",
        "its confidence is '93': min_confidence needs a number from 0 to 1",
    ]
    assert prepared(table, {"set": "train"}).counts["written"] == 24  # min_confidence is not set


def test_rows_of_another_set_of_the_corpus_need_no_confidence(home, table):
    write(table, lambda n, row: row | {"split": "test" if n < 4 else "train", "confidence": "" if n < 4 else 0.9})
    assert prepared(table, {"min_confidence": 0.5}).counts == {"read": 24, "written": 24, "quarantined": 0}


def test_share_and_limit_are_counted_apart(home, table):
    result = prepared(table, {"set": "train", "min_confidence": 0.48, "share": 0.5})
    assert adds_up(result.counts)
    counts = {entry["field"]: entry["utterances"] for entry in result.record["unused"]}
    assert counts["min_confidence"] == 12
    assert counts["share"] == 12 - result.counts["written"] > 0


def test_column_of_the_confidence_can_be_named(home, table):
    write(table, lambda _, row: {**{k: v for k, v in row.items() if k != "confidence"}, "sure": row["confidence"]})
    source = {"set": "train", "min_confidence": 0.48}
    expected = (
        "data.sources.0.min_confidence: the utterances of .* have no confidence: add it .the column `confidence`, or "
        "the one in `options: {columns: {confidence: NAME}}`., or remove the field"
    )
    with pytest.raises(ConfigError, match=expected):
        prepared(table, source)
    (problem,) = source_problems(configured(table, source))
    assert problem.startswith("data.sources.0.min_confidence: ")
    named = source | {"options": {"columns": {"confidence": "sure"}}}
    assert source_problems(configured(table, named)) == []
    assert prepared(table, named).counts["unused"] == 12


def test_a_limit_that_leaves_nothing_is_refused(home, table):
    with pytest.raises(
        QuarantineError, match=r"data.sources.0: min_confidence 0.99 leaves none .* lower min_confidence"
    ):
        prepared(table, {"set": "train", "min_confidence": 0.99}, {"set": "valid"})


@pytest.mark.parametrize("kind", [*READERS, "synthetic"])
def test_layouts_without_confidences_name_the_table_that_has_them(kind):
    if kind != "synthetic" and reader_class(kind).CONFIDENCE:
        assert SourceConfig(kind=kind, path="corpus", min_confidence=0.5).min_confidence == 0.5
        return
    with pytest.raises(ValueError, match=r"starling align MODEL CORPUS -o aligned` writes aligned/utterances.csv"):
        SourceConfig(kind=kind, path="corpus", min_confidence=0.5)


def test_an_evaluation_scores_doubtful_utterances_too(table, tmp_path):
    tiny_bundle(tmp_path / "model")
    (source,) = configured(table, {"set": "train", "min_confidence": 0.48}).data.sources
    (scored,) = evaluation_config(tmp_path / "model", "corpus", [source], "").data.sources
    assert (scored.set, scored.min_confidence) == ("test", 0.0)


def test_test_sets_and_folds_have_no_limit():
    with pytest.raises(ValueError, match="the set is 'test': error rates of what a model is sure of would be too good"):
        SourceConfig(kind="table", path="corpus", min_confidence=0.5, set="test")
    with pytest.raises(ConfigError, match=r"leave out sources.share and sources.min_confidence"):
        configured("corpus", {"min_confidence": 0.5}, folds=3)
