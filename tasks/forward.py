"""Forwards the training journal to MLflow while training runs; MLflow may be away, hang or die: nothing waits for it.

The journal is the truth, MLflow a copy of it. A thread reads what is new every few seconds and sends it in calls of
bounded size. What MLflow has acknowledged is noted in a small file beside the journal, as the number of the journal's
bytes; after an outage, a restart or a resume the sender goes on from there, and the register stage sends what is left.
A call whose acknowledgement got lost is sent again: its points are the same, and MLflow keeps equal points once.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import mlflow
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from storage.locks import file_lock
from tasks.metrics import Point, Translator, closing_points
from tasks.tracking import TrainingRun, client, impatient, open_training_run, ui_links
from training.journal import parse_lines, read_journal

POINTS_PER_CALL = 1000
"""MLflow's own bound."""
_READ_BYTES = 1 << 20
_REQUEST_S, _LONGEST_REQUEST_S = 10, 80
_LEAST_POINTS = 50
_SLOWEST_S = 15.0
_log = logging.getLogger(__name__)


@dataclass
class Acknowledged:
    """What MLflow has taken of a journal; survives this process."""

    training: str
    """Identity of the training."""
    run_id: str = ""
    """MLflow's run."""
    bytes: int = 0
    """Bytes of the journal whose points have been acknowledged."""

    @classmethod
    def load(cls, path: Path, training: str) -> "Acknowledged":
        """What a file says of a training; nothing acknowledged if it says nothing, or speaks of another training."""
        try:
            known = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(training)
        return known if known.training == training else cls(training)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(path)


class Sender:
    """Sends a journal's points to the MLflow run of its training, in order, and notes what has been taken.

    Args:
        journal: The journal; it may still grow.
        note: File that keeps what was acknowledged.
        about: The training.
        connect: Gives a client.
    """

    def __init__(
        self, journal: Path, note: Path, about: TrainingRun, connect: Callable[[], mlflow.MlflowClient] = client
    ) -> None:
        self.journal, self.note, self.about = journal, note, about
        self._connect = connect
        self._api: mlflow.MlflowClient | None = None
        self._start_ms = 0
        self._bound = POINTS_PER_CALL
        self.known = Acknowledged.load(note, about.training)
        self._links: dict[str, str] = {}
        self._rewind()

    @property
    def run_id(self) -> str:
        """MLflow's run; empty before there is one."""
        return self.known.run_id if self._api else ""

    @property
    def links(self) -> dict[str, str]:
        """Addresses of MLflow's pages of the run; none before there is one, or where MLflow is no server."""
        return self._links

    def _rewind(self) -> None:
        self._translator = Translator()
        self._read = 0
        self._lines: deque[tuple[int, list[Point]]] = deque()

    def open(self) -> mlflow.MlflowClient:
        """Find or make the run.

        Raises:
            MlflowException: If MLflow cannot be reached.
        """
        if self._api is None:
            api = self._connect()
            run = open_training_run(api, self.about, self.known.run_id)
            if run.info.run_id != self.known.run_id:
                self.known = Acknowledged(self.about.training, str(run.info.run_id))
                self._rewind()
                self.known.save(self.note)
            # from MLflow, so that a point that is sent again has the same time
            self._api, self._start_ms = api, int(run.info.start_time)
            self._links = ui_links(run)
        return self._api

    def send(self) -> bool:
        """Make one call with what is new.

        Returns:
            Whether there may be more to send right now.

        Raises:
            MlflowException: If MLflow does not take it; call again later.
        """
        api = self.open()
        if not self._lines:
            self._fill()
        taken: list[tuple[int, list[Point]]] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0][1]) <= self._bound):
            taken.append(self._lines.popleft())
            size += len(taken[-1][1])
        if not taken:
            return False
        try:
            self._log(api, [point for _, points in taken for point in points])
        except BaseException:
            self._lines.extendleft(reversed(taken))
            # a server that is too slow for a call would be too slow for it for ever
            self._bound = max(_LEAST_POINTS, self._bound // 2)
            raise
        self._bound = min(POINTS_PER_CALL, 2 * self._bound)
        self.known.bytes = taken[-1][0]
        self.known.save(self.note)
        return True

    def drain(self) -> None:
        """Send everything that the journal has, and what makes the last values right.

        Raises:
            MlflowException: If MLflow does not take it.
        """
        while self.send():
            pass
        if self.journal.exists():
            self._log(self.open(), closing_points(self._translator, read_journal(self.journal)))

    def end(self, status: str) -> None:
        """Give the run its status: FINISHED, FAILED or KILLED."""
        self.open().set_terminated(self.known.run_id, status)

    def forget_connection(self) -> None:
        """After trouble: look for the run again at the next call."""
        self._api = None

    def _fill(self) -> None:
        """Translate what is new in the journal, up to a bounded amount; what was acknowledged is passed over."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        if size < max(self._read, self.known.bytes):  # it was restarted
            self._rewind()
            self.known.bytes = 0
        while self._read < size and not self._lines:
            with self.journal.open("rb") as file:
                file.seek(self._read)
                data = file.read(_READ_BYTES)
                if b"\n" not in data:
                    data += file.readline()
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            if not lines:
                return
            for line in lines:
                self._read += len(line)
                points = [
                    point
                    for entry in parse_lines([line.decode("utf-8", errors="replace")])
                    for point in self._translator.feed(entry)
                ]
                if self._read > self.known.bytes:
                    self._lines.append((self._read, points))

    def _log(self, api: mlflow.MlflowClient, points: list[Point]) -> None:
        metrics = [Metric(p.name, p.value, self._start_ms + p.at_ms, p.step) for p in points]
        for start in range(0, len(metrics), self._bound):
            api.log_batch(self.known.run_id, metrics=metrics[start : start + self._bound])


class Forwarder:
    """A thread that sends while training runs. Trouble with MLflow is noted, never raised.

    Args:
        sender: What to send with; only the thread uses it.
        every_s: Seconds between looks into the journal.
    """

    def __init__(self, sender: Sender, every_s: float = 3.0) -> None:
        self.trouble = ""
        """Why MLflow does not take anything at present; empty if it does."""
        self._sender, self._every_s = sender, every_s
        self._status = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="forward", daemon=True)

    @property
    def links(self) -> dict[str, str]:
        """Addresses of MLflow's pages of the training."""
        return self._sender.links

    def __enter__(self) -> "Forwarder":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop("FINISHED", 2.0 * _REQUEST_S)
        else:
            self.stop("FAILED" if issubclass(kind, Exception) else "KILLED", 2.0)

    def stop(self, status: str, patience_s: float) -> bool:
        """Send what is left, if MLflow takes it within the given time.

        Args:
            status: Of MLflow's run from now on.
            patience_s: How long to wait; a call that still hangs then is left to itself.

        Returns:
            Whether everything has been sent.
        """
        self._status = status
        self._stop.set()
        self._thread.join(patience_s)
        return not self._thread.is_alive() and not self.trouble

    def _work(self) -> None:
        wait_s, request_s = self._every_s, _REQUEST_S
        while not self._stop.wait(wait_s):
            with impatient(request_s):
                done = self._try(self._send_all)
            wait_s = self._every_s if done else min(_SLOWEST_S, 2 * wait_s)
            # a server that is too slow for a bound would be too slow for it for ever
            request_s = _REQUEST_S if done else min(_LONGEST_REQUEST_S, 2 * request_s)
        with impatient(request_s):
            self._try(self._finish)

    def _send_all(self) -> None:
        while not self._stop.is_set() and self._sender.send():
            pass

    def _finish(self) -> None:
        self._sender.drain()
        self._sender.end(self._status)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # on any error of MLflow: the journal keeps everything
            reason = error.message if isinstance(error, MlflowException) else str(error)
            if not self.trouble:
                # the rest of what SQLAlchemy says are the statement and its values
                said = reason.partition("\n[SQL")[0]
                _log.warning("MLflow takes no metrics at present, they wait in the journal: %s", said)
            self.trouble = f"{type(error).__name__}: {reason}"[:300]
            self._sender.forget_connection()
            return False
        self.trouble = ""
        return True


def send_rest(journal: Path, note: Path, about: TrainingRun, patience_s: float = 60.0) -> str:
    """Send what a forwarder could not; for the register stage, which needs MLflow anyway.

    Returns:
        Id of MLflow's run.

    Raises:
        MlflowException: If MLflow does not take it.
    """
    with file_lock(note.with_suffix(".lock"), patience_s):
        sender = Sender(journal, note, about)
        sender.drain()
        return sender.run_id
