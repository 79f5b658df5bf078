import pytest
from support import copy_finished, tiny_document

from speech.scoring import parse_trn
from storage.index import ShardIndex
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, StageError
from tasks.stages.decode import DECODE
from tasks.stages.run_sets import scored_sets


def variant(finished, **fields):
    run = Run(parse_config(tiny_document(**fields)), "r")
    run.results = {
        name: result for name, result in finished.results.items() if name in ("prepare", "shard", "features", "train")
    }
    return run


def test_every_utterance_of_the_test_set_has_a_hypothesis(finished):
    result = finished.result("decode")
    rows = read_table(result.store, "test.parquet")
    index = ShardIndex.read(finished.result("shard").store.child("test"))
    assert [row["id"] for row in rows] == list(index.column("id"))
    assert [row["ref"] for row in rows] == list(index.column("text"))
    assert {row["speaker"] for row in rows} == {"f4", "m7"}
    assert all(row["score"] <= 0 and 0 <= row["confidence"] <= 1 and row["duration"] > 0 for row in rows)
    assert result.counts == {"utterances": 12, "empty": sum(not row["hyp"] for row in rows)}


def test_trn_files_agree_with_the_table(finished):
    store = finished.result("decode").store
    rows = read_table(store, "test.parquet")
    for column in ("ref", "hyp"):
        lines = store.read(f"test.{column}.trn").decode().splitlines()
        assert dict(parse_trn(lines)) == {row["id"]: row[column] for row in rows}


def test_test_sets_are_decoded_unless_others_are_configured(finished):
    assert scored_sets(finished) == ["test"]
    assert scored_sets(variant(finished, score={"sets": ["valid", "train"]})) == ["valid", "train"]
    with pytest.raises(StageError, match="'tset', but the data has only test, train, valid"):
        scored_sets(variant(finished, score={"sets": ["tset"]}))


def test_without_a_test_set_the_validation_set_is_decoded(finished):
    import dataclasses

    run = variant(finished)
    shard = run.result("shard")
    record = shard.record | {"sets": {k: v for k, v in shard.record["sets"].items() if k != "test"}}
    run.results["shard"] = dataclasses.replace(shard, record=record)
    assert scored_sets(run) == ["valid"]


def test_key_depends_on_the_decoders_non_default_fields(finished):
    def key(**decode):
        return DECODE.output(variant(finished, decode=decode)).key

    assert key(kind="greedy") == key()
    assert key(kind="beam", beam=16) == key(kind="beam")
    assert len({key(kind="greedy"), key(kind="beam"), key(kind="beam", beam=3)}) == 3


def test_beam_search_has_another_output_of_the_same_model(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    run = variant(finished, decode={"kind": "beam", "beam": 8})
    result = DECODE.execute(run)
    greedy = finished.result("decode")
    assert result.key != greedy.key
    assert result.counts["utterances"] == greedy.counts["utterances"]
    assert DECODE.execute(variant(finished)).key == greedy.key


def test_key_depends_on_content_of_decoder_files_not_paths(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))

    def run(name, text):
        (tmp_path / name).write_text(text)
        return variant(finished, decode={"kind": "words", "words": str(tmp_path / name)})

    first = run("a.txt", "turn\nthe\nlights\non\n")
    result = DECODE.execute(first)
    assert result.counts["utterances"] == 12
    rows = read_table(result.store, "test.parquet")
    assert {word for row in rows for word in row["hyp"].split()} <= {"turn", "the", "lights", "on"}
    assert DECODE.output(run("b.txt", "turn\nthe\nlights\non\n")).key == result.key
    assert DECODE.output(run("a.txt", "turn\n")).key != result.key
    (tmp_path / "a.txt").unlink()
    with pytest.raises(StageError, match=r"decode.words names .*a.txt, which is not there"):
        DECODE.output(first)
