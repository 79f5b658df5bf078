"""Several machines on one: network namespaces on a bridge, behind links of a given rate (Linux, root).

The namespaces have no names: the kernel removes each, with its interfaces, when the last process that uses it or holds
its descriptor ends. So nothing remains after an error, Ctrl-C or kill -9, and nothing of the machine's own network is
touched: the bridge lies in a namespace of its own, too.
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
"""Every machine's interface."""


class NamespaceError(RuntimeError):
    """Network namespaces cannot be made here; the message says why."""


def enter(namespace: int) -> None:
    """Move this thread, and what it starts from now on, into a namespace.

    Args:
        namespace: Its descriptor.
    """
    _libc("setns", namespace, _CLONE_NEWNET)


def address(number: int) -> str:
    """A machine's IP address."""
    return f"{_NET}.{number + 1}"


def alone() -> None:
    """Move this thread, and what it starts from now on, into a namespace that has nothing but loopback.

    Raises:
        NamespaceError: If this is not root on a Linux that has what it takes.
    """
    enter(_new_namespace())
    _ip("link", "set", "lo", "up")


class Switch:
    """A bridge in a namespace of its own, into which the calling thread moves, and machines behind shaped links.

    Args:
        machines: How many, 200 at most.
        rate: Of each link, in each direction, as `tc` writes it ("100mbit").

    Attributes:
        machines: Their namespaces' descriptors, for `enter`.

    Raises:
        NamespaceError: If this is not root on a Linux that has what it takes.
    """

    def __init__(self, machines: int, rate: str) -> None:
        if not 0 < machines <= 200:
            raise NamespaceError(f"{machines} machines do not fit in one network: 1 to 200 do")
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
        self._shape(port)  # what the machine receives
        with _inside(namespace):
            _ip("link", "set", "lo", "up")
            _ip("addr", "add", f"{address(number)}/24", "dev", DEVICE)
            _ip("link", "set", DEVICE, "up")
            self._shape(DEVICE)  # what it sends
        return namespace

    def _shape(self, device: str) -> None:
        # a token bucket: netem is not in every kernel. The burst must hold several offloaded packets of 64 kB
        bucket = ["tbf", "rate", self.rate, "burst", "256k", "latency", "50ms"]
        _run("tc", "qdisc", "add", "dev", device, "root", *bucket)


def why_not() -> str:
    """Why links cannot be shaped here; empty if they can. Tries it in a process of its own."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.netns"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stdout.strip() or done.stderr.strip()[-500:]


def main() -> int:
    """Try it: 0 if namespaces and shaped links work here, otherwise it prints why they do not."""
    try:
        Switch(1, "100mbit")
    except NamespaceError as error:
        print(error)
        return 1
    return 0


def _new_namespace() -> int:
    """A new network namespace's descriptor; the thread stays where it is."""
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
