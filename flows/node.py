"""The flow `node`: one node of a ring, on the machine of its Prefect worker.

The train stage starts one run of this flow for each node. Training happens in a child process, so that cancelling the
run (SIGTERM) and killing it (kill -9) both end everything that it started.
"""

import os
from pathlib import Path
from typing import Any

from prefect.states import Completed

from flows.definition import flow
from flows.servers.shutdown import outlive_reader
from tasks.config.credentials import export_credentials
from tasks.config.home import home
from tasks.config.pipeline import StorageConfig
from tasks.engine import know_tasks
from tasks.stages.config_check import check_key_file, split_address
from training.node.rank import STOPPED
from training.processes.children import Child, end_of_log, engine_command, log_size, stop
from training.processes.logs import redact
from training.processes.sockets import own_address

_PATIENCE_S = 9.0


class NodeRunError(RuntimeError):
    """A node's processes failed."""


def node_folder(node_rank: int, coordinator: str) -> Path:
    """Local folder of a node, for its log and state."""
    name = "".join(c if c.isalnum() else "-" for c in coordinator)
    return home() / "work" / f"node-{node_rank}-{name}"


@flow(name="node", flow_run_name="node {node_rank} of {coordinator}", persist_result=False)
def node(
    node_rank: int,
    coordinator: str,
    key_file: str = "",
    folder: str = "",
    bind: str = "",
    advertise: str = "",
    max_restarts: int = 3,
    credentials: str = "",
) -> Any:
    """Train as one node of a ring until the training ends.

    Args:
        node_rank: The node's number, from 0.
        coordinator: HOST:PORT of the training's coordinator.
        key_file: File with the ring's key on this machine; empty for a ring without encryption.
        folder: Local folder; by default in the data folder.
        bind: Address to listen on for neighbours; by default the one used to reach the coordinator.
        advertise: Address for neighbours; by default the same.
        max_restarts: How often the node's processes are restarted after they died.
        credentials: Name of the Prefect block with the object store's key and secret, visible only to this process and
            its children; by default the AWS_... variables of this machine are used.
    """
    outlive_reader()
    split_address(coordinator, "coordinator")
    if key_file:
        check_key_file(Path(key_file), "key_file")
    export_credentials(StorageConfig(credentials=credentials))
    place = Path(folder) if folder else node_folder(node_rank, coordinator)
    place.mkdir(parents=True, exist_ok=True)
    address = bind or own_address(coordinator)
    know_tasks()
    command = engine_command("training.node.agent", "--coordinator", coordinator)
    command += ["--key-file", key_file] if key_file else []
    command += ["--folder", str(place), "--node-rank", str(node_rank), "--max-restarts", str(max_restarts)]
    command += ["--bind", address, "--advertise", advertise or address, "--parent", str(os.getpid())]
    # the job's own setting is the cache folder of the machine that made it
    command += ["--cache", str(home() / "cache")]
    log = place / "node.log"
    begin = log_size(log)
    status = _run(command, log)
    if status == STOPPED:
        return Completed(name="Stopped", message="stopped after a checkpoint")
    if status:
        # the run's state shows this message, and a traceback in the log may contain secrets
        tail = end_of_log(log, begin)
        raise NodeRunError(redact(f"node {node_rank} ended with status {status}: the end of {log}:\n{tail}"))
    return Completed(message="the training has ended")


def _run(command: list[str], log: Path) -> int:
    """Run a child until it exits; it is stopped with this process."""
    # with its own log: a child that inherits the worker's pipe would hide this process's end from the worker
    child = Child(command, log)
    try:
        return child.wait()
    except BaseException:
        stop(child, _PATIENCE_S)
        raise
