"""Runs a node, or one machine of it: starts the ranks (with torchrun if there are several), restarts them if they die,
and exits when its parent does.
"""

import argparse
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from training.node.rank import DIVERGED, GAVE_UP, START, STOPPED, WAS_STOPPED, NodeSetup
from training.processes import logs
from training.processes.children import Child, end_with_parent, engine_words, on_termination
from training.processes.exit_reason import leave_reason, run_with_reason
from training.processes.supervision import EndedError, Supervised, end_together

log = logging.getLogger(__name__)
JOB_PATIENCE_S = 120.0
END_S = 8.0
RESTART_PAUSE_S = 1.0
"""Pause before the first restart; each further one is twice as long."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure torch's allocator; the second name is the older one, and comes first."""


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of torch's GPU allocator for the ranks; empty if the environment configures it already.

    Batches differ in length, which fragments segments of fixed size; expandable segments do not fragment.
    """
    if any(environment.get(name) for name in _ALLOCATOR):
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


class NodeError(RuntimeError):
    """A node cannot start, or failed too often."""


def fetch_job(
    coordinator: str, key_file: Path | None, patience_s: float = JOB_PATIENCE_S, stop: threading.Event | None = None
) -> dict[str, Any] | None:
    """Ask the coordinator what to train.

    Args:
        coordinator: HOST:PORT.
        key_file: The ring's key; None for a ring without authentication on loopback.
        patience_s: Seconds to wait for an answer.
        stop: Ends the wait when set.

    Returns:
        The job as plain JSON: validating it would import torch, which this process does not need. None if `stop` was
        set.

    Raises:
        NodeError: If the coordinator does not answer.
    """
    from training.coordinator.client import CoordinatorClient
    from training.coordinator.messages import CoordinatorUnreachableError, JobRequest
    from training.processes.keys import RingKey

    key = RingKey.load(key_file) if key_file else None
    client = CoordinatorClient(coordinator, key)
    deadline = time.monotonic() + patience_s
    try:
        while stop is None or not stop.is_set():
            try:
                return client.request(JobRequest(), patience_s=min(1.0, patience_s)).job
            except CoordinatorUnreachableError:
                if time.monotonic() > deadline:
                    raise
        return None
    except CoordinatorUnreachableError as error:
        raise NodeError(
            f"no answer from the coordinator at {coordinator} in {patience_s:.0f} s: is it running, is the address "
            f"right (--coordinator), and is {key_file} the key that it was started with?"
        ) from error
    finally:
        client.close()


class Node(Supervised):
    """One node's processes on this machine, which are restarted together.

    Args:
        setup: The node's number and the coordinator's address; `node` counts machines, which the job assigns to nodes.
        max_restarts: How often its processes are restarted after they died.
        cache: This machine's folder for copies of remote shards; the job's if None.
    """

    def __init__(self, setup: NodeSetup, max_restarts: int, cache: Path | None = None) -> None:
        super().__init__(f"node {setup.node}", max_restarts, pause_s=RESTART_PAUSE_S)
        self.setup, self.cache = setup, cache
        self._ranks = 1
        self._stop = threading.Event()

    def request_stop(self) -> None:
        """Ask the ranks to leave the ring and end; `run` then returns."""
        self._stop.set()

    def run(self) -> int:
        """Run until training is over.

        Returns:
            0 when training is over, 75 if it was stopped, otherwise the last exit status of the ranks.
        """
        folder = self.setup.folder
        folder.mkdir(parents=True, exist_ok=True)
        job = fetch_job(self.setup.coordinator, self.setup.key_file, stop=self._stop)
        if job is None:
            return STOPPED
        if self.cache is not None:
            job["cache"] = str(self.cache)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        train = job["train"]
        machines = int(train.get("machines_per_node", 1))
        node, machine = divmod(self.setup.node, machines)
        setup = self.setup.model_copy(update={"node": node, "machine": machine, "machines": machines})
        (folder / "node.json").write_text(setup.model_dump_json(), encoding="utf-8")
        self._ranks = int(train["learners_per_node"]) // machines
        try:
            self.start()
            status = self._watch()
        finally:
            end_together([self], END_S)
        # torchrun's own status does not tell why its ranks have ended
        words = self.reason()
        if words == WAS_STOPPED:
            return STOPPED
        if status and words:
            log.error("%s gave up: %s", self.name, words)
            leave_reason(words)
            return DIVERGED
        return status

    def _watch(self) -> int:
        """Restart the ranks as long as that may help; returns their last exit status."""
        while not self._stop.is_set():
            try:
                if message := self.look(final=(0, STOPPED, DIVERGED)):
                    log.warning("%s", message)
            except EndedError as error:
                return error.status
            if self.ended is not None:
                return self.ended
            self._stop.wait(0.1)
        end_together([self], END_S)
        assert self.process is not None
        return self.process.returncode

    @override
    def _launch(self) -> Child:
        folder, start = self.setup.folder, f"{os.getpid()}-{len(self.deaths)}-{secrets.token_hex(4)}"
        return Child(self._command(self._ranks, start), folder / "node.log", _environment(start), folder / GAVE_UP)

    def _command(self, ranks: int, start: str) -> list[str]:
        rank = engine_words("training.node.rank", str(self.setup.folder / "node.json"), str(os.getpid()))
        if ranks == 1:
            return [sys.executable, *rank]
        # A torchrun agent per machine: agents of several machines would restart each other. Its rendezvous is a file,
        # so that it listens on no port; the ranks use a rendezvous of their own.
        meeting = self.setup.folder / f"agents-{start}"
        return [
            sys.executable,
            *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-conf", "store_type=file"),
            *("--rdzv-id", start, "--max-restarts", "0", "--local-addr", "127.0.0.1"),
            *rank,
        ]


def _environment(start: str) -> dict[str, str]:
    return {
        START: start,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **allocator_settings(os.environ),
        # otherwise torchrun's agent listens on all addresses, although nothing connects
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def run_node(
    coordinator: str,
    key_file: Path | None,
    folder: Path,
    node: int,
    max_restarts: int = 3,
    bind_host: str = "127.0.0.1",
    advertise_host: str = "",
    cache: Path | None = None,
    **more: Any,
) -> int:
    """Run one node until training is over; SIGTERM and SIGINT make it leave the ring within ten seconds.

    Args:
        coordinator: HOST:PORT of the coordinator.
        key_file: The ring's key.
        folder: For logs, the local journal and rendezvous files.
        node: Number of the machine among those of all nodes (the node's number if a node is one machine). It replaces
            a live process with the same number.
        max_restarts: How often its processes are restarted after they died.
        bind_host: Address on which its exchanges listen.
        advertise_host: Address under which neighbours reach them; by default `bind_host`.
        cache: This machine's folder for copies of remote shards; by default the job's.
        more: Further fields of `NodeSetup`.

    Returns:
        0 when training is over, 75 if it was stopped, otherwise the status of its ranks.

    Raises:
        NodeError: If the coordinator does not answer.
    """
    setup = NodeSetup(
        node=node,
        coordinator=coordinator,
        key_file=key_file,
        folder=folder,
        bind_host=bind_host,
        advertise_host=advertise_host,
        **more,
    )
    runner = Node(setup, max_restarts, cache)

    if threading.current_thread() is threading.main_thread():
        on_termination(runner.request_stop)
    return runner.run()


def main(argv: list[str]) -> int:
    """Entry point of `python -m training.node.agent`."""
    parser = argparse.ArgumentParser(prog="training.node.agent", description="Run one node of a training.")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT of the coordinator")
    parser.add_argument("--key-file", type=Path, help="file with the ring's key")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--advertise", default="")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="folder for copies of remote shards; by default the job's")
    parser.add_argument("--more", type=json.loads, default={}, help="further fields of the node's setup, JSON")
    parser.add_argument("--parent", type=int, help="PID of the process to exit with")
    args = parser.parse_args(argv)
    if args.parent:
        end_with_parent(args.parent)
    logs.setup()
    try:
        return run_node(
            args.coordinator,
            args.key_file,
            args.folder,
            args.node_rank,
            args.max_restarts,
            args.bind,
            args.advertise,
            args.cache,
            **args.more,
        )
    except NodeError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    raise SystemExit(run_with_reason(lambda: main(sys.argv[1:]), DIVERGED))
