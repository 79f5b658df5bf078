"""One model of somebody else in a shared registry made `starling models` fail for all models, or call it empty.

A name with an apostrophe broke the filter of the search, a tag like `test.wer` that is no number broke the table, and a
registry whose models have no aliases was said to have no model.
"""

import pytest
from support import give_mlflow

from tasks.tracking.listing import list_runs, list_versions
from tasks.tracking.registry import history
from tasks.tracking.runs import client


@pytest.fixture(autouse=True)
def _registry(home):
    give_mlflow(home)


NAMES = ["it's", 'the "best" one', "both ' and \"", "per%cent", "plain"]


def test_models_of_any_name_without_aliases_are_listed_by_their_newest_version():
    api = client()
    for name in NAMES:
        api.create_registered_model(name)
        for _ in range(2):
            api.create_model_version(name, source="file:///nowhere")
    listed = {version.model: version.version for version in list_versions(api)}
    assert listed == dict.fromkeys(NAMES, "2")
    api.set_registered_model_alias("plain", "champion", "1")
    assert [(version.model, version.version) for version in list_versions(api)] == [("plain", "1")]
    for name in NAMES:
        assert [version.version for version in list_versions(api, name)] == ["2", "1"]
        assert [version["version"] for version in history(api, name)] == ["2", "1"]


def test_tags_that_are_no_figures_are_left_out():
    api = client()
    api.create_registered_model("m")
    tags = {"test.wer": "{not json", "other.wer": "nan", "valid.wer": "0.25"}
    api.create_model_version("m", source="file:///nowhere", tags=tags)
    assert [version.wer for version in list_versions(api)] == [{"valid": 0.25}]


def test_runs_of_an_experiment_of_any_name_are_listed():
    api = client()
    for name in NAMES:
        api.create_run(api.create_experiment(name), run_name="r")
        assert [run.experiment for run in list_runs(api, name)] == [name]
    assert list_runs(api, "no 'such\"") == []
