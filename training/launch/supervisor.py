"""Supervises a training on this machine: starts servers, evaluator and local nodes, restarts what dies, ends them all.

It is a separate process, the child of the process that requests the training, and does not train itself.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configurable.files import replace_file
from storage.locks import LockTimeoutError, file_lock
from storage.objects import ObjectStore
from training.config import TrainConfig
from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import (
    CoordinatorFailedError,
    CoordinatorUnreachableError,
    StatusRequest,
    StopRequest,
)
from training.job import TrainJob
from training.node.rank import DIVERGED, GAVE_UP, STOPPED
from training.processes import logs
from training.processes.children import end_of_log, end_with_parent, engine_command, log_size, on_termination
from training.processes.exit_reason import leave_reason, read_reason, run_with_reason
from training.processes.keys import RingKey
from training.processes.signs import last_sign
from training.processes.sockets import AddressError, split_address
from training.processes.supervision import EndedError, ManagedProcess, SupervisorError, end_together

log = logging.getLogger(__name__)
PREDECESSOR_S = 300.0
"""How long a training waits for the end of an earlier one of the same job."""
STOP_S = 6.0
"""How long the nodes may take for a last checkpoint after a stop request."""
END_S = 3.0
"""How long all processes may take to end at last; with `STOP_S` it fits into the time that the parent grants."""
MAX_COORDINATOR_RESTARTS = 20
MAX_EVALUATOR_RESTARTS = 3
MAX_SERVER_RESTARTS = 20
"""Restarts of each process of the parameter server."""
QUIET_S = 1200.0
"""How long the evaluator may compute nothing after the last node has ended; what is left to evaluate may take hours."""
SHARED_FILES = "shared"
"""Prefix of the files that local nodes share."""


class TrainingSupervisor:
    """Supervises coordinator, parameter server, evaluator and nodes of one training.

    Args:
        job: The training job.
        folder: Folder for logs, the coordinator's database, keys and the nodes' folders.
        lock: Descriptor of the training's lock, which every process of the training inherits.
    """

    def __init__(self, job: TrainJob, folder: Path, lock: int | None = None) -> None:
        self.job, self.cfg, self.folder, self.lock = job, job.train, folder, lock
        self.stop_requested = False
        self.watching = False
        self.local = self.cfg.launch.kind == "local"
        self.key_file = self._key()
        self.nodes: list[ManagedProcess] = []
        self.servers: list[ManagedProcess] = []
        self.evaluator: ManagedProcess | None = None
        self.coordinator: ManagedProcess | None = None
        self._logs_begin: dict[str, int] = {}

    def request_stop(self) -> None:
        """Handle a stop signal: end after a last checkpoint, or at once if training has not started.

        Raises:
            SystemExit: If the servers are still starting, which may take minutes.
        """
        early = not (self.stop_requested or self.watching)
        self.stop_requested = True
        if early:
            raise SystemExit(STOPPED)

    def _key(self) -> Path | None:
        """The ring's key file: the configured one, or a generated one; None without encryption."""
        if self.cfg.launch.key_file:
            path = Path(self.cfg.launch.key_file).expanduser()
            RingKey.load(path)
            return path
        if not self.cfg.exchange.encrypt:
            return None
        path = self.folder / "ring.key"
        if not path.exists():
            RingKey.generate().save(path)
        return path

    def run(self) -> int:
        """Train to the end.

        Returns:
            0 with a model, 75 if it was stopped after a checkpoint, 3 if a retry would not help, 1 otherwise.
        """
        job_file = self.folder / "job.json"
        job_file.write_text(self.job.model_dump_json(indent=2), encoding="utf-8")
        self._clear()
        try:
            if self.cfg.servers:
                self._start_servers(job_file)
            address = self._start_coordinator(job_file)
            self.evaluator = self._part("evaluator", self._evaluator(job_file, address), MAX_EVALUATOR_RESTARTS)
            self.nodes = [self._node(number, address) for number in range(self.cfg.places)] if self.local else []
            # nodes start first, because they take longest
            for part in [*self.nodes, self.evaluator]:
                part.start()
            self.watching = True
            return self._watch(address)
        finally:
            self.watching = True  # a stop signal from now on must not interrupt the cleanup
            self._end_all()

    def _part(self, name: str, command: list[str], restarts: int) -> ManagedProcess:
        parent = ["--parent", str(os.getpid())]
        return ManagedProcess(name, [*command, *parent], self.folder / f"{name}.log", restarts, lock=self.lock)

    def _key_words(self) -> list[str]:
        return ["--key-file", str(self.key_file)] if self.key_file else []

    def _start_servers(self, job_file: Path) -> None:
        """Start the parameter server and put its addresses into the job for all other processes."""
        folder = self.folder / "servers"
        words = ["--job", str(job_file), "--folder", str(folder), *self._key_words()]
        self.servers = [self._part(*part) for part in server_parts(self.cfg, words)]
        for part in self.servers:
            part.start()
        addresses = await_servers(self.servers, folder, self.cfg.launch.listen)
        self.job = self.job.model_copy(update={"servers": addresses})
        job_file.write_text(self.job.model_dump_json(indent=2), encoding="utf-8")

    def _start_coordinator(self, job_file: Path) -> str:
        """Start the coordinator and wait until it listens; returns its address."""
        note = self.folder / "coordinator.json"
        note.unlink(missing_ok=True)
        words = [
            *(sys.executable, "-m", "training.coordinator.server"),  # it needs to know no task
            "--folder",
            str(self.folder / "coordinator"),
            "--job",
            str(job_file),
            "--fresh",
        ]
        words += ["--listen", self.cfg.launch.listen, *self._key_words()]
        self.coordinator = self._part("coordinator", words, MAX_COORDINATOR_RESTARTS)
        self.coordinator.start()
        address = self.coordinator.address(self.folder / "coordinator" / "coordinator.json", log.warning)
        host = address.rpartition(":")[0] if self.local else self.cfg.launch.listen.rpartition(":")[0]
        self.coordinator.go_on_at(f"{host}:{address.rpartition(':')[2]}")
        replace_file(note, json.dumps({"address": address}).encode())
        return address

    def _evaluator(self, job_file: Path, address: str) -> list[str]:
        words = ["--job", str(job_file), "--coordinator", address, *self._key_words()]
        return engine_command("training.node.evaluator", *words)

    def _node(self, number: int, address: str) -> ManagedProcess:
        here = self.cfg.learners_per_node // self.cfg.machines_per_node
        more: dict[str, Any] = {"first_gpu": number * here, "learners_here": self.cfg.learners}
        more |= {"shared_files": str(self.folder / f"{SHARED_FILES}-{os.getpid()}")}
        name = f"node-{number:03d}"
        (self.folder / name / GAVE_UP).unlink(missing_ok=True)
        self._logs_begin[name] = log_size(self.folder / name / "node.log")
        words = engine_command("training.node.agent", "--coordinator", address, *self._key_words())
        words += ["--folder", str(self.folder / name), "--node-rank", str(number)]
        words += ["--max-restarts", str(self.cfg.membership.max_restarts), "--more", json.dumps(more)]
        return self._part(name, words, self.cfg.membership.max_restarts)

    # --- watching

    def _watch(self, address: str) -> int:
        assert self.evaluator is not None
        assert self.coordinator is not None
        heard, heard_at = 0, time.monotonic()
        while True:
            if self.stop_requested:
                return self._stop_training(address)
            for part in [*self.servers, self.coordinator]:
                self._revive(part)
            self._revive(self.evaluator, final=(0, DIVERGED))
            for part in self.nodes:
                self._revive(part, final=(0, STOPPED, DIVERGED), fatal=False)
            if self.evaluator.ended is not None:
                return self._outcome()
            if self.nodes and all(part.ended is not None for part in self.nodes):
                if all(part.ended not in (0, STOPPED) for part in self.nodes):
                    return self._all_failed()
                if (sign := last_sign(self.folder)) != heard:
                    heard, heard_at = sign, time.monotonic()
                elif time.monotonic() > heard_at + QUIET_S:
                    text = (
                        f"the nodes have ended, and the evaluator has computed nothing for {QUIET_S / 60:.0f} minutes"
                    )
                    raise SupervisorError(f"{text}:\n{self.evaluator.tail()}")
            else:
                heard_at = time.monotonic()
            time.sleep(0.1)

    def _revive(self, part: ManagedProcess, final: tuple[int, ...] = (), fatal: bool = True) -> None:
        """Restart a process that died, unless its status is final, it left an exit reason, or no restarts are left."""
        try:
            if message := part.look(final=final):
                log.warning("%s", message)
        except EndedError as error:
            if fatal:
                raise
            log.error("%s", error)
            part.ended = error.status

    def _outcome(self) -> int:
        assert self.evaluator is not None
        if self.evaluator.ended == 0 and ObjectStore(self.job.output_url).exists("result.json"):
            for part in self.nodes:
                self._wait(part, STOP_S)
            return 0
        if self.evaluator.ended == 0:  # the coordinator received a stop request from another process
            return STOPPED
        print(self.evaluator.tail(), file=sys.stderr)
        leave_reason(self.evaluator.reason())
        return DIVERGED

    def _all_failed(self) -> int:
        """Report why all nodes have failed; returns the exit status."""
        reasons = []
        for part in self.nodes:
            folder = self.folder / part.name
            detail = part.reason() or read_reason(folder / GAVE_UP)
            detail = detail or end_of_log(folder / "node.log", self._logs_begin[part.name])
            reasons.append(f"{part.name}: {detail.strip().splitlines()[-1] if detail.strip() else part.tail(3)}")
        print("\n".join([*reasons, "all nodes have failed"]), file=sys.stderr)
        leave_reason("; ".join([*reasons, "all nodes have failed"]))
        return DIVERGED if any(part.ended == DIVERGED for part in self.nodes) else 1

    def _stop_training(self, address: str) -> int:
        """Stop the training, with a last checkpoint if the nodes manage it in time; returns the exit status."""
        client = CoordinatorClient(address, RingKey.load(self.key_file) if self.key_file else None)
        try:
            client.request(StopRequest(), patience_s=2.0)
            deadline = time.monotonic() + STOP_S
            # members may run on other machines: the coordinator knows when all have left
            while time.monotonic() < deadline and client.request(StatusRequest(), patience_s=2.0).members:
                time.sleep(0.1)
        except (CoordinatorUnreachableError, CoordinatorFailedError) as error:
            log.warning("no last checkpoint: %s", error)
        finally:
            client.close()
        return STOPPED

    def _wait(self, part: ManagedProcess, patience_s: float) -> None:
        if part.process is not None and part.ended is None:
            try:
                part.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                log.warning("%s is slow to end", part.name)

    def _end_all(self) -> None:
        """Stop all processes; all get SIGTERM first, so that they end in parallel."""
        parts = [*self.nodes, self.evaluator, *self.servers, self.coordinator]
        end_together([part for part in parts if part is not None], END_S)
        self._clear()

    def _clear(self) -> None:
        """Delete the files that local nodes share: the lock excludes other users, and hogwild's contain a model."""
        for path in self.folder.glob(f"{SHARED_FILES}-*"):
            path.unlink()


# --- the parameter server: processes next to the coordinator


def server_parts(cfg: TrainConfig, words: Sequence[str]) -> list[tuple[str, list[str], int]]:
    """Name, command line and number of restarts of each server.

    Servers listen on the coordinator's host, on free ports or on those after the coordinator's port.

    Args:
        cfg: Configuration of the training.
        words: Options that all servers share.

    Raises:
        AddressError: If there are not enough ports after the coordinator's.
    """
    host, port = split_address(cfg.launch.listen, "launch.listen")
    if port and port + cfg.servers > 65535:
        raise AddressError(
            f"launch.listen is {cfg.launch.listen!r} and the {cfg.servers} processes of the parameter server use the "
            "ports after it: set a lower port, or 0 for free ones"
        )
    parts = []
    for number in range(cfg.servers):
        own = ["--number", str(number), "--servers", str(cfg.servers), "--fresh"]
        own += ["--listen", f"{host}:{port and port + 1 + number}"]
        parts.append(
            (f"server-{number}", engine_command("training.parameter_server.server", *words, *own), MAX_SERVER_RESTARTS)
        )
    return parts


def await_servers(parts: Sequence[ManagedProcess], folder: Path, listen: str) -> tuple[str, ...]:
    """Wait until all servers listen; later restarts use the same addresses.

    Args:
        parts: The servers, in order.
        folder: The servers' folder.
        listen: The coordinator's `launch.listen`.

    Returns:
        HOST:PORT of each. A loopback address means the coordinator's machine (`sockets.beside`).

    Raises:
        SupervisorError: If one does not start.
    """
    addresses = tuple(part.address(folder / f"{part.name}.json", log.warning) for part in parts)
    for part, address in zip(parts, addresses, strict=True):
        part.go_on_at(f"{listen.rpartition(':')[0]}:{address.rpartition(':')[2]}")
    return addresses


# --- the process


def main(argv: list[str]) -> int:
    """Train the job in a file; the entry point of the supervisor process.

    Args:
        argv: The job file, and the id of the process to end with (by default the current parent).
    """
    end_with_parent(int(argv[1]) if len(argv) > 1 else os.getppid())
    logs.setup()
    job = TrainJob.model_validate_json(Path(argv[0]).read_bytes())
    try:
        # the successor of a killed parent may start before these processes have ended: only one may write checkpoints
        with file_lock(job.journal.parent / "training.lock", PREDECESSOR_S) as lock:
            supervisor = TrainingSupervisor(job, job.journal.parent, lock)
            on_termination(supervisor.request_stop)
            return supervisor.run()
    except (SupervisorError, LockTimeoutError, ValueError) as error:
        print(error, file=sys.stderr)
        leave_reason(str(error))
        return 1


if __name__ == "__main__":
    raise SystemExit(run_with_reason(lambda: main(sys.argv[1:]), DIVERGED))
