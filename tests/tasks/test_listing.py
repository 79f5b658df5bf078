"""Lists of registered models and of runs, from a real MLflow."""

import pytest
from support import give_mlflow

from tasks.tracking.listing import list_runs, list_versions
from tasks.tracking.registry import RegistryError
from tasks.tracking.runs import DECISION_TAG, client, experiment_id


@pytest.fixture
def api(home):
    give_mlflow(home)
    return client()


def add_run(api, experiment, name, start, metrics=(), status="FINISHED"):
    run = api.create_run(experiment_id(api, experiment), start_time=start, run_name=name)
    for figure, value in metrics:
        api.log_metric(run.info.run_id, figure, value)
    if status != "RUNNING":
        api.set_terminated(run.info.run_id, status, end_time=start + 90_000)
    return run


def add_version(api, model, run, **tags):
    version = api.create_model_version(model, source=run.info.artifact_uri, run_id=run.info.run_id)
    for name, value in tags.items():
        api.set_model_version_tag(model, version.version, name, value)
    return version.version


def test_versions_have_their_aliases_and_error_rates(api):
    run = add_run(api, "e", "r", 1000)
    for model in ("a", "b", "empty"):
        api.create_registered_model(model)
    rates = {"test.wer": "0.25", "dev.wer": "0.5", "test.wer_low": "0.2", "test.cer": "0.1", "none.wer": "None"}
    for number in range(11):
        add_version(api, "a", run, **rates, **{DECISION_TAG: f"decision {number}"})
    add_version(api, "b", run)
    api.set_registered_model_alias("a", "champion", "2")
    api.set_registered_model_alias("a", "challenger", "11")
    api.set_registered_model_alias("a", "previous", "11")
    named = list_versions(api)
    assert [(version.model, version.version, version.aliases) for version in named] == [
        ("a", "11", ("challenger", "previous")),
        ("a", "2", ("champion",)),
    ]
    assert named[1].wer == {"dev": 0.5, "test": 0.25}
    assert named[1].decision == "decision 1"
    assert [version.version for version in list_versions(api, "a")] == [str(number) for number in range(11, 0, -1)]
    assert [(version.version, version.aliases, version.wer) for version in list_versions(api, "b")] == [("1", (), {})]
    with pytest.raises(RegistryError, match=r"the registry has no model 'c'; it has: a, b, empty"):
        list_versions(api, "c")


def test_models_beyond_one_page_of_the_registry_are_listed(api, monkeypatch):
    for number in range(7):
        api.create_registered_model(f"m{number}")
        add_version(api, f"m{number}", add_run(api, "e", "r", 1000))
        api.set_registered_model_alias(f"m{number}", "champion", "1")
    ask = api.search_registered_models
    monkeypatch.setattr(api, "search_registered_models", lambda page_token: ask(max_results=3, page_token=page_token))
    assert [version.model for version in list_versions(api)] == [f"m{number}" for number in range(7)]


def test_runs_are_listed_newest_first_with_their_results(api):
    assert list_runs(api, "nothing") == []
    rates = (("test.wer", 0.25), ("test.domain.read.wer", 0.3), ("test.corpus.x.wer", 0.4), ("WER/valid_wer", 0.5))
    add_run(api, "one", "old", 1_000, rates)
    lost = [("WER/valid_wer", 0.75), ("training-progress/elapsed", 42.5)]  # it had been resumed after a pause
    add_run(api, "two", "lost", 2_000, lost, "FAILED")
    add_run(api, "two", "new", 3_000, status="RUNNING")
    listed = list_runs(api)
    assert [(run.name, run.experiment, run.status, run.training_seconds) for run in listed] == [
        ("new", "two", "running", None),
        ("lost", "two", "failed", 42.5),
        ("old", "one", "finished", None),
    ]
    assert [run.wer for run in listed] == [{}, {"valid": 0.75}, {"test": 0.25}]
    assert [run.name for run in list_runs(api, "two", limit=1)] == ["new"]
