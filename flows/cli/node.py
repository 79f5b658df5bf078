"""`starling train` runs a whole training or one node of it; `starling key` makes the key that nodes share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import JsonOption, SetOption, friendly, print_json, print_line
from flows.cli.configs import OptionalConfigArgument, complete_path
from flows.cli.run import ForceOption, NoPrefectOption, execute, finish

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
    config: OptionalConfigArgument = None,
    overrides: SetOption = None,
    force: ForceOption = False,
    no_prefect: NoPrefectOption = False,
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
    json_output: JsonOption = False,
) -> None:
    """Train the acoustic model of a configuration, or run one node of a training that was started elsewhere.

    Without a configuration, and with --node-rank and --coordinator, this process and its children form one node. The
    training itself is started by `starling train CONFIG` or `starling run CONFIG` with train.launch.kind=external.
    """
    node_options = {
        "--node-rank": node_rank,
        "--coordinator": coordinator or None,
        "--key-file": key_file,
        "--bind": bind or None,
        "--advertise": advertise or None,
        "--folder": folder,
        "--max-restarts": max_restarts,
    }
    given = [name for name, value in node_options.items() if value is not None]
    if config is not None:
        if given:
            raise ValueError(
                f"{given[0]} is for a node, which takes no configuration (the coordinator sends it): leave out "
                f"{config}, or {given[0]}"
            )
        finish(execute(config, overrides or [], "train" if force else "", "train", no_prefect), json_output)
        return
    if not given and not os.environ.get(COORDINATOR):
        raise ValueError("give a configuration to train, or --node-rank and --coordinator to run a node of a training")
    foreign = {"--set": bool(overrides), "--force": force, "--no-prefect": no_prefect, "--json": json_output}
    for name, used in foreign.items():
        if used:
            raise ValueError(f"{name} needs a configuration; a node takes none (the coordinator sends it)")
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
    from tasks.stages.preflight import check_key_file, is_loopback, split_address
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
