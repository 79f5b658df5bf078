"""A real Prefect server, and workers with separate data folders: helpers of the tests that kill processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from prefect.client.orchestration import get_client
from prefect.flows import Flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import ROOT, end_processes, environment, get_json, processes_naming, starling, tiny_document, wait_until

from flows.deploy.deployments import DEPLOYED_TAG
from flows.deploy.pools import DEFAULT_QUEUE, WorkPool, make_pool
from flows.names import TAG
from flows.servers.services import free_port, prefect_environment, spawn, start_prefect
from tasks.config.pipeline import parse_config
from tasks.orchestration.nodes import QUEUE
from training.coordinator.journal import read_journal

SLOWLY = Path(__file__).resolve().parent / "slowly"
HOOKS = b"_workspace_runtime_bootstrap"
"""In the command line of a worker's own helper, which loads a flow that has ended once more to look for hooks."""
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def slow_document(name, epochs=2, **train):
    """A pipeline with many shards, and a training with epochs of three steps and frequent checkpoints.

    The place where it runs determines how slow it is.
    """
    document = tiny_document(name)
    document["storage"] |= {"shard_seconds": 5, "workers": 1}
    document["train"] |= {"epochs": epochs, "checkpoint_steps": 3, **train}
    return document


class Site:
    """A Prefect server that can be killed and restarted, on the same port and database.

    Attributes:
        home: The server's data folder.
        api: URL of its API.
    """

    def __init__(self, home):
        self.home = home
        self.port = free_port()
        self.start()
        self.api = f"{self.server.url}/api"

    def start(self):
        """Start or restart the server."""
        with environment(STARLING_HOME=self.home):
            self.server = start_prefect(self.port).wait()

    def kill(self):
        """kill -9 of the server."""
        self.server.process.kill()
        self.server.process.wait()

    def stop(self):
        """End the server, and all processes that a failed test left."""
        self.server.stop()
        end_processes(processes_naming(str(self.home)))

    def get(self, path, body=None):
        """Ask the API."""
        return get_json(f"{self.api}/{path}", body)


@contextmanager
def prefect_site(home):
    """A site for the block."""
    names = {"STARLING_HOME": home, "PREFECT_API_URL": None, "MLFLOW_TRACKING_URI": None}
    with environment(**names), environment(**prefect_environment()):
        site = Site(home)
        try:
            yield site
        finally:
            site.stop()


def deploy_flow(flow, name, pool, queue=DEFAULT_QUEUE, **options):
    """Deploy flows/FLOW.py:FLOW at the server of the settings, for a pool of processes; the deployment's id."""
    with get_client(sync_client=True) as api:
        make_pool(api, WorkPool(pool), queue)
    source = Flow.from_source(source=str(ROOT), entrypoint=f"flows/{flow}.py:{flow}")
    quiet = {"print_next_steps": False, "ignore_warnings": True}
    return str(source.deploy(name=name, work_pool_name=pool, work_queue_name=queue, **quiet, **options))


class Place:
    """A data folder with a deployment of one configuration, and a worker for it.

    Args:
        site: The server.
        folder: The data folder; it gets the corpora of another, if one is given.
        document: The configuration.
        made: A data folder from which synthetic speech and stage outputs are copied.
        stages: Which stages' outputs.
        slow_shard: Seconds that each piece of sharding takes longer.
        slow_step: Seconds that each step of training takes longer.
    """

    def __init__(self, site, folder, document, made=None, stages=(), slow_shard=0.0, slow_step=0.0):
        self.site, self.home = site, folder
        self.pool = f"{folder.name}-{uuid4().hex[:8]}"
        self.document = document
        if "launch" in document["train"]:
            document["train"]["launch"] = document["train"]["launch"] | {"pool": self.pool}
        self.config = parse_config(document)
        self.slow = {"STARLING_TEST_SLOW_SHARD": slow_shard, "STARLING_TEST_SLOW_STEP": slow_step}
        self.worker = None
        folder.mkdir(parents=True, exist_ok=True)
        for part in ["corpora", *(f"objects/{stage}" for stage in stages)] if made else []:
            shutil.copytree(made / part, folder / part)
        self._deploy()

    def env(self):
        """Environment of what runs here."""
        values = {
            "STARLING_HOME": self.home,
            "PREFECT_API_URL": self.site.api,
            "OMP_NUM_THREADS": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PYTHONPATH": SLOWLY,
            **self.slow,
        }
        return {name: str(value) for name, value in values.items()}

    def _deploy(self):
        with temporary_settings({PREFECT_API_URL: self.site.api}):
            given = {"config": self.config.model_dump(mode="json", by_alias=True)}
            self.deployment = deploy_flow("pipeline", self.pool, self.pool, tags=[TAG, DEPLOYED_TAG], parameters=given)
            if self.config.train.launch.kind == "prefect":
                deploy_flow("node", self.config.name, self.pool, QUEUE, tags=[TAG])

    def start_worker(self):
        """Start or restart the worker."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self.pool, "--type", "process"]
        with environment(**self.env()):
            self.worker = spawn("worker", command, "", "")

    def run(self, **parameters):
        """Create a run; its id."""
        body = {"parameters": {"until": "train", **parameters}, "idempotency_key": uuid4().hex}
        return self.site.get(f"deployments/{self.deployment}/create_flow_run", body)["id"]

    def state(self, run):
        """Type of a run's state."""
        return self.site.get(f"flow_runs/{run}")["state_type"]

    def ended(self, run, patience_s=480):
        """Wait for a run's end; the type of its state."""
        wait_until(lambda: self.state(run) in ENDED, patience_s, 0.5)
        return self.state(run)

    def command(self, *words):
        """One of Prefect's own commands."""
        command = [sys.executable, "-m", "prefect", *map(str, words)]
        done = subprocess.run(command, env={**os.environ, **self.env()}, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def flow_process(self):
        """Numbers of the processes that run flows of this folder."""
        return [pid for pid in processes_naming(str(self.home)) if b"prefect.engine" in command_line_of(pid)]

    def trainers(self):
        """Numbers of the training processes."""
        return [pid for pid in processes_naming(str(self.home)) if b"training." in command_line_of(pid)]

    def shards(self):
        """Shards in the store."""
        return list(self.home.glob("objects/shard/*/*/*.tar"))

    def checkpoints(self):
        """Files of the checkpoints in the store."""
        return list(self.home.glob("objects/train/*/checkpoints/**/*.safetensors"))

    def is_sharding(self):
        """Whether the first shard exists and the last one does not."""
        return bool(self.shards())

    def is_training(self):
        """Whether a training has written a checkpoint."""
        return bool(self.checkpoints() and self.trainers())

    def record(self, stage):
        """The record that a stage has published; None before."""
        return record_of(self.home, stage)

    def journal(self):
        """The journal of the finished training."""
        return read_journal(next(iter(self.home.glob("objects/train/*/journal.jsonl"))))

    def log(self):
        """The log of the worker and its flows."""
        return (self.home / "logs" / "worker.log").read_text()

    def stop(self):
        """End the worker, and check that no process of its runs is left."""
        if self.worker is not None:
            self.worker.process.kill()
            self.worker.process.wait()
        left = wait_for_none(
            lambda: [pid for pid in processes_naming(str(self.home)) if HOOKS not in command_line_of(pid)], 15
        )
        end_processes(processes_naming(str(self.home)))
        assert left == []


def record_of(home, stage):
    """The record that a stage has published in a data folder; None before."""
    records = list(home.glob(f"objects/{stage}/*/done.json"))
    return json.loads(records[0].read_text()) if records else None


def command_line_of(pid):
    """A process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_none(find, patience_s):
    """Processes that are left when all should have ended."""
    deadline = time.monotonic() + patience_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@contextmanager
def place(site, folder, document, **options):
    """A place with a worker, for the block."""
    machine = Place(site, folder, document, **options)
    try:
        machine.start_worker()
        yield machine
    finally:
        machine.stop()


def undisturbed(folder, document, until="train"):
    """What the stages record in an undisturbed run with its own data folder."""
    path = folder / "config.json"
    folder.mkdir(parents=True)
    path.write_text(json.dumps(document))
    starling("run", path, "--no-prefect", "--until", until, home=folder, timeout=600)
    return {stage: record_of(folder, stage) for stage in ("shard", "train")}
