"""Starts the parameter server of a training, as processes next to the coordinator."""

from collections.abc import Sequence
from pathlib import Path

from training.config import TrainConfig
from training.launch.managed import ManagedProcess
from training.processes.program import engine_command
from training.processes.sockets import AddressError, split_address

MAX_RESTARTS = 20
"""Restarts of each server."""


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
            (f"server-{number}", engine_command("training.parameter_server.server", *words, *own), MAX_RESTARTS)
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
    addresses = tuple(part.address(folder / f"{part.name}.json") for part in parts)
    for part, address in zip(parts, addresses, strict=True):
        part.go_on_at(f"{listen.rpartition(':')[0]}:{address.rpartition(':')[2]}")
    return addresses
