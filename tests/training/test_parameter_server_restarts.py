"""Parameter servers that are stopped or killed continue with what they saved."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from emulated_nodes import ROOT
from parameter_servers import ADAMW, ask_raw, client_of, gradients, network, raw_socket, service, serving
from support import wait_until
from tones import FEATURES, RATE, TINY

from recognition.bundle import BundleSpec
from recognition.systems.acoustic import AcousticTaskConfig
from speech.features import CmvnStats
from speech.tokens import TokenConfig, train_tokenizer
from training.config import AdamWConfig
from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import JobRequest
from training.job import TrainJob
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, set_learning_rate
from training.node.rank import STOPPED
from training.parameter_server.client import ServerError
from training.parameter_server.layout import layout
from training.parameter_server.messages import ServerRequest, pack
from training.parameter_server.server import note_file
from training.parameter_server.service import SavedError
from training.processes.keys import RingKey
from training.processes.sockets import read_address

# --- saved


def test_stopped_server_resumes_with_its_complete_state(tmp_path):
    flat = FlatParameters(network())
    first, second = gradients(flat, 2)
    with serving(tmp_path, 2, ADAMW) as addresses, client_of(addresses) as client:
        client.init("s", flat.weights, {})
        client.push(first, [0, 0], 0.1)
        (weights, _), state = client.pull(), client.state()
        with raw_socket(addresses[0]) as raw:
            request = ServerRequest(op="push", name="raw", token="t", number=1, version=1, lr=0.0)
            values = torch.zeros(layout(flat, 0, 2).num_grads)
            answer = ask_raw(raw, pack(request, [values]))
    with serving(tmp_path, 2, ADAMW) as addresses, client_of(addresses) as client, raw_socket(addresses[0]) as raw:
        assert client.pull()[1] == [2, 1]
        assert ask_raw(raw, pack(request, [values])) == answer  # answered before: not applied again
        assert not client.init("s", torch.zeros_like(flat.weights), {})
        assert client.pull()[1] == [2, 1]
        assert client.push(second, [1, 1], 0.1) == ([3, 2], 0.5)
    with serving(tmp_path, 2, ADAMW, fresh=True) as addresses, client_of(addresses) as client:
        with pytest.raises(ServerError, match="no weights yet"):
            client.pull()
        assert client.init("s", weights, state)


def test_state_of_another_training_is_ignored_and_damage_reported(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, client_of(addresses) as client:
        client.init("s", flat.weights, {})
    assert service(tmp_path, 0, 1).share.session == "s"
    assert service(tmp_path, 0, 1, run="run-2").share.session == ""
    assert service(tmp_path, 0, 2).share.session == ""
    path = tmp_path / "server-0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SavedError, match=r"server-0.safetensors cannot be read.*remove it"):
        service(tmp_path, 0, 1)


# --- processes


def make_job(folder):
    tokenizer = train_tokenizer(TokenConfig(kind="words"), ["ba ce di"])
    stats = CmvnStats(FEATURES.num_mels)
    stats.add(torch.randn(1, 50, FEATURES.num_mels), torch.tensor([50]))
    spec = BundleSpec(
        sample_rate=RATE,
        features=FEATURES,
        stats=stats.to_dict(),
        tokenizer=tokenizer.to_dict(),
        model=TINY["conformer"],
    )
    task = AcousticTaskConfig(spec=spec, train_url="t", valid_url="v")
    values = {"run": "r", "seed": 1, "train": {"strategy": "asgd", "nodes": 2}, "task": task, "output_url": "o"}
    return TrainJob.model_validate(values | {"journal": folder / "journal.jsonl", "cache": folder / "cache"})


class Process:
    """A server's process."""

    def __init__(self, folder, number, servers):
        self.folder, self.number, self.servers = folder, number, servers
        (folder / "job.json").write_text(make_job(folder).model_dump_json())

    def words(self, *more):
        words = ["--job", self.folder / "job.json", "--folder", self.folder / "servers", "--parent", os.getpid()]
        words += ["--number", self.number, "--servers", self.servers, *more]
        return [sys.executable, "-m", "tasks.engine", "training.parameter_server.server", *map(str, words)]

    def start(self, *more):
        self.process = subprocess.Popen(self.words(*more), cwd=ROOT, stderr=subprocess.DEVNULL)
        note = note_file(self.folder / "servers", self.number)
        wait_until(lambda: note.exists() and json.loads(note.read_text())["pid"] == self.process.pid)
        self.address = read_address(note)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_killed_server_resumes_at_its_address_with_saved_state(tmp_path):
    flat = FlatParameters(make_job(tmp_path).task.spec.build_model())
    optimizer = build_optimizer(AdamWConfig(), flat.model)
    processes = [Process(tmp_path, number, 2) for number in range(2)]
    saved = tmp_path / "servers" / "server-0.safetensors"
    try:
        for process in processes:
            process.start("--fresh")
        addresses = [process.address for process in processes]
        with client_of(addresses, patience_s=240, flat=flat) as client:
            client.init("s", flat.weights, {})
            begun = saved.stat().st_mtime_ns
            first, second = gradients(flat, 2)
            flat.grads.copy_(first)
            set_learning_rate(optimizer, 0.1)
            optimizer.step()
            client.push(first, [0, 0], 0.1)
            wait_until(lambda: saved.stat().st_mtime_ns != begun)
            processes[0].kill()
            with ThreadPoolExecutor(1) as pool:
                pushed = pool.submit(client.push, second, [1, 1], 0.1)  # waits for the restarted one
                processes[0].start()
                assert pushed.result(240) == ([2, 2], 0.0)
            assert processes[0].address == addresses[0]
            flat.grads.copy_(second)
            optimizer.step()
            assert torch.equal(client.pull()[0], flat.weights)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "more", "message"),
    [(2, [], "--number is 2 of 2"), (0, ["--listen", "0.0.0.0:0"], "key"), (0, ["--listen", "x"], "HOST:PORT")],
)
def test_server_that_cannot_start_reports_the_reason(tmp_path, number, more, message):
    words = Process(tmp_path, number, 2).words(*more)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_supervisor_starts_publishes_and_restarts_parameter_servers(corpus, tmp_path):
    launch = {"kind": "external"}
    job = corpus.job(tmp_path, strategy={"kind": "easgd", "servers": 2}, nodes=2, launch=launch)
    flat = FlatParameters(job.task.spec.build_model())
    (tmp_path / "job.json").write_text(job.model_dump_json())
    words = [
        sys.executable,
        "-m",
        "tasks.engine",
        "training.launch.supervisor",
        str(tmp_path / "job.json"),
        str(os.getpid()),
    ]
    supervisor = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    note = tmp_path / "servers" / "server-1.json"
    try:
        coordinator = wait_until(lambda: read_address(tmp_path / "coordinator.json"))
        key = RingKey.load(tmp_path / "ring.key")
        with CoordinatorClient(coordinator, key) as client:
            addresses = client.request(JobRequest()).job["servers"]
        assert addresses == [read_address(note_file(tmp_path / "servers", number)) for number in range(2)]
        with client_of(addresses, key=key, patience_s=240, flat=flat) as client:
            assert client.init("s", flat.weights, {})
            before = json.loads(note.read_text())
            os.kill(before["pid"], signal.SIGKILL)
            after = wait_until(lambda: (document := json.loads(note.read_text()))["pid"] != before["pid"] and document)
            assert after["address"] == before["address"]
            assert torch.equal(client.pull()[0], flat.weights)
        supervisor.terminate()
        assert supervisor.wait(240) == STOPPED
        assert not Path(f"/proc/{after['pid']}").exists()
    finally:
        supervisor.kill()
        supervisor.wait()
