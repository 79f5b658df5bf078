"""How the learners of a node find each other where the node has several machines, and notice that one is lost.

The store, which they can trust, tells where the node's first learner listens; there they meet as torch.distributed
does. A thread of each machine's first learner stays in touch with the store: when a machine is lost or begins anew, it
ends its process, and with it all of the node's, which then begin anew together.
"""

import datetime
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import CoordinatorError, CoordinatorUnreachableError, Message
from training.node.rank import NodeSetup
from training.processes.keys import RingKey
from training.processes.sockets import interface_of, split_address

log = logging.getLogger(__name__)
TIMEOUT = datetime.timedelta(seconds=60)
"""To connect to the node's first learner, which is known to listen."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the interfaces of torch.distributed."""
ASK_S = 0.2
"""Between two looks whether the others are there."""
LOST = 1
"""Exit status when the meeting is over: the node's processes are started again."""


class RendezvousError(RuntimeError):
    """The node's other machines did not come."""


@dataclass(frozen=True)
class RankPlacement:
    """A learner's place in its node.

    Attributes:
        rank: Own number in the node.
        size: Learners of the node.
        token: What this machine's learners have in common, and have for this start only.
    """

    rank: int
    size: int
    token: str


class Rendezvous:
    """The learners of one node on several machines.

    Args:
        setup: Which machine of which node this is.
        place: Which learner.
        key: The ring's key.
        patience_s: How long the others may take to come.
        ask_s: Between two signs of life.

    Attributes:
        wants_to_leave: Set when this machine was told to leave; all of the node then leave.
        told_to_leave: Is set when one of the node's machines wants to leave.

    Raises:
        MeetingError: If the others do not come.
        CoordinatorError: If the coordinator does not know of this machine.
    """

    def __init__(
        self, setup: NodeSetup, place: RankPlacement, key: RingKey | None, patience_s: float, ask_s: float = 1.0
    ) -> None:
        self._setup, self._place, self._patience_s, self._ask_s = setup, place, patience_s, ask_s
        self.wants_to_leave, self.told_to_leave = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._met: list[str] = []
        self._client = CoordinatorClient(setup.coordinator, key)
        host = setup.advertise_host or setup.bind_host
        # the interface that the exchanges use; who launches may have chosen another
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

    def _ask(self, patience_s: float, **more: object) -> Message:
        setup = self._setup
        message = {"op": "meet", "node": setup.node, "machine": setup.machine, "token": self._place.token, **more}
        return self._client.request(message, patience_s)

    def _find_others(self, host: str) -> Store:
        """The rendezvous of torch.distributed, at the node's first learner."""
        if self._place.rank:
            address, port = split_address(self._await(""), "where the node's learners meet")
            return TCPStore(address.strip("[]"), port, wait_for_workers=False, timeout=TIMEOUT)
        family = socket.AF_INET6 if ":" in self._setup.bind_host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # torch would listen on all addresses
        listener.bind((self._setup.bind_host.strip("[]"), 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            host.strip("[]"), port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._await(f"{host}:{port}")
        return store

    def _await(self, address: str) -> str:
        """Wait until all machines are there; the address at which they meet."""
        deadline, told, missing = time.monotonic() + self._patience_s, 0.0, "an answer of the coordinator"
        while time.monotonic() < deadline:
            try:
                answer = self._ask(min(10.0, self._patience_s), address=address)
            except CoordinatorUnreachableError as error:
                log.warning("%s", error)
                continue
            if answer["met"]:
                self._met = [str(token) for token in answer["met"]]
                return str(answer["address"])
            missing = f"its machine(s) {', '.join(str(number) for number in answer['missing'])}"
            if time.monotonic() > told + 30.0:
                told = time.monotonic()
                log.info("node %d waits for %s", self._setup.node, missing)
            time.sleep(ASK_S)
        raise RendezvousError(
            f"node {self._setup.node} has waited {self._patience_s:g} s for {missing}: start a process on each machine "
            "(`starling train --node-rank`), or lower train.machines_per_node"
        )

    def _stay(self) -> None:
        """Give a sign of life every now and then until the node's learners part, or one machine is lost."""
        while not self._closed.wait(self._ask_s):
            try:
                answer = self._ask(5.0, met=self._met, leaving=self.wants_to_leave.is_set())
            except CoordinatorError as error:
                log.warning("%s", error)  # the learners know each other: they go on without the coordinator
                continue
            if answer["leave"]:
                self.told_to_leave.set()
            if answer["over"] and not self._closed.is_set():
                log.error("node %d begins anew: %s", self._setup.node, answer["over"])
                # other threads may wait for the lost machine in a collective, which no signal ends
                logging.shutdown()
                os._exit(LOST)

    def close(self) -> None:
        """The learners part."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(6.0)
        self._client.close()
