"""How a training's parameter server is started: as processes beside the coordinator."""

from collections.abc import Sequence
from pathlib import Path

from training.config import TrainConfig
from training.launch.managed import ManagedProcess
from training.processes.sockets import AddressError, split_address

MAX_RESTARTS = 20
"""Of each server."""


def server_parts(cfg: TrainConfig, words: Sequence[str]) -> list[tuple[str, list[str], int]]:
    """Name, command line (behind `python -m`) and number of restarts of each server.

    They listen where the coordinator does: at free ports, or at those that follow the coordinator's.

    Args:
        cfg: The training.
        words: Options that all have in common.

    Raises:
        AddressError: If there are no such ports.
    """
    host, port = split_address(cfg.launch.listen, "launch.listen")
    if port and port + cfg.servers > 65535:
        raise AddressError(
            f"launch.listen is {cfg.launch.listen!r} and the {cfg.servers} processes of the parameter server take the "
            "ports behind it: set a lower port, or 0 for free ones"
        )
    parts = []
    for number in range(cfg.servers):
        own = ["--number", str(number), "--servers", str(cfg.servers), "--fresh"]
        own += ["--listen", f"{host}:{port and port + 1 + number}"]
        parts.append((f"server-{number}", ["training.parameter_server.server", *words, *own], MAX_RESTARTS))
    return parts


def await_servers(parts: Sequence[ManagedProcess], folder: Path, listen: str) -> tuple[str, ...]:
    """Wait until servers that were started listen; from then on they are started again where they are.

    Args:
        parts: The servers, in order.
        folder: Theirs.
        listen: As the coordinator's.

    Returns:
        HOST:PORT of each. A loopback address stands for the coordinator's machine (`sockets.beside`).

    Raises:
        SupervisorError: If one does not start.
    """
    addresses = tuple(part.address(folder / f"{part.name}.json") for part in parts)
    for part, address in zip(parts, addresses, strict=True):
        part.go_on_at(f"{listen.rpartition(':')[0]}:{address.rpartition(':')[2]}")
    return addresses
