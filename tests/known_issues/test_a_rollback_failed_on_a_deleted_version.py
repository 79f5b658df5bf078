"""A rollback moved the champion and then failed, because the version that `@previous` was to name had been deleted.

No event was sent, and the command said that nothing had happened. A promotion that was killed before it named
`@previous` was never completed, either.
"""

from support import give_mlflow

from tasks.tracking.registry import PREVIOUS, champion_version, make_champion, rollback, version_of
from tasks.tracking.runs import client, experiment_id


def test_rollback_skips_a_deleted_version(home):
    give_mlflow(home)
    api = client()
    run = api.create_run(experiment_id(api, "e"))
    api.create_registered_model("m")
    for _ in range(3):
        version = api.create_model_version("m", source=run.info.artifact_uri, run_id=run.info.run_id)
        make_champion(api, "m", str(version.version), champion_version(api, "m"))
    api.delete_model_version("m", "1")
    assert rollback("m").champion == "2"
    assert str(champion_version(api, "m").version) == "2"
    assert version_of(api, "m", PREVIOUS) is None
