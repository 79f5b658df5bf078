"""Trials of one search were compared that had begun with different models.

Each trial looked up `train.init: "@champion"` for itself, so trials began with another model, and paused ones from the
start, once the champion had changed. A study was also continued with another model in `train.init`, since what it
depends on did not have that field.
"""

import pytest
from support import give_mlflow, tiny_document

from flows.search import SearchDisplay, Trials, run_search, study_content
from tasks.config.pipeline import parse_config
from tasks.search.study import StudyError
from tasks.stages.base import StageResult
from tasks.tracking.runs import client, experiment_id


def searched(init, trials=3):
    document = tiny_document()
    document["train"] |= {"init": init}
    space = {"train.optimizer.lr": {"low": 0.001, "high": 0.1}}
    return parse_config(document | {"search": {"method": "random", "trials": trials, "space": space}})


@pytest.fixture
def api(home, monkeypatch):
    """A registry in which two versions have been champion, and the first one is."""
    monkeypatch.setattr(Trials, "draw", lambda trials: None)
    give_mlflow(home)
    api = client()
    api.create_registered_model("tiny")
    for _ in range(2):
        run = api.create_run(experiment_id(api, "tiny"))
        api.create_model_version("tiny", source=run.info.artifact_uri, run_id=run.info.run_id)
    api.set_registered_model_alias("tiny", "champion", "1")
    return api


def test_alias_is_looked_up_once_in_a_search(api):
    begun = []

    def execute(run, until):
        begun.append(run.config.train.init)
        api.set_registered_model_alias("tiny", "champion", "2")
        record = {"result": {"valid": {"loss": 1.0}}}
        run.results["train"] = StageResult("train", f"{len(begun):016x}", "", 0.0, False, {}, record)
        return run

    def search(config):
        return run_search(config, "s", "", lambda shared: None, execute, SearchDisplay())

    search(searched("@champion"))
    assert begun == ["models:/tiny/1"] * 3
    with pytest.raises(StudyError, match="was made with another configuration"):
        search(searched("@champion", trials=4))
    search(searched("tiny/1", trials=4))
    assert begun == ["models:/tiny/1"] * 4


def test_study_depends_on_the_model_that_training_begins_with():
    contents = [study_content(searched(init)) for init in ("", "tiny/1", "tiny/2")]
    assert all(contents.count(content) == 1 for content in contents)
    assert "init" not in contents[0]["configuration"]["train"]
