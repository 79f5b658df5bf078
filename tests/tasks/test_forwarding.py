"""The forwarder against a real MLflow: SQLite for the rules, and a server that is killed, stopped and restarted."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import mlflow
import pytest
from support import environment, give_mlflow, processes_naming, wait_until

from flows.servers.services import start_mlflow
from tasks.tracking import forwarding
from tasks.tracking.forwarding import Acknowledged, Forwarder, Sender, send_rest
from tasks.tracking.metrics import Translator
from tasks.tracking.runs import TRAINING_TAG, TrainingRun, client
from training.coordinator.journal import parse_lines


def about(training="t-1", **params):
    return TrainingRun(training, "forwarded", "run", {"who": "test"}, {"lr": "0.1", **params})


class Writer:
    """Writes a journal as the coordinator does."""

    def __init__(self, path):
        self.path, self.steps = path, Counter()
        self.write(kind="start", step=0, run="t-1")

    def write(self, **entry):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def step(self, learner="0.0", **more):
        self.steps[learner] += 1
        n = self.steps[learner]
        entry = {"learner": learner, "step": n, "epoch": n / 10, "epochs": 9, "loss": 5.0 / n, "lr": 0.1}
        self.write(kind="step", elapsed=n / 2, audio_seconds=3.0 * n, nodes=2, **(entry | more))

    def expected(self):
        """Every point that the journal means, by name: sorted (step, value)."""
        translator, points = Translator(), {}
        for entry in parse_lines(self.path.read_text().splitlines()):
            for point in translator.feed(entry):
                points.setdefault(point.name, []).append((point.step, point.value))
        return {name: sorted(values) for name, values in points.items()}


def sent(api, run_id):
    """Every point that MLflow has."""
    names = api.get_run(run_id).data.metrics
    return {name: sorted((m.step, m.value) for m in api.get_metric_history(run_id, name)) for name in names}


@pytest.fixture
def writer(home, tmp_path):
    give_mlflow(home)
    return Writer(tmp_path / "journal.jsonl")


def sender(writer, **more):
    return Sender(writer.path, writer.path.with_name("note.json"), about(), **more)


def test_every_point_is_sent_once_in_bounded_calls(writer, monkeypatch):
    for n in range(300):
        writer.step(f"{n % 2}.0")
    sending = sender(writer)
    api = sending.open()
    sizes = []
    log_batch = api.log_batch
    monkeypatch.setattr(
        api,
        "log_batch",
        lambda run, metrics=(), **more: (sizes.append(len(metrics)), log_batch(run, metrics=metrics, **more)),
    )
    sending.drain()
    assert max(sizes) <= 1000
    assert sum(sizes) > 1000
    assert sent(api, sending.run_id) == writer.expected()
    assert sending.known.bytes == writer.path.stat().st_size
    run = api.get_run(sending.run_id)
    assert run.data.tags[TRAINING_TAG] == "t-1"
    assert run.data.params == {"lr": "0.1"}


def test_new_process_continues_after_the_last_acknowledged_point(writer, monkeypatch):
    for _ in range(5):
        writer.step()
    first = sender(writer)
    first.drain()
    writer.step()
    second = sender(writer)
    calls = []
    monkeypatch.setattr(second, "_log", lambda api, points: calls.append(points))
    second.drain()
    assert {point.step for point in calls[0]} == {6}
    assert second.run_id == first.run_id


def test_points_sent_without_acknowledgement_are_not_duplicated(writer):
    for n in range(60):
        writer.step(f"{n % 3}.0")
    first = sender(writer)
    while first.send():
        pass
    for remembered in (0, first.known.bytes // 2):
        Acknowledged("t-1", first.run_id, remembered).save(first.note)
        sender(writer).drain()
    first.note.unlink()  # as on another machine: the run is found by the training's identity
    assert send_rest(writer.path, first.note, about()) == first.run_id
    assert sent(client(), first.run_id) == writer.expected()


def test_resume_continues_the_run_with_a_correct_last_value(writer):
    for _ in range(8):
        writer.step()
    first = sender(writer)
    first.drain()
    first.end("KILLED")
    writer.write(kind="resume", step=4, epoch=0, steps={"0.0": 4})
    writer.steps["0.0"] = 4
    writer.step(loss=0.25)
    writer.write(kind="end", step=5)
    second = sender(writer)
    second.drain()
    second.end("FINISHED")
    api = client()
    run = api.get_run(first.run_id)
    assert second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert run.data.metrics["training-single-learners/loss.0.0"] == run.data.metrics["training/loss"] == 0.25
    at_five = [
        m.value for m in api.get_metric_history(first.run_id, "training-single-learners/loss.0.0") if m.step == 5
    ]
    assert at_five == [1.0, 0.25]


def test_new_journal_of_another_training_has_another_run(writer):
    writer.step()
    first = sender(writer)
    first.drain()
    writer.path.unlink()
    again = Writer(writer.path)
    again.step()
    second = Sender(writer.path, first.note, about("t-2"))
    second.drain()
    assert second.run_id != first.run_id
    assert sent(client(), second.run_id) == again.expected()


def test_deleted_run_is_created_again_with_all_points(writer):
    writer.step()
    first = sender(writer)
    first.drain()
    client().delete_run(first.run_id)
    second = sender(writer)
    second.drain()
    assert second.run_id != first.run_id
    assert sent(client(), second.run_id) == writer.expected()


def test_nothing_is_sent_to_the_run_of_another_training(writer):
    """As after MLflow's database was created again, or copied: the number may be another run's."""
    writer.step()
    theirs = sender(writer)
    theirs.drain()
    before = sent(client(), theirs.run_id)
    note = theirs.note.with_name("other.json")
    Acknowledged("t-2", theirs.run_id, 10**6).save(note)
    mine = Sender(writer.path, note, about("t-2"))
    writer.step()
    mine.drain()
    assert mine.run_id != theirs.run_id
    assert sent(client(), theirs.run_id) == before
    assert sent(client(), mine.run_id) == writer.expected()


def test_parameters_changed_by_a_resume_keep_their_first_values(writer):
    writer.step()
    sender(writer).drain()
    again = Sender(writer.path, writer.path.with_name("note.json"), about(lr="0.2", extra="1"))
    again.drain()
    assert client().get_run(again.run_id).data.params == {"lr": "0.1", "extra": "1"}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"training": "t-1", "bytes": "x", "more": 1}', '{"training": "other"}']
)
def test_damaged_note_means_nothing_is_acknowledged(tmp_path, text):
    path = tmp_path / "note.json"
    path.write_text(text)
    assert Acknowledged.load(path, "t-1") == Acknowledged("t-1")


def test_incomplete_line_waits_for_its_rest(writer):
    entry = {"kind": "step", "learner": "0.0", "step": 1, "epoch": 0.1, "epochs": 1, "loss": 2.0, "lr": 0.1}
    line = json.dumps(entry | {"elapsed": 1.0})
    with writer.path.open("a") as file:
        file.write(line[:20])
    sending = sender(writer)
    sending.drain()
    assert sent(client(), sending.run_id) == {}
    with writer.path.open("a") as file:
        file.write(line[20:] + "\n")
    sending.drain()
    assert sent(client(), sending.run_id)["training-single-learners/loss.0.0"] == [(1, 2.0)]


def test_random_failures_lose_and_duplicate_no_point(writer):
    draw = random.Random(7)

    class Flaky:
        """Fails before or after the call reached MLflow."""

        def __init__(self):
            self.api = client()

        def __getattr__(self, name):
            def call(*args, **more):
                if name == "log_batch" and draw.random() < 0.3:
                    raise OSError("not sent")
                reply = getattr(self.api, name)(*args, **more)
                if name == "log_batch" and draw.random() < 0.3:
                    raise OSError("the answer was lost")
                return reply

            return call

    sending = sender(writer, connect=Flaky)
    for n in range(40):
        for _ in range(draw.randrange(4)):
            writer.step(f"{n % 2}.0")
        try:
            sending.send()
        except OSError:
            sending.forget_connection()
        if draw.random() < 0.1:
            sending = sender(writer, connect=Flaky)
    sender(writer).drain()
    assert sent(client(), sending.known.run_id) == writer.expected()


def test_missing_mlflow_is_recorded_without_delay(writer, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    writer.step()
    before = threading.active_count()  # those of other tests may live on
    with Forwarder(sender(writer), every_s=0.1) as forwarder:
        wait_until(lambda: forwarder.trouble)
        assert threading.active_count() < before + 10
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_id = send_rest(writer.path, writer.path.with_name("note.json"), about())
    assert sent(client(), run_id) == writer.expected()


def test_hanging_call_is_abandoned_after_a_timeout(writer, monkeypatch):
    monkeypatch.setattr("tasks.tracking.forwarding._ABANDON_S", 0.1)
    hang = threading.Event()

    class Hanging(Sender):
        def send(self):
            hang.wait(240)
            return False

    forwarder = Forwarder(Hanging(writer.path, writer.path.with_name("n.json"), about()), every_s=0.01)
    with pytest.raises(KeyboardInterrupt), forwarder:
        raise KeyboardInterrupt
    assert not hang.is_set()
    hang.set()


class Server:
    """A real MLflow server on a fixed port."""

    def __init__(self, home):
        self.home = home
        give_mlflow(home)
        self.service = start_mlflow().wait()
        self.url, self.port = self.service.url, int(self.service.url.rpartition(":")[2])

    def pids(self):
        return [
            p
            for p in processes_naming(str(self.home))
            if b"mlflow" in Path(f"/proc/{p}/cmdline").read_bytes()
            or b"multiprocessing" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]

    def signal(self, number):
        for pid in self.pids():
            os.kill(pid, number)
        if number == signal.SIGKILL:
            self.service.process.wait()
            wait_until(lambda: not self.pids())

    def restart(self):
        self.service = start_mlflow(self.port).wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("mlflow").resolve()
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        started = Server(home)
        try:
            yield started
        finally:
            started.signal(signal.SIGCONT)
            started.signal(signal.SIGKILL)


@pytest.mark.slow
def test_killed_and_hanging_servers_cost_no_step_and_no_point(server, tmp_path, monkeypatch):
    monkeypatch.setattr(forwarding, "_REQUEST_S", 5)
    with environment(STARLING_HOME=server.home, MLFLOW_TRACKING_URI=server.url):
        writer = Writer(tmp_path / "journal.jsonl")
        sending = sender(writer)
        done = threading.Event()

        def train():
            """Steps on, whatever MLflow does."""
            n = 0
            while not done.is_set():
                writer.step(f"{n % 2}.0")
                n += 1
                time.sleep(0.1)  # a server on a busy machine must be able to catch up

        training = threading.Thread(target=train)
        try:
            with Forwarder(sending, every_s=0.2) as forwarder:
                training.start()
                wait_until(lambda: sending.known.bytes > 1000)
                server.signal(signal.SIGKILL)
                wait_until(lambda: forwarder.trouble)
                before = sum(writer.steps.values())
                wait_until(lambda: sum(writer.steps.values()) > before + 50)
                server.restart()
                reached = writer.path.stat().st_size
                wait_until(lambda: sending.known.bytes > reached and not forwarder.trouble)
                server.signal(signal.SIGSTOP)
                wait_until(lambda: forwarder.trouble)
                server.signal(signal.SIGCONT)
                wait_until(lambda: not forwarder.trouble)
                done.set()
                training.join(240)
        finally:
            done.set()
        api = mlflow.MlflowClient(tracking_uri=server.url)
        assert api.get_run(sending.known.run_id).info.status == "FINISHED"
        assert sent(api, sending.known.run_id) == writer.expected()
        runs = api.search_runs([api.get_experiment_by_name("forwarded").experiment_id])
        assert [run.info.run_id for run in runs] == [sending.known.run_id]
        assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


@pytest.mark.slow
def test_register_stage_sends_what_a_dead_server_missed(server, tmp_path):
    with environment(STARLING_HOME=server.home, MLFLOW_TRACKING_URI=server.url):
        writer = Writer(tmp_path / "journal.jsonl")
        note = tmp_path / "note.json"
        late = Sender(writer.path, note, about("t-late"))
        server.signal(signal.SIGKILL)
        with Forwarder(late, every_s=0.1) as forwarder:
            for _ in range(20):
                writer.step()
            wait_until(lambda: forwarder.trouble)
        server.restart()
        run_id = send_rest(writer.path, note, about("t-late"))
        api = mlflow.MlflowClient(tracking_uri=server.url)
        assert sent(api, run_id) == writer.expected()
