"""Sockets of a training's servers and clients: TCP, encrypted with the ring's key (CurveZMQ)."""

import argparse
import fcntl
import ipaddress
import json
import logging
import os
import socket as sockets
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from configurable.files import replace_file
from training.processes.identity import ProcessIdentity
from training.processes.keys import RingKey, is_local, secure_client, secure_server

log = logging.getLogger(__name__)
END_S = 5.0
"""How long the end of a ZeroMQ context may take."""
_SIOCGIFADDR = 0x8915
"""Linux ioctl: get an interface's address."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared, not bound
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class AddressError(ValueError):
    """An address cannot be used to listen on or connect to; the message names the remedy."""


def read_address(note: Path) -> str | None:
    """HOST:PORT that a server has written to its note; None if there is none."""
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def server_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Argument parser with the options that all servers of a training share.

    Args:
        module: The server's module.
        description: Description of the server.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--job", type=Path, required=True, help="the training job, JSON")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT")
    parser.add_argument("--key-file", type=Path, help="the ring's key; needed beyond this machine")
    parser.add_argument("--parent", type=int, default=0, help="id of the process to end with")
    return parser


def split_address(address: str, field: str) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
        address: HOST:PORT.
        field: Name of the address for the error message.

    Raises:
        AddressError: If the address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise AddressError(f"{field} is {address!r}: give HOST:PORT, such as 127.0.0.1:7000")
    return host, int(port)


def beside(address: str, other: str) -> str:
    """Address of a server on the same machine as another server, if the server announced a loopback address.

    Args:
        address: HOST:PORT that the server announced.
        other: HOST:PORT under which the other server is reached from here.
    """
    host, port = split_address(address, "the server's address")
    return f"{split_address(other, 'the other address')[0] if is_local(f'tcp://{address}') else host}:{port}"


def own_address(coordinator: str) -> str:
    """This machine's address on the route to the coordinator, under which neighbours reach it.

    Args:
        coordinator: HOST:PORT; for a local one, the result is a loopback address.
    """
    host, _, port = coordinator.rpartition(":")
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:  # sends no packet, only selects a route
        try:
            probe.connect((host.strip("[]"), int(port)))
        except (OSError, ValueError):
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str:
    """The network interface with a given address of this machine; an IPv4 address must be the interface's first.

    Args:
        host: Address or host name.

    Raises:
        AddressError: If no interface has the address.
    """
    try:
        wanted = ipaddress.ip_address(sockets.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except (OSError, ValueError) as error:
        raise AddressError(f"{host} is not an address ({error}): give --bind an address of this machine") from error
    if wanted.is_loopback:
        return "lo"
    for _, name in sockets.if_nameindex():
        if wanted in _addresses(name):
            return name
    raise AddressError(
        f"no network interface has the address {wanted} (for IPv4, as its first address): give --bind such an address, "
        "or name the interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """An interface's first IPv4 address and all its IPv6 addresses, as reported by Linux."""
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe, suppress(OSError):  # no IPv4 address
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        addresses.append(ipaddress.IPv4Address(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()] if table.exists() else []
    return [*addresses, *(ipaddress.IPv6Address(int(row[0], 16)) for row in rows if row[5] == interface)]


def listening_endpoint(listen: str, note: Path, fresh: bool) -> str:
    """The endpoint to bind; with port 0, a restarted server reuses its previous port, which clients know.

    Args:
        listen: HOST:PORT.
        note: File with the previous address.
        fresh: Whether this is a first start.

    Raises:
        AddressError: If `listen` or the previous address is malformed.
    """
    host, port = split_address(listen, "launch.listen")
    if not port and not fresh and (before := read_address(note)) is not None:
        port = split_address(before, str(note))[1]
    return f"tcp://{host}:{port}"


def bind(
    context: "zmq.Context[Any]", endpoint: str, key: RingKey | None, longest: int, silence_s: float = 20.0
) -> "zmq.Socket[bytes]":
    """Open a server's socket.

    Args:
        context: ZeroMQ context.
        endpoint: Endpoint to listen on.
        key: The ring's key.
        longest: Maximum size of a frame in bytes.
        silence_s: A connection over which nothing has arrived for this time is closed.

    Raises:
        AddressError: If the address is in use, or does not belong to this machine.
        ValueError: If other machines can reach it and there is no key.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _set_up(socket, endpoint, longest, silence_s)
    secure_server(context, socket, key, endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        where = endpoint.removeprefix("tcp://")
        if error.errno == zmq.EADDRINUSE:
            raise AddressError(f"{where} is in use: set launch.listen to another port, or 0 for a free one") from error
        raise AddressError(
            f"cannot listen on {where} ({error}): set launch.listen to an address of this machine"
        ) from error
    return socket


def announce(socket: "zmq.Socket[bytes]", note: Path) -> str:
    """Write a server's `address` and process to a JSON file, atomically; call it once requests can be answered.

    Returns:
        HOST:PORT that the socket is bound to.
    """
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
    host, port = split_address(address, "the endpoint")
    document = {"address": f"{_ANY_HOST.get(host, host)}:{port}", **vars(ProcessIdentity.of(os.getpid()))}
    replace_file(note, json.dumps(document).encode())
    return address


def end_context(context: "zmq.Context[Any]") -> None:
    """Terminate a context whose sockets are closed; waits at most `END_S`.

    ZeroMQ normally takes a millisecond, but in one of many hundred thousand cases it hangs although nothing is open.
    """
    ending = threading.Thread(target=context.term, name="context", daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        log.warning("a ZeroMQ context has not ended within %g s and is abandoned", END_S)


class Connection:
    """A client's socket, which ZeroMQ reconnects automatically, and the results of its handshakes.

    Args:
        context: ZeroMQ context.
        address: HOST:PORT.
        key: The ring's key.
        longest: Maximum size of a frame in bytes.
        silence_s: A connection over which nothing has arrived for this time is reopened.

    Attributes:
        socket: Socket for requests and answers.
        monitor: Monitor socket; readable when there are events for `look`.
        refused: Whether the server has refused the key.
        handshakes: Number of successful handshakes.

    Raises:
        AddressError: If the address is malformed.
        ValueError: If there is no key and the server is on another machine.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        key: RingKey | None,
        longest: int,
        silence_s: float = 20.0,
    ) -> None:
        split_address(address, "the server's address")
        endpoint = f"tcp://{address}"
        self.refused, self.handshakes = False, 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _set_up(self.socket, endpoint, longest, silence_s)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # requests are repeated anyway, so they must not pile up while there is no connection
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            secure_client(self.socket, key, endpoint)
        except ValueError:
            self.socket.close()
            raise
        self.monitor = self.socket.get_monitor_socket(_REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)

    def look(self) -> None:
        """Process the results of handshakes."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.handshakes += 1
            elif event & _REFUSALS:
                self.refused = True

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def _set_up(socket: "zmq.Socket[bytes]", endpoint: str, longest: int, silence_s: float) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s))
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
