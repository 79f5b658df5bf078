"""A ledger and a coordinator without processes: emulated nodes that count the rows they train, and a test clock."""

import json
from collections import Counter

import numpy as np
from support import wait_until

from storage.objects import ObjectStore
from training.coordinator.checkpoints import find_checkpoint
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core, Settings
from training.coordinator.epochs import ShardMap
from training.coordinator.ledger import Ledger
from training.coordinator.messages import read_request
from training.coordinator.packing import pack_rows

PER_SHARD = 5


def empty_ledger(shards=6, epochs=2):
    shard_of_row = np.repeat(np.arange(shards), PER_SHARD)
    return Ledger(ShardMap(shard_of_row), lambda _, rows: [f"u{row}" for row in rows], 7, epochs)


class Player:
    """Emulated nodes over one ledger, with a record of the rows that they trained.

    Every event also passes through JSON, as through the coordinator's log, to a second ledger, which `reload` writes
    and reads again.
    """

    def __init__(self, ledger=None, done=()):
        self.ledger, self.mirror = ledger or empty_ledger(), empty_ledger()
        self.mirror.load(json.loads(json.dumps(self.ledger.to_dict())))
        self.lines, self.names, self.seqs = [], [], Counter()
        self.done = Counter(done)
        """How often (epoch, row) was trained."""
        self.work, self.untold = {}, {}
        """By incarnation: leases' rows that are not begun, and rows that are trained and not reported."""
        self.reports = []
        """(incarnation, seq, epoch, rows), in the order in which the ledger had them."""
        self.do("running")

    def do(self, event, **values):
        body = json.loads(json.dumps({"event": event, **values}))
        self.mirror.apply(json.loads(json.dumps(body)))
        result = self.ledger.apply(body)
        self.lines += self.ledger.lines
        self.ledger.lines = []
        return result

    def reload(self):
        """Write the second ledger, and read it again, as a coordinator does that was killed."""
        fresh = empty_ledger()
        fresh.load(json.loads(json.dumps(self.mirror.to_dict())))
        self.mirror = fresh

    def join(self, node, ready=True):
        name = f"i{len(self.names)}"
        self.names.append(name)
        self.do("join", node=node, incarnation=name, endpoints=[])
        if ready:
            self.do("ready", incarnation=name)
        self.work[name], self.untold[name] = [], []
        return name

    def name_of(self, node):
        """A node's incarnation; it joins if it has none."""
        state = self.ledger.state_of(node)
        return self.join(node) if state is None else state.member.incarnation

    def drop_node(self, name):
        self.do("drop", incarnation=name, why="lost")

    def ask(self, name):
        for number in range(self.ledger.values.closed, min(self.ledger.values.closed + 2, self.ledger.total)):
            lease = self.do("lease", epoch=number, incarnation=name, live=len(self.ledger.states))
            if lease is not None:
                rows = self.ledger.epochs[number].open_rows(lease).tolist()
                self.work[name].append((number, lease.number, rows))
                return

    def train(self, name, amount, told=True):
        """Start and train some rows; report them and earlier ones now, or later, or never."""
        if not self.work[name]:
            return
        number, lease, rows = self.work[name].pop(0)
        mine, rest = rows[:amount], rows[amount:]
        if rest:
            self.work[name].insert(0, (number, lease, rest))
        self._train(name, number, mine, told)

    def _train(self, name, number, rows, told=True):
        self.do("begin", incarnation=name, epoch=number, rows=pack_rows(np.array(rows, dtype=np.int64)))
        self.done.update((number, row) for row in rows)
        self.untold[name].append((number, rows))
        # a loss of rows that another learner has reported is not noticed: the coordinator counts them as done
        epoch = self.ledger.epochs.get(number)
        if told or epoch is None or epoch.trained[rows].any():
            self.report_all(name)

    def report_all(self, name):
        """Report what is trained."""
        while self.untold[name]:
            self.report(name, *self.untold[name].pop(0))

    def report(self, name, number, rows):
        self.seqs[name] += 1
        counts = {"utterances": len(rows), "seconds": 0.5 * len(rows), "loss_sum": 1.0, "tokens": 2.0}
        packed = pack_rows(np.array(rows, dtype=np.int64))
        self.reports.append((name, self.seqs[name], number, rows))
        self.do("report", incarnation=name, seq=self.seqs[name], epoch=number, rows=packed, counts=counts)

    def return_rows(self, name, amount):
        if self.work[name]:
            number, lease, rows = self.work[name].pop()
            self.do("back", epoch=number, lease=lease, rows=pack_rows(np.array(rows[-amount:], dtype=np.int64)))
            if rows[:-amount]:
                self.work[name].append((number, lease, rows[:-amount]))

    def train_own_share(self, name, start, amount):
        """Train rows without a lease, as a node without a coordinator does; adopted before they are reported."""
        number = self.ledger.values.closed
        hidden = {row for entries in self.untold.values() for epoch, rows in entries if epoch == number for row in rows}
        rows = sorted({(start + k) % self.ledger.size for k in range(amount)} - hidden)
        if number < self.ledger.total and rows:
            self.do("adopt", incarnation=name, epoch=number, rows=pack_rows(np.array(rows)))
            self._train(name, number, rows)

    def finish(self):
        """One node trains all remaining rows."""
        for state in list(self.ledger.states.values()):
            self.drop_node(state.member.incarnation)
        name = self.join(0)
        while not self.ledger.complete:
            self.ask(name)
            assert self.work[name], "nothing is left to lease, and not every row is trained"
            while self.work[name]:
                self.train(name, 4)

    def times_trained(self, number):
        """How often each row of an epoch was trained."""
        return {row: count for (epoch, row), count in self.done.items() if epoch == number}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_coordinator(tmp_path, nodes=2, shards=6, epochs=1, **train):
    member = {"beat_s": 0.5, "dead_after_s": 10.0, "start_patience_s": 60.0}
    train = {"nodes": nodes, "learners_per_node": 1, "epochs": epochs, "max_minutes": 0.0, "membership": member} | train
    train = {"checkpoint_steps": 10000, "checkpoint_keep": 2} | train
    urls = {name: str(tmp_path / name) for name in ("output_url", "journal")}
    job = {"run": "r", "seed": 7, **urls, "train": train, "task": {"train_url": str(tmp_path / "train_url")}}
    clock = Clock()
    core = Core(Settings.from_job(job), empty_ledger(shards, epochs), ObjectStore(urls["output_url"]), clock, clock)
    return Coordinator(core, fresh=True), clock


def ask(coordinator, **message):
    """The reply to a request that has passed through JSON, as JSON."""
    return coordinator.handle(read_request(json.dumps(message).encode())).model_dump(mode="json")


def join(coordinator, node, **words):
    return ask(coordinator, **{"op": "join", "node": node, "incarnation": f"n{node}", "endpoints": []} | words)


def beat(coordinator, node, **reported):
    return ask(coordinator, **{"op": "beat", "incarnation": f"n{node}", "ready": True} | reported)


def report(seq, rows, epoch=0):
    counts = {
        "utterances": len(rows),
        "seconds": 1.0,
        "loss_sum": 1.0,
        "tokens": 1,
        "unalignable": 0,
        "skipped": 0,
        "unreadable": 0,
    }
    return {"seq": seq, "epoch": epoch, "rows": pack_rows(np.array(rows)), "counts": counts}


def ring(tmp_path, nodes=2, **options):
    """A coordinator with all its nodes in the ring, and training."""
    coordinator, clock = make_coordinator(tmp_path, nodes=nodes, **options)
    for node in range(nodes):
        join(coordinator, node)
        beat(coordinator, node)
    assert coordinator.ledger.values.running
    return coordinator, clock


def is_making(coordinator, number):
    current = coordinator.rounds.current
    return current is not None and current.number == number


def wait_until_published(coordinator, number):
    """Wait until a checkpoint is published."""

    def is_published():
        coordinator.tick()
        return find_checkpoint(coordinator.core.output, "r") is not None and not is_making(coordinator, number)

    wait_until(is_published, every_s=0.005)


def record(node, seq=0):
    return {"node": node, "step": seq, "seq": seq}
