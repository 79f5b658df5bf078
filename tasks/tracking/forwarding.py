"""Forwards the training journal to MLflow during training; an outage of MLflow does not delay the training.

The journal is authoritative, MLflow has a copy. A thread reads new lines every few seconds and sends them in requests
of bounded size. The number of journal bytes that MLflow has acknowledged is stored in a small file beside the journal;
after an outage, a restart or a resume the sender continues from there, and the register stage sends the rest. A request
whose acknowledgement is lost is sent again: its points are equal, and MLflow stores equal points once.
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

from configurable.files import replace_file
from storage.locks import file_lock
from tasks.tracking.metrics import MetricPoint, Translator, closing_points
from tasks.tracking.runs import TrainingRun, client, end_run, impatient, open_training_run, status_after, ui_links
from training.coordinator.journal import parse_lines, read_journal

POINTS_PER_CALL = 1000
"""MLflow's limit."""
_READ_BYTES = 1 << 20
_REQUEST_S, _LONGEST_REQUEST_S = 10, 80
_LEAST_POINTS = 50
_SLOWEST_S = 15.0
_CONNECT_S = 60.0
_ABANDON_S = 2.0
"""Seconds that a stage which failed waits for MLflow."""
_log = logging.getLogger(__name__)


@dataclass
class Acknowledged:
    """Persistent record of the part of a journal that MLflow has acknowledged."""

    training: str
    """Identity of the training."""
    run_id: str = ""
    """Id of the MLflow run."""
    bytes: int = 0
    """Number of journal bytes whose points are acknowledged."""

    @classmethod
    def load(cls, path: Path, training: str) -> "Acknowledged":
        """Load the record; nothing is acknowledged if the file is missing, invalid, or of another training."""
        try:
            known = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(training)
        return known if known.training == training else cls(training)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        replace_file(path, json.dumps(asdict(self)).encode())


class Sender:
    """Sends a journal's points to the MLflow run of its training, in order, and records what is acknowledged.

    Args:
        journal: The journal; it may still grow.
        note: File that records what is acknowledged.
        about: The training.
        connect: Returns a client.
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
        """Id of the MLflow run; empty before there is one."""
        return self.known.run_id if self._api else ""

    @property
    def links(self) -> dict[str, str]:
        """URLs of MLflow's pages of the run; empty before there is one, or if MLflow is not a server."""
        return self._links

    def _rewind(self) -> None:
        self._translator = Translator(self.about.learner_metrics)
        self._read = 0
        self._lines: deque[tuple[int, list[MetricPoint]]] = deque()

    def open(self) -> mlflow.MlflowClient:
        """Connect, and find or create the run.

        Raises:
            MlflowException: If MLflow cannot be reached.
            LockTimeoutError: If another sender of this training has been connecting for a minute.
        """
        if self._api is None:
            api = self._connect()
            # the register stage does not wait for a forwarder that is slow to connect: both would create a run
            with file_lock(self.note.with_suffix(".lock"), _CONNECT_S):
                run = open_training_run(api, self.about, self.known.run_id)
                if run.info.run_id != self.known.run_id:
                    self.known = Acknowledged(self.about.training, str(run.info.run_id))
                    self._rewind()
                    self.known.save(self.note)
            # MLflow's time, so that points that are sent again are equal
            self._api, self._start_ms = api, int(run.info.start_time)
            self._links = ui_links(run)
        return self._api

    def send(self) -> bool:
        """Send one request with new points.

        Returns:
            Whether there may be more to send now.

        Raises:
            MlflowException: If MLflow does not accept it; call again later.
        """
        api = self.open()
        if not self._lines:
            self._fill()
        taken: list[tuple[int, list[MetricPoint]]] = []
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
            # a server that is too slow for this request would stay too slow for it
            self._bound = max(_LEAST_POINTS, self._bound // 2)
            raise
        self._bound = min(POINTS_PER_CALL, 2 * self._bound)
        self.known.bytes = taken[-1][0]
        self.known.save(self.note)
        return True

    def drain(self) -> None:
        """Send the rest of the journal, and the closing points.

        Raises:
            MlflowException: If MLflow does not accept them.
        """
        while self.send():
            pass
        if self.journal.exists():
            self._log(self.open(), closing_points(self._translator, read_journal(self.journal)))

    def end(self, status: str, reason: str = "") -> None:
        """Set the run's final status: FINISHED, FAILED or KILLED, with the reason if it was stopped."""
        end_run(self.open(), self.known.run_id, status, reason)

    def forget_connection(self) -> None:
        """Reconnect, and look for the run again, at the next request; for use after an error."""
        self._api = None

    def _fill(self) -> None:
        """Translate new journal lines, up to a bounded amount; points that are acknowledged are skipped."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        if size < max(self._read, self.known.bytes):  # the journal was started again
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

    def _log(self, api: mlflow.MlflowClient, points: list[MetricPoint]) -> None:
        metrics = [Metric(p.name, p.value, self._start_ms + p.at_ms, p.step) for p in points]
        for start in range(0, len(metrics), self._bound):
            api.log_batch(self.known.run_id, metrics=metrics[start : start + self._bound])


class Forwarder:
    """A thread that forwards the journal during training. Errors of MLflow are recorded, never raised.

    Args:
        sender: The sender; only the thread uses it.
        every_s: Seconds between reads of the journal.
    """

    def __init__(self, sender: Sender, every_s: float = 3.0) -> None:
        self.trouble = ""
        """Last error of MLflow; empty after a success."""
        self._sender, self._every_s = sender, every_s
        self._status = self._reason = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="forward", daemon=True)

    @property
    def links(self) -> dict[str, str]:
        """URLs of MLflow's pages of the training."""
        return self._sender.links

    def __enter__(self) -> "Forwarder":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status, reason = status_after(kind)
        self.stop(status, _ABANDON_S if kind else 2.0 * _REQUEST_S, reason)

    def stop(self, status: str, patience_s: float, reason: str = "") -> bool:
        """Send the rest, if MLflow accepts it within the time limit.

        Args:
            status: Final status of the MLflow run.
            patience_s: Time limit; a request that hangs longer is abandoned.
            reason: Why the training was stopped, if it was.

        Returns:
            Whether everything was sent.
        """
        self._status, self._reason = status, reason
        self._stop.set()
        self._thread.join(patience_s)
        return not self._thread.is_alive() and not self.trouble

    def _work(self) -> None:
        wait_s, request_s = self._every_s, _REQUEST_S
        while not self._stop.wait(wait_s):
            with impatient(request_s):
                done = self._try(self._send_all)
            wait_s = self._every_s if done else min(_SLOWEST_S, 2 * wait_s)
            # a server that is too slow for this time limit would stay too slow for it
            request_s = _REQUEST_S if done else min(_LONGEST_REQUEST_S, 2 * request_s)
        with impatient(request_s):
            self._try(self._finish)

    def _send_all(self) -> None:
        while not self._stop.is_set() and self._sender.send():
            self.trouble = ""  # a long backlog may take a slow server minutes, but it accepts requests again

    def _finish(self) -> None:
        self._sender.drain()
        self._sender.end(self._status, self._reason)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # after any error of MLflow, the journal still has everything
            reason = error.message if isinstance(error, MlflowException) else str(error)
            if not self.trouble:
                # the rest of SQLAlchemy's message is the statement and its values
                cause = reason.partition("\n[SQL")[0]
                _log.warning("MLflow does not accept metrics at present, they wait in the journal: %s", cause)
            self.trouble = f"{type(error).__name__}: {reason}"[:300]
            self._sender.forget_connection()
            return False
        self.trouble = ""
        return True


def send_rest(journal: Path, note: Path, about: TrainingRun) -> str:
    """Send what a forwarder could not send; for the register stage, which requires MLflow.

    Returns:
        Id of the MLflow run.

    Raises:
        MlflowException: If MLflow does not accept it.
        LockTimeoutError: If the training's forwarder has been connecting for a minute.
    """
    sender = Sender(journal, note, about)
    sender.drain()
    return sender.run_id
