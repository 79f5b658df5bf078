"""Finds a training to watch, by its folder on this machine or through its coordinator; read-only."""

import json
import re
import time
from pathlib import Path
from typing import Any, Protocol

from storage.locks import is_locked
from tasks.config.home import home
from tasks.stages.config_check import check_key_file
from tasks.tracking.training_view import TrainingView
from training.coordinator.client import CoordinatorClient
from training.coordinator.journal import JournalTail, parse_lines
from training.coordinator.messages import (
    CoordinatorFailedError,
    CoordinatorUnreachableError,
    JournalRequest,
    JsonObject,
    StatusRequest,
)
from training.processes.keys import RingKey

_ANSWER_S = 2.0
_LOCAL_ANSWER_S = 0.5
_ASK_AGAIN_S = 10.0
GONE_S = 30.0
"""Seconds without an answer after which a coordinator counts as ended."""


class WatchError(ValueError):
    """There is no such training."""


class WatchedTraining(Protocol):
    """A training that is being watched."""

    name: str
    """Name for the display."""
    view: TrainingView
    coordinator: JsonObject | None
    """The coordinator's last answer to `status`; None if it does not answer."""
    trouble: str
    """Error message while the training cannot be reached; else empty."""

    def poll(self) -> bool:
        """Read news of the training; returns whether it still runs."""

    def close(self) -> None:
        """Close connections."""


class LocalTraining:
    """A training whose folder is on this machine.

    Args:
        folder: Folder with `journal.jsonl`, as written by the train stage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.view = folder, TrainingView()
        self.name = training_name(folder)
        self.coordinator: JsonObject | None = None
        self.trouble = ""
        self._tail = JournalTail(folder / "journal.jsonl")
        self._client: CoordinatorClient | None = None
        self._address = ""
        self._not_before = 0.0

    def poll(self) -> bool:
        """Read new journal lines; returns whether the training still runs."""
        running = is_running(self.folder)  # before the journal, so that its last lines are read
        for entry in self._tail.new_entries():
            self.view.feed(entry)
        if running and time.monotonic() >= self._not_before:
            self._ask()
        return running

    def _ask(self) -> None:
        """Ask the coordinator for its status, which is optional: the journal has everything but the leases."""
        try:
            address = str(_read_json(self.folder / "coordinator.json").get("address", ""))
            if address != self._address:
                self.close()
                self._address = address
            if self._client is None and address:
                self._client = CoordinatorClient(address, _key_of(self.folder))
            if self._client is not None:
                self.coordinator = self._client.request(StatusRequest(), _LOCAL_ANSWER_S).model_dump()
        except (ValueError, CoordinatorUnreachableError, CoordinatorFailedError):
            self.coordinator, self._not_before = None, time.monotonic() + _ASK_AGAIN_S

    def close(self) -> None:
        """Close the connection to the coordinator."""
        if self._client is not None:
            self._client.close()
            self._client = None


class RemoteTraining:
    """A training that is watched through its coordinator.

    Args:
        address: HOST:PORT of the coordinator.
        key_file: File of the ring's key.
        gone_s: Seconds without an answer after which the training counts as ended.

    Raises:
        ValueError: If the address or the key file is invalid.
    """

    def __init__(self, address: str, key_file: Path | None, gone_s: float = GONE_S) -> None:
        self.name, self.view = address, TrainingView()
        self.coordinator: JsonObject | None = None
        self.trouble = ""
        if key_file is not None:
            check_key_file(key_file, "--key-file")
        self._client = CoordinatorClient(address, RingKey.load(key_file) if key_file else None)
        self._offset = 0
        self._gone_s, self._heard = gone_s, time.monotonic()

    def poll(self) -> bool:
        """Fetch new journal lines and the status; returns whether the training still runs.

        Raises:
            CoordinatorError: If the coordinator refuses the request, because it is of another version.
        """
        try:
            self._read()
            status = self._client.request(StatusRequest(), _ANSWER_S)
        except (CoordinatorUnreachableError, CoordinatorFailedError) as error:
            self.trouble = str(error)
            return time.monotonic() - self._heard < self._gone_s
        self.coordinator, self.trouble, self._heard = status.model_dump(), "", time.monotonic()
        return not (status.finish and (status.result is not None or not status.members))

    def _read(self) -> None:
        while True:
            portion = self._client.request(JournalRequest(offset=self._offset), _ANSWER_S)
            self._offset = portion.end
            for entry in parse_lines(portion.text.splitlines()):
                self.view.feed(entry)
            if not portion.text:
                return

    def close(self) -> None:
        """Close the connection to the coordinator."""
        self._client.close()


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _key_of(folder: Path) -> RingKey | None:
    train = _read_json(folder / "job.json").get("train", {})
    given = str(train.get("launch", {}).get("key_file", ""))
    path = Path(given).expanduser() if given else folder / "ring.key"
    return RingKey.load(path) if given or path.exists() else None


def is_running(folder: Path) -> bool:
    """Whether the training in a folder is running."""
    return is_locked(folder / "training.lock")


def _configuration(folder: Path) -> str:
    """Name of a training's configuration; empty if its job does not tell."""
    part: Any = _read_json(folder / "job.json")
    for name in ("task", "spec", "provenance", "name"):
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, str) else ""


def training_name(folder: Path) -> str:
    """Name of the configuration and of the folder."""
    name = _configuration(folder)
    return f"{name} ({folder.name})" if name else folder.name


def trainings(data: Path) -> list[Path]:
    """Folders of all trainings in a data folder, most recent first."""
    folders = [path.parent for path in (data / "work").glob("train-*/journal.jsonl")]
    return sorted(folders, key=lambda folder: (folder / "journal.jsonl").stat().st_mtime, reverse=True)


def find_training(target: str, key_file: Path | None = None) -> WatchedTraining:
    """Find a training.

    Args:
        target: A training's folder, a data folder, HOST:PORT of a coordinator, the configuration's name or the first
            digits of the training's key; empty for the one that runs in the default data folder.
        key_file: File of the ring's key, for HOST:PORT.

    Raises:
        WatchError: If there is none, or if several are running.
    """
    if re.fullmatch(r"(\S+|\[\S+\]):\d{1,5}", target) and not Path(target).exists():
        return RemoteTraining(target, key_file)
    if key_file is not None:
        raise WatchError(
            "--key-file is for a remote coordinator (HOST:PORT); leave it out, since the training's folder has the key"
        )
    folder = Path(target).expanduser() if target else home()
    if (folder / "journal.jsonl").is_file():
        return LocalTraining(folder)
    data, known = folder, trainings(folder)
    # A folder of recordings may have the configuration's name; only a data folder has trainings.
    if target and not known and not (folder.is_dir() and len(Path(target).parts) > 1):
        data = home()
        known = trainings(data)
        named = [training for training in known if _means(training, target)]
        if not named:
            raise WatchError(
                f"{target!r} is neither a folder of a training, nor HOST:PORT, nor a training in {data}{_last(known)}"
            )
        return LocalTraining(next((training for training in named if is_running(training)), named[0]))
    running = [training for training in known if is_running(training)]
    if len(running) == 1:
        return LocalTraining(running[0])
    if running:
        raise WatchError(f"{len(running)} trainings are running in {data}: name one{_list(running)}")
    raise WatchError(f"no training is running in {data}: give a training's folder or name, or HOST:PORT{_last(known)}")


def _means(folder: Path, target: str) -> bool:
    key, start = (name.removeprefix("train-") for name in (folder.name, target))
    return target == _configuration(folder) or key.startswith(start)


def _list(folders: list[Path]) -> str:
    return "".join(f"\n  {training_name(folder)}" for folder in folders[:5])


def _last(folders: list[Path]) -> str:
    return f". The last ones there:{_list(folders)}" if folders else ""
