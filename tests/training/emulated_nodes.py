"""A coordinator process over an index without shards; threads and child processes that emulate training nodes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from forks import Forkable
from support import wait_until

from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectStore
from training.coordinator.client import CoordinatorClient
from training.coordinator.journal import read_journal
from training.coordinator.messages import StatusRequest, read_reply, read_request
from training.coordinator.node_client import NodeClient
from training.processes.keys import RingKey

ROOT = Path(__file__).resolve().parents[2]
PER_SHARD = 8


def write_index(url, shards):
    """An index without its shards: the coordinator reads nothing else. Returns shard_of_row."""
    count = shards * PER_SHARD
    values = {name: [0] * count for name in SCHEMA.names}
    values |= {name: [""] * count for name in ("text", "speaker", "corpus", "domain", "language")}
    values |= {"id": [f"u{row:04d}" for row in range(count)], "duration": [1.0] * count}
    values["shard"] = [row // PER_SHARD for row in range(count)]
    records = tuple(ShardRecord(f"{n:06d}.tar", PER_SHARD, float(PER_SHARD), 1000, "0" * 64) for n in range(shards))
    ShardIndex(pa.table(values, schema=SCHEMA), records, {"payload": "flac"}).write(ObjectStore(url))
    return np.asarray(values["shard"])


class CoordinatorProcess:
    """A coordinator process over an index without shards."""

    def __init__(self, folder, *, shards=12, nodes=1, epochs=1, key=False, **train):
        self.folder = folder
        self.shard_of_row = write_index(str(folder / "train"), shards)
        self.size = len(self.shard_of_row)
        member = {
            "beat_s": 0.05,
            "dead_after_s": 60.0,  # a busy machine may stop a process for seconds: only tests of lost nodes are quick
            "start_patience_s": 240.0,
            "coordinator_grace_s": 60.0,
            "coordinator_patience_s": 240.0,
        }
        member |= {name: train.pop(name) for name in list(train) if name in member}
        self.job = {
            "run": "run-1",
            "seed": 3,
            "task": {"train_url": str(folder / "train")},
            "output_url": str(folder / "output"),
            "journal": str(folder / "job.journal"),
            "train": {
                "nodes": nodes,
                "learners_per_node": 1,
                "epochs": epochs,
                "max_minutes": 0.0,
                "checkpoint_steps": 100000,
                "checkpoint_keep": 2,
                "membership": member,
            }
            | train,
        }
        self.key_file = folder / "ring.key" if key else None
        if self.key_file:
            RingKey.generate().save(self.key_file)
        (folder / "job.json").write_text(json.dumps(self.job))
        self.process = None

    @property
    def key(self):
        return RingKey.load(self.key_file) if self.key_file else None

    def command(self, *more, listen="127.0.0.1:0"):
        words = ["--folder", self.folder / "coordinator", "--job", self.folder / "job.json", "--listen", listen, *more]
        words += ["--key-file", self.key_file] if self.key_file else []
        return [sys.executable, "-m", "training.coordinator.server", *map(str, words), "--parent", str(os.getpid())]

    def start(self, *more):
        (self.folder / "coordinator" / "coordinator.json").unlink(missing_ok=True) if "--fresh" in more else None
        self.process = subprocess.Popen(self.command(*more), cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_until(lambda: self.note().get("pid") == self.process.pid)
        return self

    def note(self):
        path = self.folder / "coordinator" / "coordinator.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def address(self):
        return self.note()["address"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ask(self, **message):
        with CoordinatorClient(self.address, self.key) as client:
            return client.request(read_request(json.dumps(message).encode())).model_dump(mode="json")

    def send(self, **message):
        """Send a request, valid or not."""
        with CoordinatorClient(self.address, self.key) as client:
            return read_reply(StatusRequest(), client._exchange(json.dumps(message).encode(), 240.0))

    def journal(self, kind=None):
        entries = read_journal(self.folder / "job.journal")
        return [entry for entry in entries if kind in (None, entry["kind"])]

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(240)


@pytest.fixture
def make_coordinator_process(tmp_path):
    processes = []

    def make(**options):
        processes.append(CoordinatorProcess(tmp_path, **options))
        return processes[-1]

    yield make
    for coordinator in processes:
        coordinator.close()


def planner(epoch, rows, plan):
    """Batches of four."""
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


class Node(threading.Thread):
    """An emulated training in a thread of the test's process.

    Attributes:
        hold: Called before each step; a test may replace it to hold the node up until something has happened.
    """

    def __init__(self, coordinator, number, folder, step_s=0.005):
        super().__init__(daemon=True)
        self.coordinator, self.step_s, self.number = coordinator, step_s, number
        self.client = NodeClient(coordinator.address, coordinator.key, number, folder=folder / f"node-{number}")
        self.trained, self.halt, self.hold = [], threading.Event(), lambda: None
        self.output = ObjectStore(coordinator.job["output_url"])
        self.replies, self.written = [], set()
        self.reply = self.client.join(("tcp://127.0.0.1:1",))
        self.why = None

    def run(self):
        client = self.client
        client.begin(planner, self.coordinator.shard_of_row)
        while not self.halt.is_set() and not (why := client.finish()):
            if client.dropped():
                self.reply = client.rejoin(("tcp://127.0.0.1:1",))
                client.begin(planner, self.coordinator.shard_of_row)
            self.write_requested_files()
            work = client.next()
            if work is None:
                time.sleep(0.005)
                continue
            time.sleep(self.step_s)
            self.hold()
            self.trained += [(work.epoch, int(row)) for row in work.rows]
            count = len(work.rows)
            client.trained(work, loss_sum=2.0 * count, tokens=count, seconds=1.0 * count, utterances=count)
            client.journal({"kind": "step", "learner": f"{self.number}.0", "step": client.step})
        if not self.halt.is_set():
            self.why = why
            client.leave()
        client.close()

    def write_requested_files(self):
        if (epoch := self.client.snapshot_wanted()) is not None:
            self.client.snapshot_written(epoch)
        if (number := self.client.checkpoint_wanted()) is not None and number not in self.written:
            self.written.add(number)
            record = {"node": self.number, "step": self.client.step, "seq": self.client.seq}
            self.client.checkpoint_done(number, {**record, "trained": sorted(self.trained)})

    def kill(self):
        """End without notice, as a killed process does."""
        self.halt.set()
        self.client._thread.stop()
        self.join(240)


@pytest.fixture
def make_node(tmp_path):
    nodes = []

    def make(coordinator, number=0, **options):
        nodes.append(Node(coordinator, number, tmp_path, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def finish(*nodes, patience_s=240.0):
    for node in nodes:
        node.join(patience_s)
        assert not node.is_alive()
    return {node.why for node in nodes}


def check_epochs(coordinator, trained, epochs):
    """The journal agrees with the nodes: every row was trained once, or is counted as repeated."""
    counts = Counter(trained)
    entries = {entry["epoch"]: entry for entry in coordinator.journal("epoch")}
    assert sorted(entries) == list(range(1, epochs + 1))
    for epoch in range(epochs):
        entry = entries[epoch + 1]
        assert entry["utterances"] == entry["index"] == coordinator.size
        times = {row: count for (number, row), count in counts.items() if number == epoch}
        assert sorted(times) == list(range(coordinator.size))
        again = {f"u{row:04d}" for row, count in times.items() if count > 1}
        assert again <= set(entry["repeated_ids"])
        assert sum(times.values()) - coordinator.size <= entry["repeated"]


CHILD = """
import sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from training.coordinator.node_client import NodeClient
client = NodeClient(sys.argv[2], None, int(sys.argv[3]), folder=Path(sys.argv[4]))
plan = lambda epoch, rows, plan: [rows[k:k + 4] for k in range(0, len(rows), 4)]
shards = np.repeat(np.arange(int(sys.argv[5])), 8)
def join(call):
    print(call(("tcp://127.0.0.1:2",)).source, flush=True)
    client.begin(plan, shards)
join(client.join)
while not client.finish():
    if client.dropped():
        join(client.rejoin)
    if (epoch := client.snapshot_wanted()) is not None:
        client.snapshot_written(epoch)
    if (number := client.checkpoint_wanted()) is not None:
        client.checkpoint_done(number, {"node": int(sys.argv[3]), "step": client.step, "seq": client.seq})
    work = client.next()
    if work is None:
        time.sleep(0.01)
        continue
    time.sleep(0.02)
    for row in work.rows:
        print(work.epoch, row, flush=True)
    client.trained(work, loss_sum=1.0, tokens=1, seconds=1.0, utterances=len(work.rows))
print(client.finish(), flush=True)
client.leave()
client.close()
"""


def start_child(coordinator, number):
    words = [
        str(ROOT),
        coordinator.address,
        str(number),
        str(coordinator.folder / f"child-{number}"),
        str(coordinator.size // PER_SHARD),
    ]
    out = (coordinator.folder / f"child-{number}.txt").open("wb")
    return subprocess.Popen([sys.executable, "-c", Forkable(CHILD), *words], stdout=out)


def child_lines(coordinator, number):
    return (coordinator.folder / f"child-{number}.txt").read_text().splitlines()
