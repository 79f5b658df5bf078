"""Emulates several machines: network namespaces on a bridge, with links of a given rate (Linux, root).

The namespaces have no names: the kernel removes each, with its interfaces, when the last process that uses it or has
its descriptor open ends. So nothing remains after an error, Ctrl-C or kill -9. The machine's own network is not
changed: the bridge is in a separate namespace, too.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_NET = "10.99.0"
SWITCH_HOST = f"{_NET}.254"
"""Address of the namespace with the bridge, on all machines."""
DEVICE = "eth0"
"""Network interface of every machine."""


class NamespaceError(RuntimeError):
    """Network namespaces cannot be created; the message says why."""


def enter(namespace: int) -> None:
    """Move this thread, and processes that it starts later, into a namespace.

    Args:
        namespace: Descriptor of the namespace.
    """
    _libc("setns", namespace, _CLONE_NEWNET)


def address(number: int) -> str:
    """A machine's IP address."""
    return f"{_NET}.{number + 1}"


def alone() -> None:
    """Move this thread, and processes that it starts later, into a namespace with only a loopback interface.

    Raises:
        NamespaceError: Without root, or if the system does not support it.
    """
    enter(_new_namespace())
    _ip("link", "set", "lo", "up")


class Switch:
    """A bridge in a separate namespace, into which the calling thread moves, and machines behind shaped links.

    Args:
        machines: Number of machines, at most 200.
        rate: Rate of each link in each direction, in the format of `tc` ("100mbit").

    Attributes:
        machines: Descriptors of their namespaces, for `enter`.

    Raises:
        NamespaceError: Without root, or if the system does not support it.
    """

    def __init__(self, machines: int, rate: str) -> None:
        if not 0 < machines <= 200:
            raise NamespaceError(f"{machines} machines are not possible in one network: use 1 to 200")
        self.rate = rate
        self._switch = _new_namespace()
        enter(self._switch)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "switch", "type", "bridge")
        _ip("addr", "add", f"{SWITCH_HOST}/24", "dev", "switch")
        _ip("link", "set", "switch", "up")
        self.machines = [self._plug(number) for number in range(machines)]

    def _plug(self, number: int) -> int:
        namespace = _new_namespace()
        port = f"port{number}"
        there = f"/proc/{os.getpid()}/fd/{namespace}"
        _ip("link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", there)
        _ip("link", "set", port, "master", "switch", "up")
        self._shape(port)  # traffic to the machine
        with _inside(namespace):
            _ip("link", "set", "lo", "up")
            _ip("addr", "add", f"{address(number)}/24", "dev", DEVICE)
            _ip("link", "set", DEVICE, "up")
            self._shape(DEVICE)  # traffic from the machine
        return namespace

    def _shape(self, device: str) -> None:
        # a token bucket, as netem is not in every kernel; the burst must fit several offloaded packets of 64 kB
        bucket = ["tbf", "rate", self.rate, "burst", "256k", "latency", "50ms"]
        _run("tc", "qdisc", "add", "dev", device, "root", *bucket)


def sent_bytes(namespace: int) -> int:
    """Bytes that a machine has sent over its link so far, headers included.

    Args:
        namespace: Descriptor of its namespace.
    """
    with _inside(namespace):
        lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    # `eth0: received bytes, 7 more figures, sent bytes, …`
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


def why_not() -> str:
    """Why links cannot be shaped here, tested in a separate process; empty if they can."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.netns"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stdout.strip() or done.stderr.strip()[-500:]


def main() -> int:
    """Test namespaces and shaped links; returns 0, or prints why they do not work."""
    try:
        Switch(1, "100mbit")
    except NamespaceError as error:
        print(error)
        return 1
    return 0


def _new_namespace() -> int:
    """Create a network namespace without moving the thread; returns its descriptor."""
    home = os.open(_OWN, os.O_RDONLY)
    try:
        _libc("unshare", _CLONE_NEWNET)
        namespace = os.open(_OWN, os.O_RDONLY)
        enter(home)
        return namespace
    finally:
        os.close(home)


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    home = os.open(_OWN, os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        enter(home)
        os.close(home)


def _libc(name: str, *arguments: int) -> None:
    # Python 3.12 has these as os.unshare and os.setns
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        raise NamespaceError(f"this system has no {name}: network namespaces are Linux's") from None
    if function(*arguments):
        number = ctypes.get_errno()
        raise NamespaceError(f"{name}: {os.strerror(number)} (network namespaces need root)")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespaceError(f"{' '.join(command[:4])}: {error} (install iproute2)") from error
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    raise SystemExit(main())
