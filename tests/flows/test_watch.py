"""Decisions of `watch`, and the messages of flows that check sources."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT, copy_finished, small_corpus, tiny_document

from flows.watch import decide, look, variable_name, waiting
from storage.objects import ObjectStore
from tasks.config.pipeline import parse_config


def table(folder):
    return parse_config(tiny_document(data={"sources": [{"kind": "table", "path": str(folder)}], "sample_rate": 8000}))


def test_change_is_reported_once_after_it_settles():
    state, outcomes = {}, []
    for digest in ("a", "a", "a", "b", "c", "c", "c", "a", "a"):
        outcome, state = decide(digest, state)
        outcomes.append(outcome)
    first = ["Settling", "Changed", "Unchanged"]
    assert outcomes == [*first, "Settling", *first, "Settling", "Changed"]


def test_change_reverted_before_settling_is_ignored():
    _, state = decide("a", {"seen": "a"})
    _, state = decide("b", state)
    assert decide("a", state)[0] == "Unchanged"


def test_check_finds_new_files_and_new_objects(tmp_path):
    config = table(small_corpus(tmp_path / "corpus", speakers=1, each=1).parent)
    store = ObjectStore(tmp_path / "bucket")
    seen = [look(config, [])]
    assert look(config, []) == seen[0]
    seen.append(look(config, [store.url]))
    store.write("incoming/a.flac", b"abc")
    seen.append(look(config, [store.url]))
    (audio,) = (tmp_path / "corpus").rglob("*.wav")
    os.utime(audio, (1, 1))
    seen.append(look(config, [store.url]))
    assert len(set(seen)) == 4


def test_variable_names_are_valid_for_prefect():
    assert variable_name("Mini.Libri-Speech") == "starling_watch_mini_libri_speech"


@pytest.mark.slow  # MLflow makes a database
@pytest.mark.timeout(300)
def test_empty_registry_has_no_waiting_challenger(home):
    assert not waiting(parse_config(tiny_document()))


VERIFY = """
import json, sys
from flows.verify import verify_storage
from tasks.config.pipeline import parse_config
config = parse_config(json.loads(sys.argv[1]))
state = verify_storage(config, return_state=True)
print(state.type.value, state.name, state.message)
"""
WATCH = """
import json, sys
from flows.deploy.deployments import deploy
from flows.watch import watch
from tasks.config.pipeline import parse_config
from prefect.client.orchestration import get_client
config = parse_config(json.loads(sys.argv[1]))
deploy(config)
names = [watch(config, return_state=True).name for _ in range(3)]
with get_client(sync_client=True) as api:
    due = [run for run in api.read_flow_runs() if run.idempotency_key and "tiny-" in run.idempotency_key]
print(json.dumps([names, len(due)]))
"""


def on_a_server(code, config, home):
    """The last line of output of a script with its own Prefect server."""

    wrapped = "from flows.servers.prefect_api import orchestration\nwith orchestration():\n" + "".join(
        f"    {line}\n" for line in code.strip().splitlines()
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    command = [sys.executable, "-c", wrapped, config.model_dump_json(by_alias=True)]
    env = clean | {"STARLING_HOME": str(home)}

    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_storage_fails_on_damage(home):
    config = parse_config(tiny_document())
    assert on_a_server(VERIFY, config, home).startswith("COMPLETED Empty")
    store = ObjectStore(copy_finished(home) / "objects")
    assert "all intact" in on_a_server(VERIFY, config, home)
    (name, *_) = [name for name in store.list() if name.endswith(".tar")]
    store.write(name, store.read(name)[:-1])
    failed = on_a_server(VERIFY, config, home)
    assert failed.startswith("FAILED Failed")
    assert name in failed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_settled_change_requests_one_ingestion(home, tmp_path):
    config = table(small_corpus(tmp_path / "corpus", speakers=2, each=1).parent)
    names, due = json.loads(on_a_server(WATCH, config, home))
    assert names == ["Settling", "Changed", "Unchanged"]
    assert due == 1
