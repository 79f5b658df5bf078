"""What one coordinator serves: heartbeats and leases a second of emulated nodes, and what a large index costs it.

    python -m benchmarks.coordinator_load [--nodes 1000] [--utterances 1000000] [--seconds 20] [--beat-s 0.5]

The coordinator is the real one, in a process of its own, with encryption. The nodes are the real nodes' state without a
model: in each turn, a node reports a batch that it "has trained", announces the next one, asks for a lease if it has
little left, and plans what it gets. A client sends the heartbeats of its nodes one after the other, as fast as the
coordinator answers; a real node sends one every `membership.beat_s`. So the coordinator is saturated by about
`beat_s` / (CPU seconds of a heartbeat) nodes. Prints figures, and JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Watched
from benchmarks.scaling_coordinator import coordinator_address, start_coordinator
from benchmarks.scaling_probes import tree_cpu
from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import Counts, JoinRequest, StatusRequest
from training.coordinator.node_state import NodeState
from training.coordinator.worklist import plan_lease
from training.processes.keys import RingKey

_START_S = 600.0
WARM_TURNS = 3
"""Turns of each node before the measurement."""


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        nodes: Emulated nodes.
        utterances: Of the index.
        per_shard: Utterances of a shard.
        per_batch: Utterances of a batch.
        seconds: Duration of the measurement.
        beat_s: Of a real node, for the result.
        clients: Processes that send heartbeats.
        folder: Folder of the index and the coordinator.
    """

    nodes: int = 1000
    utterances: int = 1_000_000
    per_shard: int = 500
    per_batch: int = 50
    seconds: float = 20.0
    beat_s: float = 0.5
    clients: int = 2
    folder: str = ""


class EmulatedNode:
    """A node without a model.

    Args:
        number: Its number.
        client: The connection that it shares with others.
        shard_of_row: Shard of each utterance.
        options: Of the measurement.
    """

    def __init__(
        self, number: int, client: CoordinatorClient, shard_of_row: NDArray[np.int64], options: Options
    ) -> None:
        self._client, self._options = client, options
        request = JoinRequest(
            node=number, incarnation=f"{number:016d}", endpoints=(f"tcp://127.0.0.1:{20000 + number}",)
        )
        began = time.perf_counter()
        self.state = NodeState(client.request(request, _START_S))
        self.join_s = time.perf_counter() - began
        self.state.begin(self._plan, shard_of_row, None)
        self.batches = 0

    def _plan(self, epoch: int, rows: NDArray[np.int64], plan: str) -> list[NDArray[np.int64]]:
        return np.array_split(rows, max(1, len(rows) // self._options.per_batch))

    def turn(self) -> tuple[float, int]:
        """Train a batch, and report it in a heartbeat; returns its seconds, and the leases that it brought."""
        if (assignment := self.state.next()) is not None:
            utterances = len(assignment.rows)
            counts = Counts(loss_sum=1.0, tokens=1.0, seconds=1.0, utterances=utterances)
            self.state.trained(assignment, counts)
            self.batches += 1
        beat = self.state.heartbeat(self._options.beat_s, ())
        began = time.perf_counter()
        reply = self._client.request(beat, _START_S)
        taken = time.perf_counter() - began
        self.state.hear(beat, reply)
        queue = self.state.queue
        assert queue is not None
        leases = [lease for lease in reply.leases if not queue.knows(lease.id)]
        for lease in leases:
            queue.add(plan_lease(self._plan, lease, len(queue.shards)))
        return taken, len(leases)


def emulate(number: int, options: Options, pipe: Connection, parent: int) -> None:
    """Process of a client: its nodes join, and when it is told to, send heartbeats for some seconds."""
    folder = Path(options.folder)
    key = RingKey.load(folder / "ring.key")
    with CoordinatorClient(coordinator_address(folder), key) as client:
        shard_of_row = np.repeat(np.arange(options.utterances // options.per_shard), options.per_shard)
        own = range(number, options.nodes, options.clients)
        nodes = [EmulatedNode(node, client, shard_of_row, options) for node in own]
        pipe.send([node.join_s for node in nodes])
        pipe.recv()
        plain: list[float] = []
        # each node gets the ring's view, and its first lease
        first = [node.turn() for _ in range(WARM_TURNS) for node in nodes]
        leasing = [taken for taken, leases in first if leases]
        pipe.send(len(leasing))
        pipe.recv()
        end, at = time.perf_counter() + options.seconds, 0
        while time.perf_counter() < end:
            taken, leases = nodes[at % len(nodes)].turn()
            (leasing if leases else plain).append(taken)
            at += 1
        pipe.send((plain, leasing, sum(node.batches for node in nodes)))
        pipe.recv()


def measure(options: Options) -> dict[str, Any]:
    """Run one measurement; returns its figures.

    Raises:
        BenchmarkError: A process has died.
        RuntimeError: The coordinator has ended.
    """
    with tempfile.TemporaryDirectory() as name:
        options = Options(**asdict(options) | {"folder": name})
        folder, began = Path(name), time.monotonic()
        membership = {"dead_after_s": 3600.0, "start_patience_s": 3600.0, "beat_s": options.beat_s}
        train = {"strategy": "adpsgd", "nodes": options.nodes, "membership": membership}
        coordinator = start_coordinator(folder, train, options.utterances // options.per_shard, options.per_shard)
        written_s = time.monotonic() - began
        clients = None
        try:
            while not coordinator_address(folder):
                if coordinator.poll() is not None or time.monotonic() - began > _START_S:
                    raise RuntimeError((folder / "coordinator.log").read_text(errors="replace")[-2000:])
                time.sleep(0.05)
            started_s = time.monotonic() - began - written_s
            clients = Watched(emulate, options.clients, options, _START_S)
            joins = [seconds for answer in clients.hear() for seconds in answer]
            began = time.monotonic()
            clients.tell("warm up")
            first = sum(clients.hear())
            warm_s = time.monotonic() - began
            cpu = tree_cpu(coordinator.pid)
            clients.tell("begin")
            parts = clients.hear()
            cpu = tree_cpu(coordinator.pid) - cpu
            with CoordinatorClient(coordinator_address(folder), RingKey.load(folder / "ring.key")) as client:
                status = client.request(StatusRequest())
            memory = _memory_mb(coordinator.pid)
            clients.tell("end")
        finally:
            if clients is not None:
                clients.end(10.0)
            coordinator.terminate()
            coordinator.wait(30)
    plain, leasing = ([taken for part in parts for taken in part[kind]] for kind in (0, 1))
    beats = len(plain) + len(leasing) - first
    return {
        **{field: getattr(options, field) for field in ("nodes", "utterances", "per_shard", "clients")},
        "start_s": started_s,
        "join_ms": 1e3 * statistics.median(joins),
        "warm_s": warm_s,
        "members": len(status.members),
        "beats": beats,
        "beats_per_s": beats / options.seconds,
        "leases": len(leasing),
        "cpu_ms_per_beat": 1e3 * cpu / beats,
        "saturated_by_nodes": options.beat_s * beats / max(cpu, 1e-9),
        "beat_ms": 1e3 * statistics.median(plain) if plain else None,
        "lease_ms": 1e3 * statistics.median(leasing) if leasing else None,
        "lease_ms_p99": 1e3 * float(np.quantile(leasing, 0.99)) if leasing else None,
        "batches": sum(part[2] for part in parts),
        "reported": status.progress.trained,
        "memory_mb": memory,
    }


def _memory_mb(process: int) -> float:
    """Highest resident memory of a process so far."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000])
    parser.add_argument("--utterances", type=int, nargs="+", default=[1_000_000])
    for name in ("per_shard", "per_batch", "clients"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Options, name))
    parser.add_argument("--seconds", type=float, default=Options.seconds)
    parser.add_argument("--beat-s", type=float, default=Options.beat_s)
    args = vars(parser.parse_args())
    rows = []
    for nodes in args.pop("nodes"):
        for utterances in args["utterances"]:
            rows.append(measure(Options(**args | {"nodes": nodes, "utterances": utterances})))
            print(", ".join(f"{name} {_shown(value)}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"benchmark": "load of a coordinator", "cores": os.cpu_count(), "rows": rows}))


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
