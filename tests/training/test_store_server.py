"""The store as a process, with nodes as threads and processes; killed, stopped and started again."""

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

from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectStore
from training.exchange.keys import RingKey
from training.journal import read_journal
from training.store.client import StoreClient
from training.store.messages import StoreError, StoreUnreachableError
from training.store.node_client import STORE_LOST, NodeClient

ROOT = Path(__file__).resolve().parents[2]
PER_SHARD = 8


def write_index(url, shards):
    """An index without its shards: the store reads nothing else. Returns shard_of_row."""
    count = shards * PER_SHARD
    values = {name: [0] * count for name in SCHEMA.names}
    values |= {name: [""] * count for name in ("text", "speaker", "corpus", "domain", "language")}
    values |= {"id": [f"u{row:04d}" for row in range(count)], "duration": [1.0] * count}
    values["shard"] = [row // PER_SHARD for row in range(count)]
    records = tuple(ShardRecord(f"{n:06d}.tar", PER_SHARD, float(PER_SHARD), 1000, "0" * 64) for n in range(shards))
    ShardIndex(pa.table(values, schema=SCHEMA), records, {"payload": "flac"}).write(ObjectStore(url))
    return np.asarray(values["shard"])


def wait_for(condition, patience_s=20.0):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise TimeoutError(condition)


class Store:
    """A store process over a made-up index."""

    def __init__(self, folder, *, shards=12, nodes=1, epochs=1, key=False, **train):
        self.folder = folder
        self.shard_of_row = write_index(str(folder / "train"), shards)
        self.size = len(self.shard_of_row)
        member = {
            "beat_s": 0.05,
            "dead_after_s": 1.0,
            "start_patience_s": 30.0,
            "store_grace_s": 0.3,
            "store_patience_s": 30.0,
        }
        member |= {name: train.pop(name) for name in list(train) if name in member}
        self.job = {
            "run": "run-1",
            "seed": 3,
            "train_url": str(folder / "train"),
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
        words = ["--folder", self.folder / "store", "--job", self.folder / "job.json", "--listen", listen, *more]
        words += ["--key-file", self.key_file] if self.key_file else []
        return [sys.executable, "-m", "training.store.server", *map(str, words), "--parent", str(os.getpid())]

    def start(self, *more):
        (self.folder / "store" / "store.json").unlink(missing_ok=True) if "--fresh" in more else None
        self.process = subprocess.Popen(self.command(*more), cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_for(lambda: self.note().get("pid") == self.process.pid)
        return self

    def note(self):
        path = self.folder / "store" / "store.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def address(self):
        return self.note()["address"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ask(self, **message):
        with StoreClient(self.address, self.key) as client:
            return client.request(message)

    def journal(self, kind=None):
        entries = read_journal(self.folder / "job.journal")
        return [entry for entry in entries if kind in (None, entry["kind"])]

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def make_store(tmp_path):
    stores = []

    def make(**options):
        stores.append(Store(tmp_path, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def planner(epoch, rows, plan):
    """Batches of four."""
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


class Node(threading.Thread):
    """Trains by waiting; a thread of the test's process."""

    def __init__(self, store, number, folder, step_s=0.005):
        super().__init__(daemon=True)
        self.store, self.step_s, self.number = store, step_s, number
        self.client = NodeClient(store.address, store.key, number, folder=folder / f"node-{number}")
        self.trained, self.halt, self.frozen = [], threading.Event(), threading.Event()
        self.output = ObjectStore(store.job["output_url"])
        self.replies, self.written = [], set()
        self.reply = self.client.join(("tcp://127.0.0.1:1",))
        self.why = None

    def run(self):
        client = self.client
        client.begin(planner, self.store.shard_of_row)
        while not self.halt.is_set() and not (why := client.finish()):
            if client.dropped():
                self.reply = client.rejoin(("tcp://127.0.0.1:1",))
                client.begin(planner, self.store.shard_of_row)
            self.leave_traces()
            work = client.next()
            if work is None:
                time.sleep(0.005)
                continue
            time.sleep(self.step_s)
            self.trained += [(work.epoch, int(row)) for row in work.rows]
            count = len(work.rows)
            client.trained(work, loss_sum=2.0 * count, tokens=count, seconds=1.0 * count, utterances=count)
            client.journal({"kind": "step", "learner": f"{self.number}.0", "step": client.step})
        if not self.halt.is_set():
            self.why = why
            client.leave()
        client.close()

    def leave_traces(self):
        if (epoch := self.client.snapshot_wanted()) is not None:
            self.client.snapshot_written(epoch)
        if (number := self.client.checkpoint_wanted()) is not None and number not in self.written:
            self.written.add(number)
            record = {"node": self.number, "step": self.client.step, "seq": self.client.seq}
            self.client.checkpoint_done(number, {**record, "trained": sorted(self.trained)})

    def kill(self):
        """End without a word, as a killed process does."""
        self.halt.set()
        self.client._stopping.set()
        self.join(10)


@pytest.fixture
def make_node(tmp_path):
    nodes = []

    def make(store, number=0, **options):
        nodes.append(Node(store, number, tmp_path, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def finish(*nodes, patience_s=30.0):
    for node in nodes:
        node.join(patience_s)
        assert not node.is_alive()
    return {node.why for node in nodes}


def check_epochs(store, trained, epochs):
    """The journal's accounts are those of the nodes: every row once, or counted as repeated."""
    counts = Counter(trained)
    entries = {entry["epoch"]: entry for entry in store.journal("epoch")}
    assert sorted(entries) == list(range(1, epochs + 1))
    for epoch in range(epochs):
        entry = entries[epoch + 1]
        assert entry["utterances"] == entry["index"] == store.size
        times = {row: count for (number, row), count in counts.items() if number == epoch}
        assert sorted(times) == list(range(store.size))
        again = {f"u{row:04d}" for row, count in times.items() if count > 1}
        assert again <= set(entry["repeated_ids"])
        assert sum(times.values()) - store.size <= entry["repeated"]


def test_one_node_gets_each_epoch_whole_and_in_one_order(make_store, make_node):
    store = make_store(epochs=3).start("--fresh")
    node = make_node(store)
    assert (node.reply.source, node.reply.fresh, node.reply.epoch) == ("initial", True, 0)
    node.start()
    assert finish(node) == {"done"}
    assert node.trained == [(epoch, row) for epoch in range(3) for row in range(store.size)]
    check_epochs(store, node.trained, 3)
    assert all(entry["repeated"] == 0 for entry in store.journal("epoch"))
    kinds = [entry["kind"] for entry in store.journal()]
    assert kinds[0] == "start"
    assert kinds.count("step") == len(node.trained) // 4
    status = store.ask(op="status")
    assert (status["finish"], status["totals"]["utterances"]) == ("done", 3 * store.size)
    assert [item["epoch"] for item in store.ask(op="evaluations")["ready"]] == [1, 2, 3]


def test_nodes_share_an_epoch_and_the_fast_one_takes_more(make_store, make_node):
    store = make_store(nodes=2, epochs=2, shards=20).start("--fresh")
    fast, slow = make_node(store, 0, step_s=0.01), make_node(store, 1, step_s=0.1)
    for node in (fast, slow):
        node.start()
    assert finish(fast, slow) == {"done"}
    check_epochs(store, fast.trained + slow.trained, 2)
    assert all(entry["repeated"] == 0 for entry in store.journal("epoch"))
    assert len(fast.trained) > 2 * len(slow.trained)


def test_a_killed_store_goes_on_where_it_was(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=16).start("--fresh")
    nodes = [make_node(store, number, step_s=0.01) for number in range(2)]
    for node in nodes:
        node.start()
    address = store.address
    for _ in range(3):
        time.sleep(0.3)
        store.kill()
        store.start()
        assert store.address == address
    assert finish(*nodes) == {"done"}
    check_epochs(store, nodes[0].trained + nodes[1].trained, 3)
    steps = Counter((entry["learner"], entry["step"]) for entry in store.journal("step"))
    assert set(steps.values()) == {1}
    assert len(steps) == sum(node.client.step for node in nodes)


@pytest.mark.slow
def test_without_a_store_a_node_takes_its_own_share(make_store, make_node):
    store = make_store(nodes=2, epochs=2, shards=40).start("--fresh")
    nodes = [make_node(store, number, step_s=0.005) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: all(node.trained for node in nodes))
    store.kill()
    wait_for(lambda: sum(len(node.trained) for node in nodes) > 0.9 * store.size)
    store.start()
    assert finish(*nodes) == {"done"}
    check_epochs(store, nodes[0].trained + nodes[1].trained, 2)


def test_a_store_that_stays_away_ends_the_node(make_store, make_node):
    store = make_store(epochs=1, store_patience_s=1.0).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    wait_for(lambda: node.trained)
    store.kill()
    assert finish(node) == {STORE_LOST}


def test_a_lost_node_is_dropped_and_its_rows_are_trained_by_others(make_store, make_node):
    store = make_store(nodes=3, epochs=2, shards=18).start("--fresh")
    nodes = [make_node(store, number, step_s=0.02) for number in range(3)]
    for node in nodes:
        node.start()
    wait_for(lambda: nodes[0].trained)
    nodes[0].kill()
    assert finish(*nodes[1:]) == {"done"}
    lost = [entry["left"] for entry in store.journal("view") if "0" in entry["left"]]
    assert "not been heard of" in lost[0]["0"]
    check_epochs(store, [row for node in nodes for row in node.trained], 2)


def test_a_late_node_takes_weights_from_a_neighbour_and_helps(make_store, make_node):
    store = make_store(nodes=1, epochs=2, shards=20).start("--fresh")
    first = make_node(store, 0, step_s=0.03)
    first.start()
    wait_for(lambda: first.trained)
    second = make_node(store, 1, step_s=0.03)
    assert (second.reply.source, second.reply.fresh) == ("neighbour", False)
    second.start()
    assert finish(first, second) == {"done"}
    assert second.trained
    check_epochs(store, first.trained + second.trained, 2)


CHILD = """
import sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from training.store.node_client import NodeClient
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


def start_child(store, number):
    words = [str(ROOT), store.address, str(number), str(store.folder / f"child-{number}"), str(store.size // PER_SHARD)]
    out = (store.folder / f"child-{number}.txt").open("wb")
    return subprocess.Popen([sys.executable, "-c", CHILD, *words], stdout=out)


def child_lines(store, number):
    return (store.folder / f"child-{number}.txt").read_text().splitlines()


def test_a_stopped_node_is_dropped_and_rejoins_when_it_wakes(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=24, dead_after_s=0.6).start("--fresh")
    node, child = make_node(store, 0, step_s=0.03), start_child(store, 1)
    try:
        node.start()
        wait_for(lambda: len(child_lines(store, 1)) > 8)
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: store.ask(op="status")["progress"]["live"] == 1)
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: "neighbour" in child_lines(store, 1))
        assert finish(node) == {"done"}
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
    lines = child_lines(store, 1)
    assert lines[-1] == "done"
    rows = [tuple(map(int, line.split())) for line in lines if line[0].isdigit()]
    check_epochs(store, node.trained + rows, 3)


@pytest.mark.slow
def test_a_stopped_store_drops_nobody_when_it_wakes(make_store, make_node):
    store = make_store(nodes=2, epochs=2, dead_after_s=0.8, store_grace_s=30.0).start("--fresh")
    nodes = [make_node(store, number, step_s=0.03) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: all(node.trained for node in nodes))
    store.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    store.process.send_signal(signal.SIGCONT)
    assert finish(*nodes) == {"done"}
    assert not [entry for entry in store.journal("view") if set(entry["left"].values()) - {"left"}]


@pytest.mark.slow
def test_random_kills_of_store_and_nodes_keep_the_accounts(make_store, make_node):
    store = make_store(nodes=3, epochs=3, shards=24, dead_after_s=0.5, checkpoint_steps=15).start("--fresh")
    rng = np.random.default_rng(5)
    nodes = {number: make_node(store, number, step_s=0.02) for number in range(3)}
    rows = []
    for node in nodes.values():
        node.start()
    for _ in range(5):
        time.sleep(float(rng.uniform(0.1, 0.4)))
        victim = int(rng.integers(0, 4))
        if victim == 3:
            store.kill()
            store.start()
            # a node that is killed before it could tell what it did alone takes the knowledge with it
            back = time.monotonic() + 0.2
            wait_for(lambda back=back: all(node.client._heard > back or not node.is_alive() for node in nodes.values()))
            continue
        if store.ask(op="status")["finish"]:
            break
        nodes[victim].kill()
        rows += nodes[victim].trained
        nodes[victim] = make_node(store, victim, step_s=0.02)
        nodes[victim].start()
    assert finish(*nodes.values()) == {"done"}
    check_epochs(store, rows + [row for node in nodes.values() for row in node.trained], 3)


def complete(store):
    names = ObjectStore(store.job["output_url"]).list("checkpoints")
    return [name for name in names if name.endswith("complete.json")]


def test_a_stopped_training_resumes_with_exactly_what_the_checkpoint_holds(make_store, make_node):
    store = make_store(nodes=2, epochs=3, shards=16, checkpoint_steps=8).start("--fresh")
    nodes = [make_node(store, number, step_s=0.01) for number in range(2)]
    for node in nodes:
        node.start()
    wait_for(lambda: sum(len(node.trained) for node in nodes) > store.size)
    store.ask(op="stop")
    assert finish(*nodes) == {"stop"}
    assert 1 <= len(complete(store)) <= 2
    document = ObjectStore(store.job["output_url"]).read_json(complete(store)[-1])
    assert [record["node"] for record in document["records"]] == [0, 1]
    store.close()
    store.start("--fresh")
    again = [make_node(store, number, step_s=0.005) for number in range(2)]
    assert {node.reply.source for node in again} == {"checkpoint"}
    assert [node.reply.record["node"] for node in again] == [0, 1]
    assert [node.reply.step for node in again] == [record["step"] for record in document["records"]]
    for node in again:
        node.start()
    assert finish(*again) == {"done"}
    before = [tuple(pair) for record in document["records"] for pair in record["trained"]]
    resume = store.journal("resume")[0]
    assert resume["steps"] == {f"{n}.0": record["step"] for n, record in enumerate(document["records"])}
    trained = before + [pair for node in again for pair in node.trained]
    assert Counter(trained) == Counter((epoch, row) for epoch in range(3) for row in range(store.size))
    assert len(complete(store)) == 2


def test_a_lone_node_that_was_killed_goes_back_to_the_checkpoint_and_repeats_the_order(make_store, make_node):
    store = make_store(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(store, step_s=0.01)
    node.start()
    wait_for(lambda: complete(store))
    node.kill()
    again = make_node(store, step_s=0.002)
    assert again.reply.source == "checkpoint"
    assert again.reply.session != node.reply.session
    before = [tuple(pair) for pair in again.reply.record["trained"]]
    again.start()
    assert finish(again) == {"done"}
    order = [(epoch, row) for epoch in range(2) for row in range(store.size)]
    assert sorted(before) + again.trained == order
    steps = [entry["step"] for entry in store.journal("step")]
    assert steps == list(range(1, len(order) // 4 + 1))


def test_a_damaged_checkpoint_is_passed_over(make_store, make_node):
    store = make_store(epochs=2, shards=16, checkpoint_steps=6).start("--fresh")
    node = make_node(store, step_s=0.01)
    node.start()
    wait_for(lambda: len(complete(store)) == 2)
    node.kill()
    client = NodeClient(store.address, None, 0, folder=store.folder / "x")
    try:
        first = client.join(("e",))
        second = client.rejoin(("e",), damaged=first.resume)
        third = client.rejoin(("e",), damaged=second.resume)
    finally:
        client.close()
    assert (first.source, second.source, third.source) == ("checkpoint", "checkpoint", "initial")
    assert first.resume > second.resume


def test_a_checkpoint_of_another_run_is_refused(make_store, make_node):
    store = make_store(epochs=1, shards=16).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    finish(node)
    store.close()
    (store.folder / "job.json").write_text(json.dumps(store.job | {"run": "run-2"}))
    done = subprocess.run(store.command("--fresh"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "another configuration" in done.stderr


def test_time_is_up_ends_the_training_and_the_open_epoch_can_be_evaluated(make_store, make_node):
    store = make_store(epochs=1000, shards=16, max_minutes=2.0 / 60).start("--fresh")
    node = make_node(store, step_s=0.01)
    node.start()
    assert finish(node) == {"time"}
    closed = store.ask(op="status")["progress"]["closed"]
    ready = [item["epoch"] for item in store.ask(op="evaluations")["ready"]]
    assert ready[-1] in (closed, closed + 1)
    history = store.ask(op="evaluated", epoch=ready[0], result={"loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}})
    assert history["history"] == [{"epoch": ready[0], "loss": 1.5, "wer": 0.25, "replicas": {"0": 1.5}}]
    store.ask(op="evaluated", epoch=ready[0], result={"loss": 9.0})
    store.ask(op="finished", result={"step": 5, "valid": {"loss": 1.0, "wer": 0.5}})
    valid, end = store.journal("valid"), store.journal("end")
    assert [(entry["epoch"], entry["valid_loss"], entry["train_loss"]) for entry in valid] == [(ready[0], 1.5, 2.0)]
    assert [(entry["step"], entry["valid_wer"]) for entry in end] == [(5, 0.5)]


def test_all_nodes_that_fail_fail_the_training(make_store):
    store = make_store(nodes=1).start("--fresh")
    client = NodeClient(store.address, None, 0, folder=store.folder / "x")
    client.join(("e",))
    client.fail("the loss is no number")
    client.close()
    assert store.ask(op="status")["finish"] == "failed: the loss is no number"


def test_training_begins_without_those_that_never_come(make_store, make_node):
    store = make_store(nodes=3, start_patience_s=0.5).start("--fresh")
    node = make_node(store, step_s=0.001)
    node.start()
    assert finish(node) == {"done"}
    assert [entry["wanted"] for entry in store.journal("view") if "wanted" in entry] == [3]


def test_two_processes_with_one_number_are_told_apart(make_store, make_node):
    store = make_store().start("--fresh")
    clients = [NodeClient(store.address, None, 0, folder=store.folder / name) for name in "ab"]
    try:
        for client in clients:
            client.join(("e",))
        wait_for(clients[0].dropped)
        with pytest.raises(StoreError, match="number of its own"):
            clients[0].rejoin(("e",))
    finally:
        for client in clients:
            client.close()


def test_only_the_ring_s_key_is_let_in(make_store, tmp_path):
    store = make_store(key=True).start("--fresh")
    assert store.ask(op="status")["finish"] == ""
    with (
        StoreClient(store.address, RingKey.generate()) as stranger,
        pytest.raises(StoreUnreachableError, match="key"),
    ):
        stranger.request({"op": "status"}, patience_s=1.0)
    with StoreClient(store.address, None) as stranger, pytest.raises(StoreUnreachableError):
        stranger.request({"op": "status"}, patience_s=1.0)


def test_nonsense_is_answered_and_harms_nobody(make_store):
    store = make_store().start("--fresh")
    for message in ({"op": "dance"}, {"op": "join"}, {"op": "evaluated", "epoch": "x"}, {}):
        with pytest.raises(StoreError), StoreClient(store.address, None) as client:
            client.request(message | {"node": "x"})
    assert store.ask(op="status")["members"] == []


@pytest.mark.parametrize(
    ("change", "listen", "message"),
    [
        ({"nodes": 13}, "127.0.0.1:0", "fewer nodes"),
        ({}, "0.0.0.0:0", "key"),
        ({}, "nowhere", "HOST:PORT"),
        ({"epochs": "many"}, "127.0.0.1:0", "the job"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(make_store, change, listen, message):
    store = make_store(**change)
    done = subprocess.run(store.command(listen=listen), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused(make_store):
    store = make_store().start("--fresh")
    words = store.command(listen=store.address)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_the_store_needs_no_torch_and_ends_with_its_parent(make_store):
    code = "import sys, training.store.server, training.store.node_client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
    store = make_store()
    words = [*store.command("--fresh")[:-1]]
    code = "import os, subprocess, sys, time\n"
    code += "subprocess.Popen([*sys.argv[1:], str(os.getpid())])\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT)
    pid = wait_for(lambda: store.note().get("pid"))
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
