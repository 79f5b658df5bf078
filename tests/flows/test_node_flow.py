"""The node flow: its child process always ends with it; also with a real Prefect server."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from forks import Forkable
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import (
    ROOT,
    end_processes,
    environment,
    get_json,
    load_beside,
    processes_naming,
    tiny_document,
    wait_until,
    write_config,
)

from flows import node as module
from flows.node import NodeRunError, _run, node, node_folder
from flows.servers.services import free_port, spawn, start_prefect
from tasks.config.pipeline import parse_config
from tasks.orchestration.nodes import QUEUE, NodeRuns
from tasks.orchestration.nodes_api import PrefectApi, check_pool
from tasks.stages.base import StageError
from training.config import TrainConfig
from training.coordinator.journal import read_journal
from training.processes.keys import RingKey

deploy_flow = load_beside(__file__, "prefect_site.py").deploy_flow

PARENT = """
import signal, sys
from pathlib import Path
from flows.node import _run

class Terminated(BaseException):
    pass

def terminate(*_):
    raise Terminated

signal.signal(signal.SIGTERM, terminate)  # as Prefect does in the process of a flow run
child = "import os, sys, time; from training.processes.children import end_with_parent; "
child += "end_with_parent(int(sys.argv[1])); "
child += "print('up', flush=True); time.sleep(100)"
import os
_run([sys.executable, "-c", child, str(os.getpid())], Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_child_process_ends_with_the_flow_in_every_case(tmp_path, home, number):
    log = tmp_path / "node.log"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(home)}
    parent = subprocess.Popen([sys.executable, "-c", Forkable(PARENT), str(log)], env=env, stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and "up" in log.read_text())
    parent.send_signal(number)
    parent.wait(240)
    wait_until(lambda: not processes_naming(str(home)))


def test_childs_status_and_end_of_log_are_reported(tmp_path, monkeypatch):
    (tmp_path / "node.log").write_text("an older session\n")
    child = [sys.executable, "-c", "print('line\\n' * 30 + 'last'); raise SystemExit(3)"]
    monkeypatch.setattr(module, "_run", lambda _, log: _run(child, log))
    with pytest.raises(NodeRunError, match=r"node 2 ended with status 3: the end of .*node\.log:\nline\n") as caught:
        node.fn(2, "127.0.0.1:7100", folder=str(tmp_path))
    assert str(caught.value).endswith("line\nlast")
    assert len(str(caught.value).splitlines()) == 16


def test_log_of_an_earlier_session_is_not_reported(tmp_path, monkeypatch):
    (tmp_path / "node.log").write_text("an older session\n")
    monkeypatch.setattr(module, "_run", lambda _, log: _run([sys.executable, "-c", "raise SystemExit(3)"], log))
    with pytest.raises(NodeRunError) as caught:
        node.fn(2, "127.0.0.1:7100", folder=str(tmp_path))
    assert "older session" not in str(caught.value)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "ring.key"
    RingKey.generate().save(path)
    return path


def test_child_gets_its_rank_but_not_the_key(home, key, monkeypatch):
    commands = []
    monkeypatch.setattr(module, "_run", lambda command, log: commands.append(command) or 0)
    state = node.fn(2, "127.0.0.1:7100", str(key), max_restarts=1)
    assert state.is_completed()
    words = commands[0]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert words[1:4] == ["-m", "tasks.engine", "training.node.agent"]
    assert options == {
        "--coordinator": "127.0.0.1:7100",
        "--key-file": str(key),
        "--folder": str(node_folder(2, "127.0.0.1:7100")),
        "--node-rank": "2",
        "--max-restarts": "1",
        "--bind": "127.0.0.1",
        "--advertise": "127.0.0.1",
        "--parent": str(os.getpid()),
        "--cache": str(home / "cache"),
    }
    assert RingKey.load(key).secret.decode() not in " ".join(words)


def test_credentials_of_a_block_reach_only_the_child(home, monkeypatch, tmp_path):
    """The run's parameters have the block's name; the values are in the environment of this process and its child."""
    values = {"access_key_id": "planted-key", "secret_access_key": "planted-secret", "region": "", "endpoint_url": ""}
    asked = []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of this machine")
    monkeypatch.setattr("tasks.config.credentials._load", lambda name: asked.append(name) or values)
    monkeypatch.setattr("tasks.config.credentials._loaded", set())
    commands, run = [], module._run
    code = "import os; print(os.environ['AWS_ACCESS_KEY_ID'], len(os.environ['AWS_SECRET_ACCESS_KEY']))"

    def child(command, log):
        commands.append(command)
        return run([sys.executable, "-c", code], log)

    monkeypatch.setattr(module, "_run", child)
    assert node.fn(0, "127.0.0.1:7100", credentials="lab").is_completed()
    assert asked == ["lab"]
    log = node_folder(0, "127.0.0.1:7100") / "node.log"
    assert log.read_text().split() == ["planted-key", "14"]
    assert "planted" not in " ".join(commands[0])
    texts = [path.read_bytes() for path in home.rglob("*") if path.is_file() and path != log]
    assert not any(b"planted" in text for text in texts)
    assert node.fn(0, "127.0.0.1:7100").is_completed()
    assert asked == ["lab"]


def test_stopped_node_is_no_failure_and_failed_node_says_why(home, key, monkeypatch):
    monkeypatch.setattr(module, "_run", lambda command, log: 75)
    assert node.fn(0, "127.0.0.1:1", str(key)).name == "Stopped"

    def failed(command, log):
        log.write_text("no GPU here")
        return 1

    monkeypatch.setattr(module, "_run", failed)
    with pytest.raises(NodeRunError, match=r"node 0 ended with status 1: (?s:.*)no GPU here"):
        node.fn(0, "127.0.0.1:1", str(key))


@pytest.mark.parametrize(
    ("coordinator", "key_file", "word"), [("x", "", "HOST:PORT"), ("h:1", "/no/key", "key_file is /no/key")]
)
def test_wrong_parameters_are_refused_before_anything_starts(home, coordinator, key_file, word):
    with pytest.raises(StageError, match=word):
        node.fn(0, coordinator, key_file)


class Pool:
    """A Prefect server, a worker for nodes, and the deployment."""

    def __init__(self, home, server):
        self.home, self.config, self.server = home, ring(), server
        self.api = os.environ["PREFECT_API_URL"] = f"{server.url}/api"
        deploy_flow("node", self.config.name, self.config.train.launch.pool, QUEUE)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "starling", "--type", "process"]
        self.worker = spawn("worker", [*command, "--work-queue", QUEUE, "--name", "test"], "", "")

    def stop(self):
        self.worker.stop()
        self.server.stop()
        end_processes(processes_naming(str(self.home)))

    def runs(self):
        flow_runs = get_json(f"{self.api}/flow_runs/filter", {"sort": "START_TIME_ASC"})
        return {run["id"]: (run["parameters"]["node_rank"], run["state_type"]) for run in flow_runs}

    def children(self):
        """Nodes' processes by rank, and the flows' processes that are their parents."""
        children = {}
        for pid in processes_naming(str(self.home)):
            with suppress(OSError):  # it may end while it is looked at
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"training.node.agent" in words:
                    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                    children[int(words[words.index(b"--node-rank") + 1])] = (pid, parent)
        return children


def ring(**launch):
    document = tiny_document("ring")
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", **launch}}
    return parse_config(document)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    home = tmp_path_factory.mktemp("nodes").resolve()
    names = {"STARLING_HOME": home, "PREFECT_API_URL": None, "MLFLOW_TRACKING_URI": None}
    with environment(**names):
        from flows.servers.services import prefect_environment

        with environment(**prefect_environment()):
            server = start_prefect().wait()
            # Prefect has read its settings long ago
            with temporary_settings({PREFECT_API_URL: f"{server.url}/api"}):
                started = Pool(home, server)
                try:
                    yield started
                finally:
                    started.stop()
    assert processes_naming(str(home)) == []


@pytest.mark.slow
def test_crashed_node_run_is_replaced_alone_and_cancelling_ends_all(pool, tmp_path):
    """No coordinator listens at the address: the nodes wait for it, which is all that this test needs of them."""
    check_pool("starling", "ring")
    with pytest.raises(StageError, match=r"train\.launch\.pool is 'nowhere'.*starling deploy"):
        check_pool("nowhere", "ring")
    with pytest.raises(StageError, match="there is no deployment node/other"):
        check_pool("starling", "other")
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "coordinator.json").write_text(f'{{"address": "127.0.0.1:{free_port()}", "pid": 1}}')
    RingKey.generate().save(folder / "ring.key")
    train: TrainConfig = pool.config.train
    job = type("Job", (), {"run": "k1", "train": train, "journal": folder / "journal.jsonl"})()
    with PrefectApi("ring", job.run) as api:
        runs = NodeRuns(job, api)
        stop = threading.Event()

        def poll():
            while not stop.wait(0.5):
                runs.poll()

        polling = threading.Thread(target=poll, daemon=True)
        polling.start()
        try:
            wait_until(lambda: len(pool.children()) == 2)
            before = pool.children()
            os.kill(before[1][1], signal.SIGKILL)  # the process of one flow run
            wait_until(lambda: pool.children().get(1, before[1])[0] != before[1][0])
            assert pool.children()[0] == before[0]
            states = sorted(pool.runs().values())
            assert [rank for rank, _ in states] == [0, 1, 1]
            assert "CRASHED" in [state for _, state in states]
        finally:
            stop.set()
            polling.join(240)
            runs.close(0.0)
        wait_until(lambda: not pool.children())
        wait_until(lambda: {state for _, state in pool.runs().values()} == {"CANCELLED", "CRASHED"})


@pytest.mark.slow
def test_ring_of_prefect_runs_needs_a_server(home, monkeypatch):
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(StageError, match=r"without --no-prefect"),
    ):
        check_pool("starling", "ring")


def command_line(pool, config, *words):
    """A training by command against the pool's server, as a user would start it."""
    env = {**os.environ, "STARLING_HOME": str(pool.home), "PREFECT_API_URL": pool.api, "OMP_NUM_THREADS": "1"}
    log = (pool.home / "command.log").open("w")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli.app", "run", str(config), "--until", "train", *words],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
        )


def entries(pool):
    """Entries of the newest training's journal."""
    journals = sorted(pool.home.glob("work/train-*/journal.jsonl"), key=lambda path: path.stat().st_ctime)
    return read_journal(journals[-1]) if journals else []


def training(pool, name, epochs):
    """A ring of Prefect runs that trains for so many epochs, deployed."""
    document = tiny_document(name)
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect"}, "epochs": epochs}
    deploy_flow("node", name, "starling", QUEUE)
    return write_config(pool.home / f"{name}.yaml", document)


@pytest.mark.slow
def test_killed_node_rejoins_a_ring_of_prefect_runs(pool):
    config = training(pool, "rejoin", 250)  # long enough for Prefect to bring a node back
    run = command_line(pool, config, "--json")
    try:
        wait_until(lambda: {e["learner"] for e in entries(pool) if e["kind"] == "step"} == {"0.0", "1.0"})
        before = pool.children()
        os.kill(before[1][1], signal.SIGKILL)
        wait_until(lambda: pool.children().get(1, before[1])[0] != before[1][0])
        assert pool.children()[0] == before[0]
        assert run.wait(300) == 0, (pool.home / "command.log").read_text()
    finally:
        run.kill()
        run.wait()
    summary = json.loads((pool.home / "command.log").read_text().splitlines()[-1])
    assert summary["training"]["nodes"] == 2
    assert summary["training"]["utterances"] >= 250 * 24
    wait_until(lambda: not pool.children())
    views = [entry["nodes"] for entry in entries(pool) if entry["kind"] == "view"]
    assert [0] in views
    assert views[-1] == [0, 1] or [0, 1] in views[views.index([0]) :]


@pytest.mark.slow
def test_ending_the_training_ends_its_node_runs_within_ten_seconds(pool):
    run = command_line(pool, training(pool, "cancelled", 100_000))
    try:
        wait_until(lambda: len(pool.children()) == 2)
        wait_until(lambda: {e["learner"] for e in entries(pool) if e["kind"] == "step"} == {"0.0", "1.0"})
        run.send_signal(signal.SIGINT)
        wait_until(lambda: not pool.children())
        run.wait(40)
    finally:
        run.kill()
        run.wait()
