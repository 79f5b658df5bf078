"""The exchange over ZeroMQ: one thread that asks, answers and averages, beside ZeroMQ's own that move the bytes."""

import math
import time
from typing import Any

import zmq

from training.exchange.allowance import Allowance
from training.exchange.averaging import Averager
from training.exchange.control import Control
from training.exchange.keys import RingKey, secure_server
from training.exchange.mailbox import Mailbox
from training.exchange.neighbours import Kind, by_distance, neighbour
from training.exchange.reporting import Report
from training.exchange.zmq_fetch import Fetching
from training.exchange.zmq_peer import WINDOW_BYTES, Address, Asking, Links, Peers, is_answer, receive
from training.exchange.zmq_protocol import (
    AVERAGE,
    CROSSED,
    FETCH,
    MEANING,
    MISMATCH,
    NOT_READY,
    OK,
    OUTDATED,
    Header,
)
from training.membership import View

_TURN = 16  # messages from one connection before the others have their turn
_UPDATE_S = 0.1  # requests wait for the weights after an update for so long at most
_LATE = 4.0  # lead times that an update may be late before requests are answered with the weights from before it
_RETRY_S = 0.1  # until a neighbour is looked for again when there was none
_REFUSED_S = 1.0  # until a peer that refused is asked again


class ZmqDaemon:
    """Serves one mailbox; see `training.exchange.base` for what it does.

    Args:
        setup: `node`, `host`, `port`, `advertise`, `seed`, `chunk`, `wire`, `neighbours`, `per_step`, `cpu_share`,
            `timeout_s`, and `public` and `secret` of the key, or neither.
        mailbox: Shared with the training process.
        control: Connection to the training process.

    Raises:
        zmq.ZMQError: If the address cannot be bound.
    """

    def __init__(self, setup: dict[str, Any], mailbox: Mailbox, control: Control) -> None:
        self._node, self._seed = int(setup["node"]), int(setup["seed"])
        self._kind: Kind = setup["neighbours"]
        self._per_step, self._timeout_s = int(setup["per_step"]), float(setup["timeout_s"])
        self._allowance = Allowance(float(setup["cpu_share"]))
        self._mailbox, self._control = mailbox, control
        self._averager = Averager(mailbox, int(setup["chunk"]), setup["wire"])
        self._report = Report(mailbox)
        self._view, self._addresses = View(), dict[int, Address]()
        self._asking: Asking | None = None
        self._fetching: Fetching | None = None
        self._ticks = self._budget = self._number = self._first = 0
        self._old_since, self._listens, self._try_at = math.inf, True, 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        key = RingKey(setup["public"].encode(), setup["secret"].encode()) if setup.get("secret") else None
        longest = 4 * self._averager.chunk + 1024
        self._links = Links(self._context, key, self._timeout_s, longest)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.endpoint = self._bind(setup, key, longest)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
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
            self._report.write(now, self._averager)

    def close(self) -> None:
        """Close all sockets."""
        self._peers.close()
        if self._fetching:
            self._fetching.close()
        self._router.close(0)
        self._context.term()

    def _bind(self, setup: dict[str, Any], key: RingKey | None, longest: int) -> str:
        router, host = self._router, setup["host"]
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, longest)
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.IPV6, int(":" in host))
        place = f"[{host}]" if ":" in host else host
        secure_server(self._context, router, key, f"tcp://{place}:{setup['port'] or 1}")
        router.bind(f"tcp://{place}:{setup['port'] or '*'}")
        port = router.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0")  # type: ignore[union-attr]
        return f"tcp://{setup['advertise'] or place}:{port}"

    def _obey(self, command: dict[str, Any]) -> None:
        if "view" in command:
            self._view = View.from_dict(command["view"])
            members = self._view.members
            self._addresses = {m.node: Address(m.node, m.incarnation, m.endpoints[0]) for m in members if m.endpoints}
            if self._asking and self._asking.peer.address not in self._addresses.values():
                self._fail()
            self._peers.keep(set(self._addresses.values()))
            self._try_at = 0.0
        elif "fetch" in command:
            if self._fetching:
                self._fetching.close()
            nodes = by_distance(self._view, self._node)
            candidates = [self._addresses[node] for node in nodes if node in self._addresses]
            header = self._header(FETCH, int(command["fetch"]))
            self._fetching = Fetching(candidates, self._links, self._poller, header, float(command["timeout_s"]))

    def _average(self, events: dict[Any, int]) -> None:
        """Everything that touches the weights."""
        self._poll()
        if self._router in events and not self._awaits():
            self._serve()
        for peer in self._peers:
            if peer.socket in events:
                self._hear(peer.socket)
        if self._fetching and self._fetching.socket in events:
            self._fetching.hear(self._mailbox, self._averager)

    def _poll(self) -> None:
        """See what the training process has given and what it wants; before every chunk, so that it need not wait."""
        self._averager.poll()
        if self._asking and self._asking.header.token >> 32 != self._averager.generation:
            self._fail(blame=False)

    def _awaits(self) -> bool:
        """Whether an update is being made, or its weights are on their way: no exchange begins with the old ones.

        What they bring would have to wait for the update after this one. It is a matter of milliseconds, and bounded:
        where new weights come later than that, or one update after the other, requests are answered with what is there.
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
            self._averager.use()  # otherwise no new weights would be copied for the requests that wait
        if waits == self._listens:
            self._listens = not waits
            self._poller.modify(self._router, zmq.POLLIN if self._listens else 0)
        return waits

    def _serve(self) -> None:
        """Answer others."""
        for _ in range(_TURN):
            self._poll()
            try:
                message = receive(self._router, 3)
            except zmq.Again:
                return
            if message is None:
                continue
            frames, header = message
            status = self._judge(header, len(frames[2]))
            answer: zmq.Frame | bytes = b""
            if status == OK and header.kind == FETCH:
                answer = self._averager.weights(header.index).tobytes()
            elif status == OK:
                answer = frames[2]
                self._averager.answer(header.index, answer.buffer, answer.buffer)
                self._report.answered(len(answer), header.last)
            elif status == CROSSED:
                self._report.answered(0, header.last)
            head = self._header(header.kind, header.token, status, header.index).pack()
            try:
                self._router.send_multipart([frames[0], head, answer], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                self._report.unsent += 1  # the asker's queue is full or it is gone: it counts a failure itself

    def _judge(self, header: Header, length: int) -> int:
        """Status of a request."""
        averager = self._averager
        if header.view < self._view.number and header.node not in self._addresses:
            return OUTDATED
        if not averager.loaded:
            return NOT_READY
        fits = (header.size, header.chunk) == (averager.size, averager.chunk) and header.index < averager.chunks
        if header.kind == AVERAGE:
            fits = fits and header.wire == averager.wire.kind
            fits = fits and length == averager.count(header.index) * averager.wire.itemsize
            if fits and self._crosses(header):
                return CROSSED
        return OK if fits else MISMATCH

    def _crosses(self, header: Header) -> bool:
        """Whether this side waits for the asker's answer on the same chunk, and has the right of way.

        If two sides answered each other's requests that crossed, each would add the whole difference: they would swap
        their weights instead of averaging them. So the lower node's request is answered, the other's is not.
        """
        asking = self._asking
        if asking is None or header.node <= self._node or asking.peer.address.node != header.node:
            return False
        return (asking.header.token, header.index) in asking.peer.underway

    def _hear(self, socket: "zmq.Socket[bytes]") -> None:
        """Take answers to what was asked."""
        peer = next(peer for peer in self._peers if peer.socket is socket)
        for _ in range(_TURN):
            self._poll()
            try:
                message = receive(socket, 2)
            except zmq.Again:
                return
            if message is None:
                continue
            frames, header = message
            sent = peer.underway.pop((header.token, header.index), None)
            if sent is None or header.token >> 32 != self._averager.generation:
                continue
            asking = self._asking if self._asking and self._asking.header.token == header.token else None
            if header.status == CROSSED:
                peer.answered(sent)
                if asking:
                    self._advance(asking, header.index, math.nan)
                continue
            if not is_answer(header) or len(frames[1]) != len(sent.frame):
                if asking:
                    self._report.refuse(peer.address.node, MEANING.get(header.status, "malformed"))
                    peer.underway.clear()
                    self._fail(blame=False)
                    peer.retry_at = time.monotonic() + _REFUSED_S
                continue
            squares = self._averager.settle(header.index, sent.frame.buffer, frames[1].buffer, sent.step)
            peer.answered(sent)
            self._report.received(len(sent.frame), late=asking is None)
            if asking:
                self._advance(asking, header.index, squares)

    def _advance(self, asking: Asking, index: int, squares: float) -> None:
        asking.settled += 1
        asking.moved = time.monotonic()
        if not math.isnan(squares):
            asking.squares += squares
            asking.compared += self._averager.count(index)
        self._report.bytes_sent += asking.send(self._averager)
        if asking.done(self._averager):
            self._report.finish(asking.moved - asking.began, asking.squares, asking.compared, asking.peer.address.node)
            self._asking, self._first = None, 0

    def _begin(self, now: float) -> None:
        """Begin an exchange, if one is due."""
        if self._mailbox.ticks != self._ticks:
            self._ticks, self._budget, self._try_at = self._mailbox.ticks, self._per_step, 0.0
        if self._fetching:
            self._fetching.go_on(now)
            if self._fetching.result is not None:
                self._control.send(self._fetching.result)
                self._fetching.close()
                self._fetching = None
        if self._asking or not self._budget or not self._averager.loaded or now < self._try_at:
            return
        self._poll()
        first = self._budget == self._per_step
        if self._awaits() or not (self._allowance.covers(now) or first):
            return
        address = self._choose(now)
        if address is None:
            self._try_at = now + _RETRY_S
            return
        peer = self._peers.get(address)
        token = self._averager.generation << 32 | (self._number & 0xFFFFFFFF)
        window = max(2, WINDOW_BYTES // (self._averager.chunk * self._averager.wire.itemsize))
        self._asking = Asking(peer, self._header(AVERAGE, token), self._first, window)
        self._budget -= 1
        self._report.initiated += 1
        self._report.bytes_sent += self._asking.send(self._averager)

    def _choose(self, now: float) -> Address | None:
        """Whom to ask now: the next neighbour, unless it is to be left alone, then the one after it."""
        for number in (self._number, self._number + 1):
            node = neighbour(self._kind, self._view, self._node, number, self._seed)
            address = None if node is None else self._addresses.get(node)
            if address is not None and not self._peers.waits(address, now):
                self._number = number + 1
                return address
        return None

    def _check_time(self, now: float) -> None:
        if self._asking and now - self._asking.moved > self._timeout_s:
            self._fail()

    def _fail(self, blame: bool = True) -> None:
        """Give up the exchange that was begun."""
        asking = self._asking
        assert asking is not None
        if blame:
            asking.peer.silent(time.monotonic())
        self._report.failed += 1
        self._first, self._asking = asking.next_first % self._averager.chunks, None

    def _header(self, kind: int, token: int, status: int = OK, index: int = 0) -> Header:
        averager = self._averager
        wire = averager.wire.kind if kind == AVERAGE else "fp32"
        return Header(
            kind, wire, status, False, self._node, averager.chunk, index, token, self._view.number, averager.size
        )

    def _patience_ms(self) -> int:
        """How long to wait for news."""
        if self._awaits():
            return 10
        return 50 if self._asking or self._fetching else 200
