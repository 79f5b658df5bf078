"""The exchange's daemon process: `python -m training.exchange.daemon MEMORY CONTROL BELL PARENT`.

The training process starts it, shares memory, a socket pair and a bell with it (as inherited descriptors), and sends
the setup as the first line. The key is part of the setup, so that no process list shows it. The daemon ends with its
parent. One thread asks, answers and averages; ZeroMQ's own threads move the bytes.
"""

import math
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from training.coordinator.membership import View
from training.exchange.averaging import Averager, Averaging
from training.exchange.control import Control
from training.exchange.mailbox import Bell, Floats, Mailbox
from training.exchange.messages import (
    AGREE,
    AVERAGE,
    FETCH,
    MEANING,
    MISMATCH,
    NOT_READY,
    OK,
    RELEASE,
    REPLICA,
    WAITING,
    Buffer,
    Header,
    unpack,
)
from training.exchange.neighbours import Kind, by_distance, neighbour
from training.exchange.protocol import ChunkRequest, Protocol, Report
from training.exchange.replicas import ReplicaGiver, ReplicaMemory
from training.exchange.zmq_sockets import (
    WINDOW_BYTES,
    Address,
    Incoming,
    Links,
    Peer,
    Peers,
    Router,
    SealedRouter,
    receive,
)
from training.processes import logs
from training.processes.children import end_with_parent
from training.processes.keys import RingKey

_TURN = 16  # messages from one connection before others are served
_UPDATE_S = 0.1  # maximum time that requests wait for the weights after an update
_LATE = 4.0  # delay of an update, in lead times, after which requests are answered with the weights from before it
_RETRY_S = 0.1  # interval of the search for a neighbour while there is none
_REFUSED_S = 1.0  # time until a peer that refused is asked again
_SAVED_S = 1.0  # elapsed time whose unused CPU time accumulates
_PAUSE_S = 1.0  # maximum delay of a step's first exchange


class ZmqDaemon:
    """Serves one mailbox: the daemon behind the interface in `training.exchange.base`.

    Args:
        setup: `node`, `host`, `port`, `advertise`, `seed`, `chunk`, `wire`, `neighbours`, `per_step`, `cpu_share`,
            `timeout_s`, and both or neither of the key's `public` and `secret`.
        mailbox: Shared with the training process.
        control: Connection to the training process.
        replicas: Gives newcomers weights and optimizer state; None if the option is off.
        averaging: Averages the weights; by default those in the mailbox.
        cpu_s: Returns the exchange's CPU time, in seconds.

    Raises:
        zmq.ZMQError: If the address cannot be bound.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        mailbox: Mailbox,
        control: Control,
        replicas: ReplicaGiver | None = None,
        averaging: Averaging | None = None,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._replicas = replicas
        self._node, self._seed = int(setup["node"]), int(setup["seed"])
        self._kind: Kind = setup["neighbours"]
        self._timeout_s = float(setup["timeout_s"])
        self._allowance = CpuBudget(float(setup["cpu_share"]), cpu_s)
        self._mailbox, self._control = mailbox, control
        self._averager = averager = averaging or Averager(mailbox, int(setup["chunk"]), setup["wire"])
        self._report = Report(mailbox, cpu_s)
        window = max(2, WINDOW_BYTES // averager.message_bytes(0))
        self._protocol = Protocol(self._node, mailbox, averager, self._report, int(setup["per_step"]), window)
        self._addresses = dict[int, Address]()
        self._asked: Peer | None = None
        self._fetching: Fetching | None = None
        self._old_since, self._listens, self._try_at = math.inf, True, 0.0
        self._alone = True
        self._apart = Stagger(self._seed, self._node, time.monotonic())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        key = RingKey(setup["public"].encode(), setup["secret"].encode()) if setup.get("secret") else None
        longest = max(4 * averager.chunk, averager.message_bytes(0)) + 1024
        self._links = Links(self._context, key, self._timeout_s, longest)
        host, port = setup["host"], int(setup["port"])
        self._router = Router(self._context, key, longest, host, port)
        self._sealed = SealedRouter(self._context, longest, host, port and port + 1) if key else None
        place = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{setup['advertise'] or place}:{self._router.port}"
        self._routers = [self._router, self._sealed] if self._sealed else [self._router]
        self._poller = zmq.Poller()
        for router in self._routers:
            self._poller.register(router.socket, zmq.POLLIN)
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._peers = Peers(self._links, self._poller)

    def run(self) -> None:
        """Serve until the training process closes its end."""
        while not self._control.closed:
            events = dict(self._poller.poll(self._patience_ms()))
            for command in self._control.receive():
                self._obey(command)
            self._control.flush()
            self._average(events)
            now = time.monotonic()
            self._begin(now)
            self._check_time(now)
            self._protocol.note_rest(self._protocol.may_begin and not self._alone)
            self._report.write(now, self._averager)

    def close(self) -> None:
        """Close all sockets."""
        self._peers.close()
        if self._fetching:
            self._fetching.close()
        for router in self._routers:
            router.close()
        self._context.term()

    def _obey(self, command: dict[str, Any]) -> None:
        if "view" in command:
            view = self._protocol.view = View.from_dict(command["view"])
            members = [member for member in view.members if member.endpoints]
            self._addresses = {m.node: Address(m.node, m.incarnation, m.endpoints[0]) for m in members}
            if self._asked and self._protocol.asking and self._asked.address not in self._addresses.values():
                self._fail()
            self._peers.keep(set(self._addresses.values()))
            self._try_at, self._alone = 0.0, False
        elif "fetch" in command:
            if self._fetching:
                self._fetching.close()
            nodes = by_distance(self._protocol.view, self._node)
            candidates = [self._addresses[node] for node in nodes if node in self._addresses]
            header, target, request = self._protocol.header(FETCH, int(command["fetch"])), self._mailbox.fetched, b""
            if self._replicas and command.get("replica"):
                header, target = self._replicas.request(header), self._replicas.memory.fetched
                request = self._replicas.optimizer
            timeout_s = float(command["timeout_s"])
            self._fetching = Fetching(candidates, self._links, self._poller, header, target, timeout_s, request)

    def _average(self, events: dict[Any, int]) -> None:
        """Process all events that concern the weights."""
        self._protocol.poll()
        for router in self._routers:
            if router.socket in events and not self._awaits():
                self._serve(router)
        for peer in self._peers:
            if peer.socket in events:
                self._hear(peer)
        if self._fetching and self._fetching.socket in events:
            self._fetching.hear()

    def _awaits(self) -> bool:
        """Whether an update is in progress, or its weights are being copied: no exchange starts with the old ones.

        An average with the old weights would have to wait for the update after this one. The wait takes milliseconds
        and is bounded: if new weights arrive later, or updates follow each other directly, requests are answered with
        the current weights.
        """
        mailbox, now = self._mailbox, time.monotonic()
        old = self._averager.step < max(mailbox.updating, mailbox.newest)
        old |= 0.0 < mailbox.deadline < now < mailbox.deadline + _LATE * mailbox.lead_s
        if not old or not self._averager.loaded:
            self._old_since = math.inf
        elif self._old_since == math.inf:
            self._old_since = now
        waits = now - self._old_since < _UPDATE_S and self._old_since < math.inf
        if waits:
            self._averager.use()  # else no new weights would be copied for the waiting requests
        if waits == self._listens:
            self._listens = not waits
            for router in self._routers:
                self._poller.modify(router.socket, zmq.POLLIN if self._listens else 0)
        return waits

    def _serve(self, router: Router) -> None:
        """Answer requests of other nodes."""
        for _ in range(_TURN):
            self._protocol.poll()
            try:
                request = router.receive()
            except zmq.Again:
                return
            if request is None:
                continue
            header, chunk = self._answer(request)
            router.reply(request, header, chunk)

    def _answer(self, request: Incoming) -> tuple[Header, Buffer]:
        """Header and chunk of the answer to a request."""
        asked = request.header
        if asked.kind == AGREE:
            agreed = self._sealed is not None and self._sealed.agree(request.chunk)
            port = str(self._sealed.port).encode() if self._sealed and agreed else b""
            return self._protocol.header(AGREE, asked.token, OK if port else MISMATCH), port
        if asked.kind == REPLICA:
            return self._give_replica(request)
        header = self._protocol.answer(asked, request.chunk)
        if header.status != OK:
            return header, b""
        return header, self._averager.weights(asked.index).tobytes() if asked.kind == FETCH else request.chunk

    def _give_replica(self, request: Incoming) -> tuple[Header, Buffer]:
        """Header and chunk of the answer to a newcomer's request for weights and optimizer state."""
        asked, status, values = request.header, NOT_READY, b""
        if self._replicas is None:
            status = MISMATCH
        elif self._averager.loaded:
            status, values = self._replicas.answer(asked, request.sender, bytes(request.chunk), time.monotonic())
        return self._protocol.header(REPLICA, asked.token, status, asked.index), values

    def _hear(self, peer: Peer) -> None:
        """Process a peer's answers."""
        for _ in range(_TURN):
            self._protocol.poll()
            try:
                message = peer.receive()
            except zmq.Again:
                return
            if message is None:
                self._send()  # the peer may just have agreed on keys
                continue
            header, chunk = message
            outcome = self._protocol.hear(peer.pending, header, chunk, time.monotonic())
            if outcome != "refused" and header.kind == AVERAGE and self._averager.refers:
                self._release(peer, header, chunk)
            if outcome == "refused":
                peer.retry_at = time.monotonic() + _REFUSED_S
            elif outcome != "ignored":
                peer.answered()
                self._send()

    def _release(self, peer: Peer, header: Header, chunk: Buffer) -> None:
        """Tell the peer that its answer was read; it sends a reply, which is ignored."""
        if header.status == OK:
            again = self._protocol.header(RELEASE, header.token, index=header.index)
            peer.send(ChunkRequest(again, bytes(chunk)))

    def _send(self) -> None:
        """Send as many chunks as the window permits; finish the exchange when all are answered."""
        protocol, peer = self._protocol, self._asked
        while peer and (request := protocol.next_request()):
            if not peer.send(request):
                peer.pending.memory.give_back(request.chunk)
                break
            protocol.sent(request)
        if protocol.asking and protocol.complete:
            self._apart.took_s = protocol.asking.moved - protocol.asking.began
            protocol.finish(self._apart.took_s)

    def _begin(self, now: float) -> None:
        """Start an exchange if one is due, and continue a fetch."""
        protocol = self._protocol
        if protocol.new_step():
            self._try_at = now + self._apart.pause_s(now)
        if self._fetching:
            self._fetching.go_on(now)
            if self._fetching.result is not None:
                self._control.send(self._fetching.result)
                self._fetching.close()
                self._fetching = None
        if not protocol.may_begin or now < self._try_at:
            return
        protocol.poll()
        if self._awaits() or not (self._allowance.covers(now) or protocol.first_of_step):
            return
        address = self._choose(now)
        self._alone = address is None
        if address is None:
            self._try_at = now + _RETRY_S
            return
        self._asked = self._peers.get(address)
        protocol.begin(address.node, self._asked.pending, time.monotonic())
        self._send()

    def _choose(self, now: float) -> Address | None:
        """Choose the peer to ask: the next neighbour, or the one after it if the next must not be asked yet."""
        protocol, first = self._protocol, self._protocol.number
        for number in (first, first + 1):
            node = neighbour(self._kind, protocol.view, self._node, number, self._seed)
            address = None if node is None else self._addresses.get(node)
            if address is not None:
                protocol.number = number + 1  # if both must wait, other neighbours are considered next time
                if not self._peers.waits(address, now):
                    return address
        return None

    def _check_time(self, now: float) -> None:
        if self._replicas:
            self._replicas.tidy(now)
        asking = self._protocol.asking
        if asking and now - asking.moved > self._timeout_s:
            self._fail()

    def _fail(self) -> None:
        """Abort the exchange in progress, because the peer does not answer or has left."""
        assert self._asked is not None
        self._asked.silent(time.monotonic())
        self._protocol.give_up()

    def _patience_ms(self) -> int:
        """Time to wait for events, in milliseconds."""
        if self._awaits():
            return 10
        most = 50 if self._protocol.asking or self._fetching else 200
        left_s = self._try_at - time.monotonic() if self._protocol.may_begin else 0.0
        return min(most, math.ceil(1000 * left_s)) if left_s > 0 else most


# --- when exchanges start


class CpuBudget:
    """A share of one core for this process; unused time accumulates for at most a second.

    Args:
        share: CPU time per elapsed time; 1 is a whole core.
        used_s: Returns the CPU time of the process, in seconds.
    """

    def __init__(self, share: float, used_s: Callable[[], float] = time.process_time) -> None:
        self._share, self._used_s = share, used_s
        self._saved_s = self._at = 0.0
        self._used = used_s()

    def covers(self, now: float) -> bool:
        """Whether some of the budget is left.

        Args:
            now: Monotonic time, in seconds.
        """
        used, most = self._used_s(), self._share * _SAVED_S
        earned = self._share * (now - self._at) if self._at else most
        # overuse is owed, up to the same limit as savings: requests of other nodes may have caused it
        self._saved_s = max(-most, min(most, self._saved_s + earned - (used - self._used)))
        self._used, self._at = used, now
        return self._saved_s > 0


class Stagger:
    """Draws the delay of a step's first exchange: at most half a step, less the time of an exchange.

    Learners whose steps start at the same moment would otherwise take part in two exchanges at once, one started by
    either side, and end at the mean of their neighbours without themselves. On an even ring that mixing has an
    eigenvalue of -1, and with gradients from before it no learning rate is stable (docs/strategies.md).

    Args:
        seed: Shared by the ring.
        node: This node.
        now: Monotonic time, in seconds.

    Attributes:
        took_s: Duration of the last exchange, in seconds.
    """

    def __init__(self, seed: int, node: int, now: float) -> None:
        self.took_s = 0.0
        self._chance = random.Random(f"starling pause {seed} {node}")
        self._stepped_at = now

    def pause_s(self, now: float) -> float:
        """Delay of the first exchange of a step that starts at `now`, in seconds."""
        step_s, self._stepped_at = now - self._stepped_at, now
        return self._chance.uniform(0.0, min(_PAUSE_S, max(0.0, step_s / 2 - self.took_s)))


# --- what a newcomer takes


_AGAIN_S = 0.05  # interval at which a neighbour that is writing its replica is asked


class Fetching:
    """One fetch; moves on to the next candidate if one is silent, refuses, or sends non-finite values.

    Args:
        candidates: Members to ask, nearest first.
        links: Opens connections.
        poller: The connection in use is registered here.
        header: Header of the requests; says what is fetched, and its size.
        target: Array for the fetched values.
        timeout_s: Time limit for the whole fetch.
        request: Payload of every request.

    Attributes:
        result: Message to the training process once the fetch is over; None before.
        socket: The connection in use.
    """

    def __init__(
        self,
        candidates: list[Address],
        links: Links,
        poller: zmq.Poller,
        header: Header,
        target: Floats,
        timeout_s: float,
        request: bytes = b"",
    ) -> None:
        self._candidates, self._links, self._poller, self._header = candidates, links, poller, header
        self._target, self._request = target, request
        self._deadline = time.monotonic() + timeout_s
        self._silence_s, self._patience_s = min(links.timeout_s, max(0.5, timeout_s / 3)), timeout_s / 3
        self._patient_until = self._again_at = 0.0
        self._window = max(2, WINDOW_BYTES // (4 * header.chunk))
        self._chunks = -(-header.size // header.chunk)
        self._why = "no other node is in the ring"
        self._sent, self._got, self._moved = 0, set[int](), 0.0
        self._node = -1
        self.result: dict[str, Any] | None = None
        self.socket: zmq.Socket[bytes] | None = None
        self._next("")

    def close(self) -> None:
        """Close the connection."""
        if self.socket is not None:
            self._poller.unregister(self.socket)
            self.socket.close(0)
            self.socket = None

    def go_on(self, now: float) -> None:
        """Request further chunks, or move on to the next candidate after a time-out."""
        if self.result is not None:
            return
        if now > self._deadline:
            self._end(False, "no time left; " + self._why)
        elif now - self._moved > self._silence_s:
            self._next(f"node {self._node} did not answer")
        else:
            self._send()

    def hear(self) -> None:
        """Process answers."""
        while self.socket is not None and self.result is None:
            try:
                frames = receive(self.socket, 2)
            except zmq.Again:
                return
            header = unpack(frames[0].buffer) if frames else None
            if frames is None or header is None:
                continue
            payload = frames[1]
            if header.token != self._header.token:
                continue
            if header.status == WAITING:
                self._wait()
            elif (header.kind, header.status) != (self._header.kind, OK):
                self._next(f"node {self._node}: {MEANING.get(header.status, 'malformed')}")
            elif len(payload) == 4 * len(self._place(header.index)) > 0:
                self._store(header.index, np.frombuffer(payload.buffer, np.float32))

    def _wait(self) -> None:
        """Schedule the next request to a candidate that is still writing its replica, within a time limit."""
        now = time.monotonic()
        self._sent, self._again_at = 0, now + _AGAIN_S
        if now < self._patient_until:
            self._moved = now

    def _place(self, index: int) -> Floats:
        start = index * self._header.chunk
        return self._target[start : start + self._header.chunk]

    def _store(self, index: int, values: Floats) -> None:
        if not np.isfinite(values).all():
            self._next(f"node {self._node} sent non-finite values")
            return
        self._place(index)[:] = values
        self._got.add(index)
        self._moved = time.monotonic()
        self._send()
        if len(self._got) == self._chunks:
            self._end(True, "")

    def _send(self) -> None:
        if time.monotonic() < self._again_at:
            return
        window = self._window if self._got else 1  # so that a candidate that refuses gets only one request
        while self.socket is not None and self._sent < self._chunks and self._sent - len(self._got) < window:
            header = replace(self._header, index=self._sent)
            try:
                self.socket.send_multipart([header.pack(), self._request], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._sent += 1

    def _next(self, why: str) -> None:
        """Move on to the next candidate."""
        self.close()
        self._why = why or self._why
        if not self._candidates:
            self._end(False, self._why)
            return
        address = self._candidates.pop(0)
        self._node, self._sent, self._got, self._moved = address.node, 0, set(), time.monotonic()
        self._again_at, self._patient_until = 0.0, self._moved + self._patience_s
        self.socket = self._links.open(address.endpoint)
        self._poller.register(self.socket, zmq.POLLIN)
        self._send()

    def _end(self, ok: bool, why: str) -> None:
        self.result = {"fetched": self._header.token, "ok": ok, "node": self._node, "why": why}


# --- the process


_SETUP_S = 30.0


def main(argv: list[str], serve: Callable[[dict[str, Any], Mailbox, Control], int] | None = None) -> int:
    """Serve one exchange until the training process stops it or ends.

    Args:
        argv: Descriptors of the memory, the control socket and the bell, and the parent's process id.
        serve: Serves it until the training process closes its end; by default over ZeroMQ.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C reaches all processes, and so does SIGTERM of Slurm or systemd: the training process handles it, leaves
        # the ring with the help of this process, and then closes its end
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(argv[3]), signal.SIGKILL)
    logs.setup("exchange")
    control = Control(socket.socket(fileno=int(argv[1])))
    setup = _setup(control)
    mailbox = Mailbox(int(argv[0]), int(setup["size"]), Bell(rings=int(argv[2])))
    return (serve or serve_zmq)(setup, mailbox, control)


def _setup(control: Control) -> dict[str, Any]:
    deadline = time.monotonic() + _SETUP_S
    while not control.closed and time.monotonic() < deadline:
        control.wait(1.0)
        if messages := control.receive():
            return messages[0]
    raise SystemExit("the training process sent no setup")


def _replicas(setup: dict[str, Any]) -> ReplicaGiver | None:
    """Build the giver of weights and optimizer state, if the training process shares memory for it."""
    if "replica" not in setup:
        return None
    shared = setup["replica"]
    memory = ReplicaMemory(int(shared["file"]), int(shared["length"]))
    return ReplicaGiver(memory, str(shared["optimizer"]), int(setup["chunk"]), float(setup["timeout_s"]))


def serve_zmq(
    setup: dict[str, Any],
    mailbox: Mailbox,
    control: Control,
    averaging: Averaging | None = None,
    cpu_s: Callable[[], float] = time.process_time,
) -> int:
    """Serve one exchange over ZeroMQ until the training process closes its end; returns the exit status.

    Args:
        setup: See `ZmqDaemon`.
        mailbox: Shared with the training process.
        control: Connection to the training process.
        averaging: Averages the weights; by default those in the mailbox.
        cpu_s: Returns the exchange's CPU time, in seconds.
    """
    try:
        daemon = ZmqDaemon(setup, mailbox, control, _replicas(setup), averaging, cpu_s)
    except (zmq.ZMQError, ValueError) as error:
        taken = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
        control.send({"error": "taken" if taken else "setup", "why": str(error)})
        return 2
    control.send({"listening": daemon.endpoint})
    try:
        daemon.run()
    finally:
        daemon.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
