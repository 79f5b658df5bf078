"""The coordinator process: one socket, one loop.

    python -m training.coordinator.server --folder F --job job.json --listen HOST:PORT --key-file K [--parent PID]
        [--fresh] [--linger SECONDS]

It may be killed at any moment and restarted with the same folder: every answer is committed before it is sent, and
nodes repeat unanswered requests. `F/coordinator.json` contains its address. Exit status 2 means that it cannot work as
configured.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from storage.objects import ObjectStore
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core, Settings
from training.coordinator.epochs import ShardMap
from training.coordinator.event_log import EventLog
from training.coordinator.ledger import Ledger
from training.coordinator.messages import CoordinatorError, encode_error, encode_reply, read_request
from training.coordinator.packing import MAX_MESSAGE
from training.learner.sampling import Draws
from training.processes import logs
from training.processes.children import end_with_parent, on_termination
from training.processes.exit_reason import CANNOT_WORK, run_with_reason
from training.processes.keys import RingKey
from training.processes.sockets import announce, bind, end_context, listening_endpoint, server_parser

log = logging.getLogger(__name__)

NOTE = "coordinator.json"
"""File in the coordinator's folder that contains its address."""
POLL_S = 0.1
TOGETHER = 256
"""Maximum number of requests per commit."""
COMPACT_EVERY = 5000
"""Number of events after which the log is compacted into the whole state."""


def open_ledger(settings: Settings) -> Ledger:
    """Create an empty ledger for the training set's index; without one, nodes name the data set when they join.

    Raises:
        CoordinatorError: If there are fewer shards than nodes.
    """
    if not settings.train_url:
        return Ledger(ShardMap.from_counts([]), lambda _, rows: [str(row) for row in rows], settings.seed, 1)
    from storage.index import ShardIndex  # needs Arrow, which the engine without the pipeline does not have

    index = ShardIndex.read(ObjectStore(settings.train_url))
    draws = Draws(index, settings.sampling, settings.seed)
    shards = ShardMap(draws.shard)
    if shards.count < settings.nodes:
        raise CoordinatorError(
            f"train.nodes is {settings.nodes} but the training set has {shards.count} shards, so some nodes would have "
            "nothing to train: use fewer nodes, or smaller shards (storage.shard_seconds)"
        )
    ids = index.values("id")

    def names(epoch: int, positions: Sequence[int]) -> list[str]:
        rows = draws.rows(epoch, np.asarray(positions, dtype=np.int64))
        return [ids[int(row)].as_py() for row in rows]

    return Ledger(shards, names, settings.seed, settings.epochs)


class CoordinatorServer:
    """Answers requests; commits each before its answer is sent.

    Args:
        settings: The job.
        folder: Folder of the log and `coordinator.json`.
        endpoint: ZeroMQ endpoint to listen on.
        key: The ring's key.
        fresh: Start a new session and discard the log.
        linger_s: Seconds without a member or a request after which it ends; 0: it never does.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        endpoint: str,
        key: RingKey | None,
        fresh: bool,
        linger_s: float = 0.0,
    ) -> None:
        self._linger_s, self._busy = linger_s, time.monotonic()
        self.folder = folder
        self.context: zmq.Context[Any] = zmq.Context()
        try:
            self.socket = bind(self.context, endpoint, key, MAX_MESSAGE)
            self._open(settings, fresh)
        except BaseException:
            # else the garbage collection of the context would wait for its socket
            self.context.destroy(0)
            raise

    def _open(self, settings: Settings, fresh: bool) -> None:
        """Restore the state from the log, or start a session."""
        self._settings, self._ledger = settings, open_ledger(settings)
        self.log = EventLog(self.folder / "coordinator.sqlite", settings.journal)
        self._stop = False
        self._restore(fresh)
        self._announce()

    def _restore(self, fresh: bool) -> None:
        settings, ledger = self._settings, self._ledger
        state, events = self.log.load()
        if state is None or state["values"]["run"] != settings.run:
            fresh = True
        if fresh:
            self.log.clear()
        elif state is not None:
            ledger.load(state)
            for event in events:
                ledger.apply(event)
            ledger.lines.clear()  # they are in the journal
        self.core = Core(settings, ledger, ObjectStore(settings.output_url))
        self.coordinator = Coordinator(self.core, fresh)
        self._since = 0
        self._commit()

    def _announce(self) -> None:
        """Publish the coordinator's address, once it listens and its state is restored."""
        log.info("the coordinator listens at %s", announce(self.socket, self.folder / NOTE))

    def stop(self) -> None:
        """End the loop after the current iteration."""
        self._stop = True

    def run(self) -> None:
        """Answer requests until stopped."""
        while not self._stop:
            answers = []
            if self.socket.poll(int(POLL_S * 1000)):
                answers = [answer for _ in range(TOGETHER) if (answer := self._next()) is not None]
            self.coordinator.tick()
            self._commit()
            for frames in answers:
                self.socket.send_multipart(frames)
            self._end_if_left(bool(answers))
        self.close()

    def _end_if_left(self, asked: bool) -> None:
        """Stop if there has been neither a member nor a request for a while."""
        if asked or self.core.ledger.states:
            self._busy = time.monotonic()
        elif self._linger_s and time.monotonic() > self._busy + self._linger_s:
            log.info("no member for %g s", self._linger_s)
            self.stop()

    def _next(self) -> list[bytes] | None:
        """The answer to the next queued request, or None."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) != 3:
            return None
        return [*frames[:2], self._answer(frames[2])]

    def _answer(self, data: bytes) -> bytes:
        try:
            return encode_reply(self.coordinator.handle(read_request(data)))
        except CoordinatorError as error:
            return encode_error(str(error))
        except OSError:  # a full disk, an unreachable object store: nodes repeat their requests after a restart
            raise
        except Exception as error:  # our own fault: one request must not end the training of all nodes
            log.exception("a request failed")
            self._recover()
            return encode_error(failure=f"the coordinator failed ({error!r}): see its log")

    def _recover(self) -> None:
        """Restore the state from the log, as after a restart: a failed request may have changed it in part."""
        self.log.commit(*self.core.drain())  # without the state
        self.coordinator.rounds.publisher.close()
        self._restore(fresh=False)

    def _commit(self) -> None:
        events, lines = self.core.drain()
        self._since += len(events)
        whole = self.core.compact or self._since >= COMPACT_EVERY
        self.log.commit(events, lines, self.core.ledger.to_dict() if whole else None)
        if whole:
            self.core.compact, self._since = False, 0

    def close(self) -> None:
        """Close everything."""
        self._commit()
        self.coordinator.rounds.publisher.close()
        self.socket.close()
        self.log.close()
        end_context(self.context)


def _arguments() -> argparse.Namespace:
    parser = server_parser("training.coordinator.server", "The coordinator of a training.")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the log and coordinator.json")
    parser.add_argument("--fresh", action="store_true", help="start from the newest checkpoint, not from the log")
    parser.add_argument("--linger", type=float, default=0.0, help="end after this many seconds without members")
    return parser.parse_args()


def open_server(
    settings: Settings, folder: Path, listen: str, key_file: Path | None, fresh: bool, linger_s: float = 0.0
) -> CoordinatorServer:
    """A coordinator that listens.

    Args:
        settings: Settings of the training.
        folder: Folder of its log and of `coordinator.json`; it is made.
        listen: HOST:PORT; hosts other than loopback need a key.
        key_file: The ring's key; None for none.
        fresh: Whether it starts from the newest checkpoint instead of the log.
        linger_s: Seconds without members after which it ends; 0 for never.

    Raises:
        ValueError: The address, the key or what is in the folder cannot be used.
    """
    key = RingKey.load(key_file) if key_file else None
    folder.mkdir(parents=True, exist_ok=True)
    return CoordinatorServer(settings, folder, listening_endpoint(listen, folder / NOTE, fresh), key, fresh, linger_s)


def main() -> int:
    """Run the coordinator until SIGTERM or SIGINT."""
    arguments = _arguments()
    if arguments.parent:
        end_with_parent(arguments.parent)
    logs.setup("coordinator")
    try:
        settings = Settings.read(arguments.job)
        server = open_server(
            settings, arguments.folder, arguments.listen, arguments.key_file, arguments.fresh, arguments.linger
        )
    except ValueError as error:  # a user error: CoordinatorError, AddressError, KeyFileError, ShardIndexError, ...
        print(f"the coordinator cannot start: {error}", file=sys.stderr, flush=True)
        return CANNOT_WORK
    on_termination(server.stop)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(run_with_reason(main, CANNOT_WORK))
