import numpy as np
import pytest
from support import small_corpus, tiny_document

from storage.index import ShardIndex, ShardIndexError
from storage.reading import ShardReader
from storage.union import union_index
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.folds import FoldError, combine, fold_configs
from tasks.stages.prepare import PREPARE
from tasks.stages.run_sets import set_digest, set_url, train_stats
from tasks.stages.shard import SHARD


def folded(path, fold, stages=None, **features):
    document = {
        "name": "folds",
        "data": {"sources": [{"kind": "table", "path": str(path)}], "folds": 3, "fold": fold},
        "storage": {"shard_seconds": 2},
        "features": {"num_mels": 8} | features,
    }
    run = Run(parse_config(document), f"r{fold}")
    for stage in stages or (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


@pytest.mark.parametrize("stored", [False, True])
def test_folds_are_sharded_once_and_unions_read_the_others(home, tmp_path, stored):
    path = small_corpus(tmp_path / "corpus", speakers=8, each=3)
    runs = [folded(path, fold, stored=stored) for fold in (1, 2, 3)]
    assert [[r.cached for r in run.results.values()] for run in runs] == [[False] * 3, [True] * 3, [True] * 3]
    store = runs[0].result("features" if stored else "shard").store
    ids = {n: ShardIndex.read(store.child(f"fold-{n}")).column("id") for n in (1, 2, 3)}
    valid = ShardIndex.read(store.child("valid")).column("id")
    assert sorted(sum(ids.values(), valid)) == sorted(f"s{s}-{n}" for s in range(8) for n in range(3))
    tars = [name for name in store.list() if name.endswith(".tar")]
    for fold, run in enumerate(runs, start=1):
        index = ShardIndex.read(store.child(f"without-fold-{fold}"))
        assert set_url(run, "train") == store.child(f"without-fold-{fold}").url
        assert set_digest(run, "train") == index.digest
        assert sorted(index.column("id")) == sorted(name for n in ids if n != fold for name in ids[n])
        assert {shard.name for shard in index.shards} <= set(tars)
        reader, part = ShardReader(store.child(f"without-fold-{fold}"), index), None
        for row in range(len(index)):
            name = index.shards[index.row(row)["shard"]].name.partition("/")[0]
            part = ShardIndex.read(store.child(name))
            place = part.column("id").index(index.row(row)["id"])
            assert reader.payload(row) == ShardReader(store.child(name), part).payload(place)


def test_statistics_exclude_the_tested_fold(home, tmp_path):
    path = small_corpus(tmp_path / "corpus", speakers=8, each=3)
    runs = [folded(path, fold) for fold in (1, 2, 3)]
    counts = [train_stats(run)["count"] for run in runs]
    whole = runs[0].result("features").record["stats"]["count"]
    assert sum(whole - count for count in counts) == whole
    assert len({set_digest(run, "train") for run in runs}) == 3


def test_run_without_chosen_fold_is_refused_with_a_remedy(home, tmp_path):
    run = folded(small_corpus(tmp_path / "corpus", speakers=8), 0)
    with pytest.raises(FoldError, match="--folds 3"):
        set_url(run, "train")


@pytest.mark.parametrize(("folds", "message"), [(1, "2 folds or more"), (101, "at most 100")])
def test_number_of_folds_is_two_to_a_hundred(home, tmp_path, folds, message):
    config = folded(small_corpus(tmp_path / "corpus", speakers=8), 0, stages=(PREPARE,)).config
    with pytest.raises(FoldError, match=message):
        fold_configs(config, folds)
    for allowed in (2, 100):
        chosen = [fold.data for fold in fold_configs(config, allowed)]
        assert [(data.folds, data.fold) for data in chosen] == [(allowed, n + 1) for n in range(allowed)]


def score(wer, words=100):
    errors = round(wer * words)
    return {"wer": wer, "cer": wer / 2, "sub": errors, "ins": 0, "del": 0, "words": words, "utterances": 10}


def test_mean_and_spread_are_computed_over_folds():
    scores = [{f"fold-{n}": score(wer, 100 * n), "eval": score(0.5)} for n, wer in enumerate((0.1, 0.2, 0.3), 1)]
    combined = combine(scores)
    assert combined["wer"] == pytest.approx({"mean": 0.2, "std": 0.1, "min": 0.1, "max": 0.3})
    assert combined["pooled_wer"] == pytest.approx((10 + 40 + 90) / 600)
    assert combined["sets"]["eval"]["wer"]["std"] == 0
    assert len(combined["folds"]) == 3


def test_sets_of_different_payloads_are_not_joined(home, tmp_path):
    run = folded(small_corpus(tmp_path / "corpus", speakers=8), 1, stored=True)
    parts = {
        "fold-1": ShardIndex.read(run.result("shard").store.child("fold-1")),
        "fold-2": ShardIndex.read(run.result("features").store.child("fold-2")),
    }
    with pytest.raises(ShardIndexError, match="all sets must have the same"):
        union_index(parts, "train")
    with pytest.raises(ShardIndexError, match="all sets must have the same"):
        union_index({}, "train")


@pytest.mark.slow
def test_cross_validation_trains_and_scores_every_fold(home, monkeypatch):
    import mlflow

    from flows.folds import crossvalidate_plainly
    from tasks.tracking.runs import client

    synthesis = {"train": 24, "valid": 4, "test": 0, "train_voices": ["f1", "f2", "m1", "m2"], "valid_voices": ["f5"]}
    document = tiny_document("folds")
    document["data"] |= {"sources": [{"kind": "synthetic", "synthesis": synthesis}]}
    document["train"] |= {"epochs": 1}
    result = crossvalidate_plainly(parse_config(document), 2)
    assert [set(run["sets"]) for run in result["runs"]] == [{"fold-1"}, {"fold-2"}]
    assert sum(fold["utterances"] for fold in result["folds"]) == 24
    assert np.isfinite(result["wer"]["mean"])
    cached = [[stage["cached"] for stage in run["stages"][:3]] for run in result["runs"]]
    assert cached == [[False] * 3, [True] * 3]
    parent = client().get_run(result["mlflow_run"])
    assert parent.data.metrics["wer_mean"] == pytest.approx(result["wer"]["mean"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    assert len(mlflow.MlflowClient().search_runs([parent.info.experiment_id], query)) == 2
