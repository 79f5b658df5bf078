"""`starling train` runs one node of a training; `starling key` makes the key that nodes share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import JsonOption, friendly, print_json, print_line
from flows.cli.configs import complete_path
from flows.cli.run import instead

COORDINATOR, KEY_FILE = "STARLING_COORDINATOR", "STARLING_RING_KEY_FILE"
RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables with the node's number, set by launchers: Slurm, Kubernetes' indexed Jobs."""
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file", help=f"The ring's key (see `starling key`). Default: {KEY_FILE}.", autocompletion=complete_path
    ),
]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Folder of the node's logs.", autocompletion=complete_path)
]


@friendly
def train(
    context: typer.Context,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", min=0, help=f"Run this node of a ring. Default: {' or '.join(RANKS)}."),
    ] = None,
    coordinator: Annotated[
        str, typer.Option("--coordinator", metavar="HOST:PORT", help=f"The ring's coordinator. Default: {COORDINATOR}.")
    ] = "",
    key_file: KeyFileOption = None,
    bind: Annotated[
        str,
        typer.Option("--bind", metavar="HOST", help="Listen here. Default: the address used to reach the coordinator."),
    ] = "",
    advertise: Annotated[
        str, typer.Option("--advertise", metavar="HOST", help="Address for neighbours. Default: --bind.")
    ] = "",
    folder: FolderOption = None,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", min=0, help="Restarts of the node's processes. Default: 3.")
    ] = None,
) -> None:
    """Run one node of a training: this process and its children.

    The training itself is started by `starling run CONFIG` with train.launch.kind=external.
    """
    if context.args:
        raise ValueError(
            f"{context.args[0]} is no option of a node, which gets its configuration from the coordinator; to train "
            f"one: {instead('train', context.args)}"
        )
    given = (node_rank, coordinator or None, key_file, bind or None, advertise or None, folder, max_restarts)
    if all(value is None for value in given) and not os.environ.get(COORDINATOR):
        raise ValueError(
            "give --node-rank and --coordinator, the node of a training; to train a configuration: "
            f"{instead('train', [])}"
        )
    raise typer.Exit(
        _node(node_rank, coordinator, key_file, bind, advertise, folder, 3 if max_restarts is None else max_restarts)
    )


def _node(
    rank: int | None,
    coordinator: str,
    key: Path | None,
    bind: str,
    advertise: str,
    folder: Path | None,
    max_restarts: int,
) -> int:
    from flows.node import node_folder
    from tasks.engine import know_tasks
    from tasks.stages.config_check import check_key_file, is_loopback, split_address
    from training.node.agent import run_node
    from training.processes import logs
    from training.processes.sockets import own_address

    rank = _rank() if rank is None else rank
    coordinator = coordinator or os.environ.get(COORDINATOR, "")
    if not coordinator:
        raise ValueError(
            f"--coordinator is missing: give the HOST:PORT of the training's coordinator, or set {COORDINATOR}"
        )
    host, _ = split_address(coordinator, "--coordinator")
    key = key or (Path(os.environ[KEY_FILE]) if os.environ.get(KEY_FILE) else None)
    if key is not None:
        check_key_file(key, "--key-file")
    elif not is_loopback(host):
        raise ValueError(f"--key-file is missing: a coordinator at {host} requires the ring's key (or set {KEY_FILE})")
    address = bind or own_address(coordinator)
    logs.setup()
    place = folder or node_folder(rank, coordinator)
    know_tasks()
    return run_node(coordinator, key, place, rank, max_restarts, address, advertise or address)


def _rank() -> int:
    """The node's number, from the launcher."""
    for name in RANKS:
        text = os.environ.get(name, "")
        if text:
            if not text.isdigit():
                raise ValueError(f"{name} is {text!r}, not a node number: give --node-rank")
            return int(text)
    raise ValueError(
        f"--node-rank is missing: give the node's number, from 0 (a launcher may set {' or '.join(RANKS)})"
    )


@friendly
def key(
    file: Annotated[
        Path,
        typer.Argument(help="File to write; must not exist yet.", show_default=False, autocompletion=complete_path),
    ],
    json_output: JsonOption = False,
) -> None:
    """Generate the key of a ring: anyone with this file can join the training, and read and change its weights."""
    from training.processes.keys import RingKey

    made = RingKey.generate()
    made.save(file)
    if json_output:
        print_json({"file": str(file), "public": made.public.decode()})
        return
    text = f"{file}: copy it to every node over a safe channel, readable by its owner only"
    print_line(text)
