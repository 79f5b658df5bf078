"""The training process's side of an exchange: a mailbox in shared memory, and the daemon that serves it."""

import logging
import math
import os
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from typing_extensions import override

from training.coordinator.membership import Member, View
from training.exchange.base import Exchange, ExchangeError, ExchangeSetup, ExchangeStats, FetchedReplica, PortTakenError
from training.exchange.config import ExchangeConfig
from training.exchange.control import Control
from training.exchange.device import CudaCopies
from training.exchange.mailbox import Bell, Mailbox, make_file, make_memory
from training.exchange.messages import MEANING, NOT_READY, chunk_weights
from training.exchange.movers import DeviceMover, HostMover, Mover
from training.exchange.replicas import ReplicaMemory, replica_bytes, replica_length
from training.processes.children import Child, stop

log = logging.getLogger(__name__)
START_S = 60.0
"""How long a daemon may take to start."""
STOP_S = 2.0
"""How long it may take to end before it is killed."""
_WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104


class MailboxExchange(Exchange):
    """Common part of exchanges over a mailbox; subclasses provide the other side.

    Args:
        size: Number of weights.
        shared: Whether another process maps the mailbox, too; else it needs no file.
    """

    def __init__(self, size: int, shared: bool = True) -> None:
        if size < 1:
            raise ValueError(f"an exchange of {size} weights: give a model with parameters")
        self._file, self._bell = (make_file(size), Bell.make()) if shared else (-1, Bell())
        self._size, self._mailbox = size, Mailbox(self._file, size, self._bell)
        self._mailbox.last_peer = -1
        self._staleness = 0.0
        self._final: ExchangeStats | None = None
        self._mover: Mover | None = None

    @abstractmethod
    def _wake(self) -> None:
        """Notify the other side of changes; never waits, may be called by any thread."""

    def _make_mover(self, weights: torch.Tensor) -> Mover:
        if weights.is_cuda:
            return DeviceMover(self._mailbox, self._wake, weights, CudaCopies(weights.device, self._mailbox))
        return HostMover(self._mailbox, self._wake)

    @override
    def start(self, weights: torch.Tensor, step: int) -> None:
        self._check(weights)
        if self._mover is None:
            self._mover = self._make_mover(weights)
        # a snapshot of the new generation resets the other side; if the slot is full, the next `give` sends it
        self._mover.restart()
        self._mailbox.step = self._mailbox.updating = step
        self._mover.give(weights, step)

    @override
    def give(self, weights: torch.Tensor, step: int) -> bool:
        self._check(weights)
        if self._mover is None:
            raise ExchangeError("give() before start()")
        return self._mover.give(weights, step)

    @override
    def tick(self, step: int) -> None:
        if self._final is not None:
            return
        self._mailbox.step = step
        self._mailbox.ticks += 1
        self._wake()

    @override
    def ready(self) -> bool:
        if self._mover is None:
            return False
        update = self._mailbox.step + 1
        if update != self._mailbox.updating:
            self._mover.update_begins()
            self._mailbox.updating = update
        if not self._mover.ready():
            return False
        self._staleness = float(update - self._mover.oldest)
        return True

    @override
    def take(self) -> torch.Tensor:
        if self._mover is None or not self.ready():
            raise ExchangeError("no delta is ready: ask ready() first")
        return self._mover.take()

    @override
    def release(self) -> None:
        if self._mover is not None:
            self._mover.release()

    @override
    def stats(self) -> ExchangeStats:
        if self._final is not None:
            return self._final
        mailbox = self._mailbox
        return ExchangeStats(
            initiated=mailbox.initiated,
            finished=mailbox.finished,
            answered=mailbox.answered,
            failed=mailbox.failed,
            late=mailbox.late,
            skipped_nonfinite=mailbox.skipped,
            last_s=mailbox.last_s,
            mean_s=mailbox.total_s / max(mailbox.finished, 1),
            bytes_sent=mailbox.bytes_sent,
            bytes_received=mailbox.bytes_received,
            distance=mailbox.distance,
            staleness=self._staleness,
            cpu_seconds=mailbox.cpu_seconds,
            silent_s=mailbox.silent_s(),
            last_peer=mailbox.last_peer,
        )

    def _close_mailbox(self) -> None:
        """Release the memory; called by `close` of subclasses."""
        if self._mover is not None:
            self._mover.close()
        self._mover = None
        if self._file >= 0:
            self._final = self.stats()
            os.close(self._file)
            self._file = -1
            self._bell.close()
            self._mailbox.close()

    def _check(self, weights: torch.Tensor) -> None:
        if weights.dtype != torch.float32 or weights.shape != (self._size,) or not weights.is_contiguous():
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} and type {weights.dtype}: "
                f"the exchange was set up for {self._size} contiguous fp32 values in one dimension"
            )


# --- the daemon on the other side


class DaemonExchange(MailboxExchange):
    """Starts a daemon and communicates with it; subclasses say where it runs.

    Raises:
        ValueError: If encryption is on and there is no key.
        PortTakenError: If the configured port is in use.
        ExchangeError: If the daemon cannot start.
    """

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> None:
        if cfg.encrypt and setup.key is None:
            raise ValueError("encrypt is on but there is no key: give a key file (launch.key_file) or encrypt=false")
        super().__init__(setup.size)
        self._replicas: ReplicaMemory | None = None
        self._rank = setup.rank
        self._fetches = 0
        self._log = setup.folder / f"exchange-{setup.node}.{setup.rank}.log"
        message = self._message(cfg, setup)
        ours, theirs = socket.socketpair()
        self._control = Control(ours)
        self._launch(message, theirs)
        try:
            self.endpoint = self._listening()
        except BaseException:
            self.close()
            raise

    def _message(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> dict[str, Any]:
        """What the daemon needs to know."""
        host, port = split_host(setup.bind_host)
        if host in _WILDCARDS and not setup.advertise_host:
            raise ValueError(f"bind_host {host} is not an address that others can connect to: give advertise_host too")
        message: dict[str, Any] = {
            "size": setup.size,
            "node": setup.node,
            "rank": setup.rank,
            "seed": setup.seed,
            "host": host,
            "port": port + 2 * setup.rank if port else 0,
            "advertise": setup.advertise_host,
            "chunk": chunk_weights(setup.size, cfg.chunk_kb),
            "wire": cfg.wire,
            "neighbours": setup.gossip.neighbours,
            "per_step": setup.gossip.per_step,
            "cpu_share": cfg.cpu_share,
            "timeout_s": cfg.timeout_s,
        }
        if setup.moments:
            self.moments, length = setup.moments, replica_length(setup.size, setup.moments)
            self._replica_file = make_memory(replica_bytes(length))
            self._replicas = ReplicaMemory(self._replica_file, length)
            message["replica"] = {"file": self._replica_file, "length": length, "optimizer": setup.optimizer}
        if setup.key is not None and cfg.encrypt:
            message |= {"public": setup.key.public.decode(), "secret": setup.key.secret.decode()}
        return message

    @override
    def set_view(self, view: View) -> None:
        if (me := self._rank) > 0:
            members = (Member(m.node, m.incarnation, m.endpoints[me : me + 1]) for m in view.members)
            view = View(view.number, tuple(members))
        self._control.send({"view": view.to_dict()})

    @override
    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        if self._fetch(timeout_s):
            return None
        weights = torch.from_numpy(self._mailbox.fetched.copy())
        self._mailbox.forget_fetched()
        return weights

    @override
    def fetch_replica(self, timeout_s: float) -> FetchedReplica | None:
        if self._replicas is None:
            return None
        if why := self._fetch(timeout_s, replica=True):
            # an optimizer without a step has no state: learners that start together have nothing to send
            level = logging.INFO if why.endswith(MEANING[NOT_READY]) else logging.WARNING
            log.log(level, "no neighbour sent its optimizer state (%s): fetching weights alone", why)
            return None
        values = torch.from_numpy(self._replicas.fetched.copy())
        self._replicas.forget_fetched()
        return FetchedReplica(values[:-1].view(1 + self.moments, self._size), float(values[-1]))

    def _fetch(self, timeout_s: float, **what: Any) -> str:
        """Have the daemon fetch weights or a replica; returns why it failed, or ""."""
        self._fetches += 1
        self._control.send({"fetch": self._fetches, "timeout_s": timeout_s, **what})
        answer = self._await("fetched", timeout_s + 0.5, self._fetches)
        if answer is None:
            return "the daemon did not answer"
        return "" if answer["ok"] else str(answer["why"])

    @override
    def replica_slot(self) -> torch.Tensor | None:
        if self._replicas is None or not self._replicas.wanted:
            return None
        return torch.from_numpy(self._replicas.given)[:-1].view(1 + self.moments, self._size)

    @override
    def give_replica(self, steps: float) -> None:
        assert self._replicas is not None
        self._replicas.given[-1] = steps
        self._replicas.give()

    @abstractmethod
    def _launch(self, setup: dict[str, Any], theirs: socket.socket) -> None:
        """Start the daemon.

        Args:
            setup: What it needs to know.
            theirs: The daemon's end of the control connection.
        """

    @abstractmethod
    def _end(self) -> None:
        """End the daemon, whose control connection is closed, within a bounded time."""

    @abstractmethod
    def _tail(self) -> str:
        """The end of the daemon's log."""

    @override
    def alive(self) -> bool:
        return not self._control.closed

    @override
    def close(self) -> None:
        self._control.close()
        self._end()
        self._close_mailbox()
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
            os.close(self._replica_file)

    def _listening(self) -> str:
        answer = self._await("listening", START_S)
        if answer is not None:
            return str(answer["listening"])
        tail = self._tail() or "(nothing)"
        raise ExchangeError(f"the exchange's daemon did not start; the end of {self._log}:\n{tail}")

    def _await(self, name: str, timeout_s: float, value: object = None) -> dict[str, Any] | None:
        """Wait for the daemon's message of that name (and value); None after a time-out or if the daemon ends."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not self._control.closed:
            self._control.flush()
            self._control.wait(min(left, 0.2))
            for message in self._control.receive():
                if message.get("error") == "taken":
                    raise PortTakenError(f"the exchange's port is in use: configure another or none ({message['why']})")
                if "error" in message:
                    raise ExchangeError(f"the exchange cannot start: {message['why']}")
                if name in message and value in (None, message[name]):
                    return message
        return None

    def _wake(self) -> None:
        self._control.wake()


class ProcessExchange(DaemonExchange):
    """The daemon is a process of its own, for weights in shared main memory.

    Linux ends the daemon when the *thread* that started it ends, so create this object in a thread that lives as long
    as the training.

    Attributes:
        daemon: Module of the daemon's program.
    """

    daemon = "training.exchange.daemon"

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    @override
    def alive(self) -> bool:
        return self._process.poll() is None and super().alive()

    @override
    def _launch(self, setup: dict[str, Any], theirs: socket.socket) -> None:
        files = (self._file, theirs.fileno(), self._bell.rings)
        command = [sys.executable, "-m", self.daemon, *map(str, files), str(os.getpid())]
        # chunk arithmetic gains nothing from threads, and the cores are for training
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        inherited = [*files, *([self._replica_file] if self._replicas else [])]
        with theirs:
            self._process = Child(command, self._log, threads, pass_fds=inherited)
        self._control.send(setup)

    @override
    def _end(self) -> None:
        stop(self._process, STOP_S)

    @override
    def _tail(self) -> str:
        return self._process.tail()


def split_host(text: str) -> tuple[str, int]:
    """Split "host", "host:port", "v6", "[v6]" or "[v6]:port" into host and port (0: any).

    Raises:
        ValueError: If the port is not a valid port number.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, "0"
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"bind_host {text!r}: give HOST or HOST:PORT with a port below 65536")
    return host.strip("[]"), int(port)


# --- several daemons, each for a part of the weights


class SeveralExchanges(Exchange):
    """Splits the weights into parts of nearly equal size and averages each with a separate exchange.

    Averaging is elementwise, so parts may meet different neighbours at different times: each part's sum over the
    learners is preserved as with one exchange.

    Args:
        build: Builds the exchange of a part.
        setup: Setup of the whole exchange.
        count: Number of parts.

    Raises:
        ValueError: If there are more parts than weights.
    """

    def __init__(self, build: Callable[[ExchangeSetup], Exchange], setup: ExchangeSetup, count: int) -> None:
        if setup.size < count:
            raise ValueError(f"exchange.daemons is {count}, but there are only {setup.size} weights: use daemons=1")
        edges = [setup.size * k // count for k in range(count + 1)]
        self._slices = [slice(begin, end) for begin, end in pairwise(edges)]
        self._exchanges: list[Exchange] = []
        self._waiting: list[int] = []
        self._taken: list[int] = []
        self._delta = torch.empty(0)
        try:
            for k, part in enumerate(self._slices):
                part_setup = replace(setup, rank=setup.rank * count + k, size=part.stop - part.start, moments=0)
                self._exchanges.append(build(part_setup))
        except BaseException:
            self.close()
            raise
        self.parts = count
        self.endpoint = " ".join(exchange.endpoint for exchange in self._exchanges)

    def _each(self, weights: torch.Tensor) -> Iterator[tuple[Exchange, torch.Tensor]]:
        return ((exchange, weights[part]) for exchange, part in zip(self._exchanges, self._slices, strict=True))

    @override
    def start(self, weights: torch.Tensor, step: int) -> None:
        for exchange, part in self._each(weights):
            exchange.start(part, step)

    @override
    def tick(self, step: int) -> None:
        for exchange in self._exchanges:
            exchange.tick(step)

    @override
    def ready(self) -> bool:
        self._waiting = [k for k, exchange in enumerate(self._exchanges) if exchange.ready()]
        return bool(self._waiting)

    @override
    def take(self) -> torch.Tensor:
        if not self._waiting:
            raise ExchangeError("no delta is ready: ask ready() first")
        self._taken = self._waiting
        brought = {k: self._exchanges[k].take() for k in self._taken}
        if not len(self._delta):
            self._delta = torch.empty(self._slices[-1].stop, device=next(iter(brought.values())).device)
        for k, part in enumerate(self._slices):
            if k in brought:
                self._delta[part].copy_(brought[k])
            else:
                self._delta[part].zero_()
        return self._delta

    @override
    def release(self) -> None:
        for k in self._taken:
            self._exchanges[k].release()
        self._taken = self._waiting = []

    @override
    def give(self, weights: torch.Tensor, step: int) -> bool:
        given = [exchange.give(part, step) for exchange, part in self._each(weights)]
        return all(given)

    @override
    def set_view(self, view: View) -> None:
        spread = (
            replace(member, endpoints=tuple(" ".join(member.endpoints).split())) for member in view.members
        )  # each part counts as a rank
        view = View(view.number, tuple(spread))
        for exchange in self._exchanges:
            exchange.set_view(view)

    @override
    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        deadline = time.monotonic() + timeout_s
        fetched = []
        for exchange in self._exchanges:
            part = exchange.fetch(max(0.0, deadline - time.monotonic()))
            if part is None:
                return None
            fetched.append(part)
        return torch.cat(fetched)

    @override
    def stats(self) -> ExchangeStats:
        return combined([exchange.stats() for exchange in self._exchanges])

    @override
    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()

    @override
    def alive(self) -> bool:
        return all(exchange.alive() for exchange in self._exchanges)


def combined(parts: list[ExchangeStats]) -> ExchangeStats:
    """Combine the figures of equal parts into those of one exchange: counts and CPU times add up.

    Args:
        parts: Figures of each part; at least one.
    """

    def total(name: str) -> int:
        return sum(int(getattr(stats, name)) for stats in parts)

    finished = total("finished")
    return ExchangeStats(
        initiated=total("initiated"),
        finished=finished,
        answered=total("answered"),
        failed=total("failed"),
        late=total("late"),
        skipped_nonfinite=total("skipped_nonfinite"),
        last_s=max(stats.last_s for stats in parts),
        mean_s=sum(stats.mean_s * stats.finished for stats in parts) / max(finished, 1),
        bytes_sent=total("bytes_sent"),
        bytes_received=total("bytes_received"),
        distance=math.sqrt(sum(stats.distance**2 for stats in parts) / len(parts)),
        staleness=max(stats.staleness for stats in parts),
        cpu_seconds=sum(stats.cpu_seconds for stats in parts),
        silent_s=max(stats.silent_s for stats in parts),
        last_peer=parts[-1].last_peer,
    )
