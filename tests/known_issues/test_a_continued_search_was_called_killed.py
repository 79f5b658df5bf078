"""MLflow called a search killed that another process went on with, from its first training until its end and after.

The process that continued it did not become the owner of its MLflow run, so the next training took it for abandoned.
"""

import json
import subprocess
from dataclasses import asdict, replace

from support import give_mlflow

from tasks.locking.lock_owner import LockOwner
from tasks.tracking.runs import ENDED_TAG, OWNER_TAG, TrainingRun, client, open_training_run
from tasks.tracking.search_tracking import SearchRun
from training.processes.identity import ProcessIdentity


def test_search_belongs_to_the_process_that_continues_it(home):
    give_mlflow(home)
    api, process = client(), subprocess.Popen(["sleep", "60"])
    killed = replace(LockOwner.here("killed"), pid=process.pid, started=ProcessIdentity.of(process.pid).started)
    process.kill()
    process.wait()
    begun = SearchRun("tiny", "study", "killed")
    api.set_tag(begun.run_id, OWNER_TAG, json.dumps(asdict(killed)))
    continued = SearchRun("tiny", "study", "continued")
    open_training_run(api, TrainingRun("trial", "tiny", "trial"))
    run = api.get_run(continued.run_id)
    assert (continued.run_id, run.info.status, run.data.tags.get(ENDED_TAG)) == (begun.run_id, "RUNNING", None)
