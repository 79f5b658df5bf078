import pytest
from support import give_mlflow, tiny_document

from tasks.config.pipeline import parse_config
from tasks.stages.folds import combine
from tasks.tracking.fold_tracking import figures, log_folds
from tasks.tracking.runs import TRAINING_TAG, client, experiment_id


@pytest.fixture
def home(home):
    """A data folder with an empty database of MLflow."""
    give_mlflow(home)
    return home


def score(wer, words=100):
    errors = round(wer * words)
    return {"wer": wer, "cer": wer / 2, "sub": errors, "ins": 0, "del": 0, "words": words, "utterances": 10}


def cross_validated(*rates):
    return combine([{f"fold-{n}": score(rate), "eval": score(0.5)} for n, rate in enumerate(rates, start=1)])


def test_parent_run_has_mean_spread_and_every_fold():
    metrics = figures(cross_validated(0.1, 0.2, 0.3))
    assert metrics["wer_mean"] == pytest.approx(0.2)
    assert metrics["wer_std"] == pytest.approx(0.1)
    assert metrics["pooled_wer"] == pytest.approx(0.2)
    assert [metrics[f"fold-{n}.wer"] for n in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert metrics["fold-2.cer"] == 0.1
    assert metrics["eval.wer_mean"] == 0.5


def test_fold_without_words_has_no_error_rate():
    result = cross_validated(0.1, 0.2)
    result["folds"][0]["wer"] = None
    assert "fold-1.wer" not in figures(result)


def test_same_trainings_give_the_same_parent_run(home):
    config, api = parse_config(tiny_document("crossed")), client()
    experiment = experiment_id(api, "crossed")
    children = [api.create_run(experiment, tags={TRAINING_TAG: name}).info.run_id for name in ("a", "b")]
    first = log_folds(config, "first", cross_validated(0.1, 0.2), ["a", "b"])
    again = log_folds(config, "again", cross_validated(0.1, 0.4), ["a", "b"])
    assert again == first
    parent = api.get_run(first)
    assert (parent.info.run_name, parent.info.status) == ("first", "FINISHED")
    assert parent.data.metrics["fold-2.wer"] == 0.4
    assert len(api.get_metric_history(first, "fold-1.wer")) == 1, "a figure that stays is not logged again"
    names = {api.get_run(child).data.tags["mlflow.parentRunId"] for child in children}
    assert names == {first}
    assert [api.get_run(child).info.run_name for child in children] == ["first-fold-1", "first-fold-2"]
    assert log_folds(config, "anew", cross_validated(0.1, 0.2), ["a", "c"]) != first


def test_trainings_unknown_to_mlflow_never_count_as_the_same(home):
    config = parse_config(tiny_document("crossed"))
    runs = {log_folds(config, name, cross_validated(0.1, 0.2), ["", ""]) for name in ("one", "two")}
    assert len(runs) == 2
    assert not any(run.startswith("not in MLflow") for run in runs)
