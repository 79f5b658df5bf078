"""After a model was registered again, in another registry or to be compared, its report was the former one.

Its page told the former decision, and the new MLflow run had no report, although the run's page linked to it.
"""

import html

import pytest
from support import copy_finished, give_mlflow, tiny_document

from tasks.config.pipeline import parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.tracking.runs import REPORT_FILE, client


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the finished pipeline with another registry; returns the decision, and the stages that were not cached."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    give_mlflow(tmp_path)

    def run(promote):
        document = tiny_document()
        document["register"] |= {"promote": promote}
        pipeline = Run(parse_config(document), f"run-{promote}")
        run_plainly(pipeline)
        registered = pipeline.result("register").record
        page = html.unescape(pipeline.result("report").output.read(REPORT_FILE).decode())
        assert registered["decision"]["reason"].replace("`", "") in page.replace("<code>", "").replace("</code>", "")
        assert REPORT_FILE in {file.path for file in client().list_artifacts(registered["mlflow_run"])}
        return registered["decision"]["reason"], [r.name for r in pipeline.results.values() if not r.cached]

    return run


def test_report_is_that_of_the_last_registration(run):
    assert run("manual") == ("waits for `starling promote tiny`", ["register", "report"])
    assert run("auto") == ("became champion: there was none before", ["register", "report"])
    assert run("auto")[1] == []
