"""Ctrl-C and SIGTERM reach a whole process group: the run's Prefect server died first, and the run waited for it.

It took four minutes, or hung in an exit handler of Prefect's. Each phase had its own cause; all are tested.
"""

import io
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from support import ROOT, end_processes, processes_naming, starling, tiny_document, wait_until, write_config

from flows.cli import common
from storage.locks import file_lock
from tasks.locking.slots import lock_name
from training.coordinator.journal import read_journal

pytestmark = pytest.mark.real_interpreter

ENDED_S = 60
"""A fault's bound, on a busy machine; the promise is ten seconds."""
ENDLESS = 100_000
RING = {"strategy": "adpsgd", "nodes": 2}
PROGRESS = ("Prefect at", "starting the Prefect", "waiting for ", "prepare: ", "shard: ", "features: ", "train: ")
LINE = "stopping within ten seconds; run the same command again to continue"

PARENT = """
import sys
from flows.servers.services import spawn
service = spawn("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], "", "")
print(service.process.pid, flush=True)
service.process.wait()
"""


def test_server_survives_signals_to_its_group_but_not_its_parents_death(tmp_path):
    environment = {**os.environ, "STARLING_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            server = int(parent.stdout.readline())
            assert os.getpgid(server) not in (os.getpgid(parent.pid), os.getpgid(0))
        finally:
            parent.kill()
    wait_until(lambda: server not in processes_naming(str(tmp_path)))


def test_line_that_was_being_printed_does_not_follow_the_last_one(monkeypatch):
    err = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(common, "err", err)
    with err:
        err.print("starting the Prefect server")  # it is written when the block ends, by an exception, too
        announcing = threading.Thread(target=common._say_interrupted, args=(signal.SIGINT,))
        announcing.start()
        announcing.join()
    assert [line for line in err.file.getvalue().splitlines() if line] == [f"interrupted (Ctrl-C): {LINE}"]


class Command:
    """A command in a separate process group, as a terminal starts it.

    Args:
        home: The data folder.
        document: The configuration.
        words: Of the command, without the configuration.
    """

    def __init__(self, home, document, *words):
        self.home, self.words = home, words
        home.mkdir(exist_ok=True)
        self.config = write_config(home / "config.json", document)
        self.output = home / "output.txt"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        clean |= {"STARLING_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "flows.cli.app", words[0], str(self.config), *words[1:]]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=clean, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def until(self, ready):
        """Wait for a phase."""

        def there():
            assert self.process.poll() is None, self.output.read_text()
            return ready(self.home)

        wait_until(there, 500)

    def interrupt(self, number, times):
        """Signal the group, and check that only one line is printed and no process is left."""
        for _ in range(times):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            time.sleep(0.5)
        self.process.wait(ENDED_S)
        assert self.process.returncode == 128 + number
        assert not processes_naming(str(self.home))
        said = [line for line in self.output.read_text().splitlines() if line.strip()]
        assert [line for line in said if LINE in line] == said[-1:]
        assert not [line for line in said[:-1] if not line.startswith(PROGRESS)]

    def states(self):
        """How the flow runs have ended, by Prefect's own database."""
        database = self.home / "prefect" / "prefect.db"
        with sqlite3.connect(database) as connection:
            return {state for (state,) in connection.execute("select state_type from flow_run")}


@pytest.fixture
def command(tmp_path):
    """Starts commands; ends what a failed test leaves."""
    home = (tmp_path / "home").resolve()
    yield lambda document, *words: Command(home, document, *words)
    end_processes(processes_naming(str(home)))


def synthesizing(home):
    return len(list(home.glob("corpora/**/*.wav")) + list(home.glob("corpora/**/*.flac"))) > 20


def starting_the_server(home):
    return (home / "logs" / "prefect.log").exists()


def starting_the_training(home):
    return next(home.glob("work/train-*/coordinator"), None)


def training(home):
    journal = next(home.glob("work/train-*/journal.jsonl"), None)
    return journal and sum(entry["kind"] == "step" for entry in read_journal(journal)) > 5


def long_document(**more):
    """Neither synthesis nor training ends by itself."""
    document = tiny_document(**more)
    document["train"] |= {"epochs": ENDLESS}
    return document


def many_words():
    document = long_document()
    document["data"]["sources"][0]["synthesis"] |= {"train": 20_000}
    return document


def ring():
    document = long_document()
    document["storage"] |= {"shard_seconds": 8}
    document["train"] |= RING
    return document


def processes():
    document = long_document()
    document["runner"] = {"kind": "processes", "workers": 2}
    return document


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("words", "document", "phase", "number", "times"),
    [
        (["run"], many_words, synthesizing, INT, 1),
        (["run"], many_words, synthesizing, INT, 2),
        (["run"], many_words, synthesizing, TERM, 1),
        (["run", "--no-prefect"], many_words, synthesizing, INT, 2),
        (["run"], long_document, starting_the_server, INT, 1),
        (["run"], long_document, starting_the_server, TERM, 2),
        (["run"], long_document, starting_the_training, INT, 1),
        (["run"], long_document, training, INT, 2),
        (["run"], ring, training, TERM, 1),
        (["run", "--until", "train", "--no-prefect"], ring, training, INT, 1),
        (["run", "--folds", "2"], ring, training, INT, 2),
        (["run"], processes, training, TERM, 2),
    ],
)
def test_interrupted_command_ends_with_one_line(command, words, document, phase, number, times):
    started = command(document(), *words)
    started.until(phase)
    started.interrupt(number, times)
    if phase in (synthesizing, training) and "--no-prefect" not in words:
        assert started.states() <= {"CANCELLED", "COMPLETED"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_command_waiting_for_a_slot_ends(command, times):
    document = tiny_document(slots={"pool": "gpus"})
    started = command(document, "run")
    lock = started.home / "locks" / f"{lock_name('training', 'gpus', '1')}.lock"
    with file_lock(lock, 0.0, holder="another run"):
        started.until(lambda home: "another run" in read_log(home))
        started.interrupt(INT, times)
    # the same command finishes the work
    assert "models:/tiny/1" in starling("run", started.config, "--json", home=started.home, timeout=600).stdout


def read_log(home):
    """What the run reports to the Prefect server."""
    database = home / "prefect" / "prefect.db"
    if not database.exists():
        return ""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return " ".join(text for (text,) in connection.execute("select message from log"))
    except sqlite3.OperationalError:  # its tables are being made
        return ""
