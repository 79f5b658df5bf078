"""Rendezvous of a node's learners on several machines: how they find each other and notice that a machine is lost.

The coordinator, which authenticates them, gives out the address of the node's first learner, where torch.distributed's
store listens. A thread of each machine's first learner polls the coordinator: when a machine is lost or restarts, the
thread ends its process. That ends all processes of the node, which then restart together.
"""

import datetime
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import (
    CoordinatorError,
    CoordinatorFailedError,
    CoordinatorUnreachableError,
    RendezvousReply,
    RendezvousRequest,
)
from training.node.rank import NodeSetup
from training.processes.keys import RingKey
from training.processes.sockets import interface_of, split_address

log = logging.getLogger(__name__)
TIMEOUT = datetime.timedelta(seconds=60)
"""For connecting to the node's first learner, which already listens."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the interfaces of torch.distributed."""
ASK_S = 0.2
"""Seconds between two polls whether the other machines have arrived."""
LOST = 1
"""Exit status after a machine was lost: the node's processes are restarted."""


class RendezvousError(RuntimeError):
    """The node's other machines did not arrive in time."""


@dataclass(frozen=True)
class RankPlacement:
    """A learner's place in its node.

    Attributes:
        rank: Rank within the node.
        size: Learners of the node.
        token: Shared by this machine's learners, unique to this start.
    """

    rank: int
    size: int
    token: str


class Rendezvous:
    """Connects the learners of one node on several machines.

    Args:
        setup: This machine and its node.
        place: This learner's place in the node.
        key: The ring's key.
        patience_s: Seconds to wait for the other machines.
        ask_s: Seconds between two polls of the coordinator.

    Attributes:
        wants_to_leave: Set this to make the whole node leave.
        leaving: Set by this object when one of the node's machines wants to leave.

    Raises:
        RendezvousError: If the other machines do not arrive in time.
        CoordinatorError: If the coordinator refuses this machine.
    """

    def __init__(
        self, setup: NodeSetup, place: RankPlacement, key: RingKey | None, patience_s: float, ask_s: float = 1.0
    ) -> None:
        self._setup, self._place, self._patience_s, self._ask_s = setup, place, patience_s, ask_s
        self.wants_to_leave, self.leaving = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._group: tuple[str, ...] = ()
        self._client = CoordinatorClient(setup.coordinator, key)
        host = setup.advertise_host or setup.bind_host
        # use the interface of the exchanges unless the environment names another
        if unset := [name for name in INTERFACES if name not in os.environ]:
            os.environ.update(dict.fromkeys(unset, interface_of(host)))
        try:
            self.store = self._find_others(host)
        except BaseException:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._stay, name="rendezvous", daemon=True)
        if place.rank % (place.size // setup.machines) == 0:
            self._thread.start()

    def _ask(self, patience_s: float, **more: Any) -> RendezvousReply:
        setup = self._setup
        request = RendezvousRequest(node=setup.node, machine=setup.machine, token=self._place.token, **more)
        return self._client.request(request, patience_s)

    def _find_others(self, host: str) -> Store:
        """Create torch.distributed's store at the node's first learner, or connect to it."""
        if self._place.rank:
            address, port = split_address(self._await(""), "the rendezvous address")
            return TCPStore(address.strip("[]"), port, wait_for_workers=False, timeout=TIMEOUT)
        family = socket.AF_INET6 if ":" in self._setup.bind_host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # without a socket of ours, torch would listen on all addresses
        listener.bind((self._setup.bind_host.strip("[]"), 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            host.strip("[]"), port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._await(f"{host}:{port}")
        return store

    def _await(self, address: str) -> str:
        """Wait until all machines have arrived; returns the address of the store."""
        deadline, logged_at, missing = time.monotonic() + self._patience_s, 0.0, "an answer from the coordinator"
        while time.monotonic() < deadline:
            try:
                answer = self._ask(min(10.0, self._patience_s), address=address)
            except CoordinatorUnreachableError as error:
                log.warning("%s", error)
                continue
            if answer.group:
                self._group = answer.group
                return answer.address
            missing = f"its machine(s) {', '.join(map(str, answer.missing))}"
            if time.monotonic() > logged_at + 30.0:
                logged_at = time.monotonic()
                log.info("node %d waits for %s", self._setup.node, missing)
            time.sleep(ASK_S)
        raise RendezvousError(
            f"node {self._setup.node} has waited {self._patience_s:g} s for {missing}: start a process on each machine "
            "(`starling train --node-rank`), or lower train.machines_per_node"
        )

    def _stay(self) -> None:
        """Poll the coordinator until `close`; end this process if a machine of the node is lost."""
        while not self._closed.wait(self._ask_s):
            try:
                answer = self._ask(5.0, group=self._group, leaving=self.wants_to_leave.is_set())
            except (CoordinatorError, CoordinatorUnreachableError, CoordinatorFailedError) as error:
                log.warning("%s", error)  # the learners are connected: they do not need the coordinator
                continue
            if answer.leave:
                self.leaving.set()
            if answer.over and not self._closed.is_set():
                log.error("node %d restarts: %s", self._setup.node, answer.over)
                # other threads may wait for the lost machine in a collective, which no signal interrupts
                logging.shutdown()
                os._exit(LOST)

    def close(self) -> None:
        """Stop polling and disconnect from the coordinator."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(6.0)
        self._client.close()
