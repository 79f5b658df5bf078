"""`starling runs` listed the error rates of a set's languages as those of sets of their own: `test.language.de`."""

from support import give_mlflow

from tasks.scores import GROUPS
from tasks.stages.score import figures
from tasks.tracking.listing import list_runs
from tasks.tracking.runs import client, experiment_id


def test_only_whole_sets_are_listed(home):
    give_mlflow(home)
    api = client()
    run = api.create_run(experiment_id(api, "polyglot"))
    groups = {kind: {"a": {"wer": 0.1}, "b": {"wer": 0.3}} for kind in GROUPS}
    metrics = figures({"sets": {"test": {"wer": 0.2}}, "groups": {"test": groups}})
    assert metrics["test.language.a.wer"] == 0.1
    for metric, rate in metrics.items():
        api.log_metric(run.info.run_id, metric, rate)
    assert list_runs(api)[0].wer == {"test": 0.2}
