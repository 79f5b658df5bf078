"""Promotions and rollbacks in processes that kill themselves; a program of test_registry_kills.py.

Everything is imported once. Then each line of standard input is a case, or a list of cases at once; each runs in a
separate process, forked before any database has been opened. The answers are lines of standard output.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import mlflow
import mlflow.store.model_registry.sqlalchemy_store
import mlflow.store.tracking.sqlalchemy_store
from sqlalchemy import event
from sqlalchemy.engine import Engine

from tasks.tracking import promotion, significance
from tasks.tracking.promotion import promote_version
from tasks.tracking.registry import champion_version, rollback, version_of, waiting_challenger
from tasks.tracking.runs import client
from tasks.tracking.significance import Decision

MOVES = ("set_registered_model_alias", "delete_registered_model_alias", "set_model_version_tag", "log_text")
MOVES = (*MOVES, "delete_model_version_tag", "set_registered_model_tag", "log_batch")
TESTS = json.dumps({"test": "aaaa"})


def die():
    """End as kill -9 does: without clean-up, and with transactions left open."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step, where):
    """End this process before, within or after a change of the registry: within is before its first commit."""
    count = [0]
    armed = [False]
    event.listen(Engine, "commit", lambda _: die() if armed[0] else None)

    def wrap(original):
        def call(self, *args, **kwargs):
            count[0] += 1
            if count[0] == step and where == "before":
                die()
            armed[0] = count[0] == step and where == "within"
            result = original(self, *args, **kwargs)
            if count[0] == step:
                die()
            return result

        return call

    for name in MOVES:
        setattr(mlflow.MlflowClient, name, wrap(getattr(mlflow.MlflowClient, name)))


def fake_comparison(case):
    """Replace the comparison by one that takes a moment and that the challenger wins."""

    def decide(run, champion, added):
        note(case, "in", champion)
        time.sleep(case.get("seconds", 0.0))
        if case.get("dies"):
            die()
        note(case, "out", champion)
        return Decision(True, "beats", str(champion.version), 0.2, 0.1, 0.01)

    significance.decide = decide
    significance.tests_tag = promotion.tests_tag = lambda run: TESTS
    promotion.load_run = lambda version: SimpleNamespace(
        run_id="a-run", flow_run_url="", config=SimpleNamespace(lm=None, rescoring=None, decoder=None)
    )


def note(case, what, champion):
    with (Path(case["home"]) / "judged").open("a") as file:
        file.write(f"{what} {case.get('version', '')} {champion.version}\n")


def act(case):
    """Do the actions of a case, one after another, in this process."""
    os.environ["STARLING_HOME"] = case["home"]
    fake_comparison(case)
    if case.get("step"):
        die_at(case["step"], case["where"])
    return [MOVES_BY_NAME[what](case) for what in case["do"].split()]


def state(case):
    """Numbers of the champion, the previous champion and the waiting challenger."""
    versions = {"champion": champion_version(client(), "m"), "previous": version_of(client(), "m", "previous")}
    versions["waiting"] = waiting_challenger(client(), "m")
    return {name: version and str(version.version) for name, version in versions.items()}


MOVES_BY_NAME = {
    "promote": lambda case: promote_version("m", case["version"])["promoted"],
    "rollback": lambda case: rollback("m").champion,
    "state": state,
}


def begin(case):
    """Fork a process for a case; returns its pid and the descriptor of its answer."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        return pid, read
    status = 1
    try:
        os.close(read)
        os.write(write, json.dumps(act(case)).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end(pid, read):
    with os.fdopen(read) as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed, "status": status, "said": json.loads(said or "null")}


if __name__ == "__main__":
    for line in sys.stdin:
        cases = json.loads(line)
        begun = [begin(case) for case in (cases if isinstance(cases, list) else [cases])]
        ended = [end(*move) for move in begun]
        print(json.dumps(ended if isinstance(cases, list) else ended[0]), flush=True)
