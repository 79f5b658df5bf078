"""Processes of one machine find their ring in a folder: the first one starts the coordinator there.

The coordinator is no child that ends with its parent: any learner may be killed. It holds the lock `coordinator.lock`
while it runs, so that learners notice its death and restart it with its state. Every learner holds a share of
`learners.lock`: if none does, the folder's contents belong to an earlier training, and a new one starts.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from storage.locks import LockTimeoutError, file_lock
from training.coordinator.server import NOTE
from training.processes.identity import ProcessIdentity
from training.processes.keys import RingKey
from training.processes.sockets import read_address
from training.processes.supervision import ManagedProcess
from training.ring.config import RingConfig

LINGER_S = 300.0
"""Seconds without a member after which the coordinator ends."""
LOOK_S = 1.0
"""Seconds between two looks at whether the coordinator is alive."""
END_S = 10.0
"""How long the coordinator of an earlier training may take to end."""
ANNOUNCE_S = 30.0
"""How long a coordinator whose starter was killed may take to announce its address."""
START_S = 120.0
"""How long another process may take to start it."""


def ring_job(folder: Path, config: RingConfig) -> dict[str, object]:
    """The job of a ring's coordinator: it keeps no checkpoints, and learners name their data when they join.

    Args:
        folder: Folder for the journal.
        config: The ring's configuration.
    """
    train: dict[str, object] = {"nodes": 1, "learners_per_node": 1, "epochs": 1, "max_minutes": 0.0}
    train |= {"checkpoint_steps": 0, "checkpoint_keep": 1, "membership": config.membership.model_dump(mode="json")}
    return {
        "run": "ring",
        "seed": config.seed,
        "train": train,
        "task": {"train_url": ""},
        "output_url": str((folder / "output").resolve()),
        "journal": str((folder / "journal.jsonl").resolve()),
    }


class RingFolder:
    """A folder in which the learners of one machine find each other.

    Args:
        folder: The folder; created if missing.
        config: The ring's configuration.
    """

    def __init__(self, folder: Path, config: RingConfig) -> None:
        self._folder, self._config = folder, config
        self.key_file = folder / "ring.key"
        self._learner: int | None = None
        """Descriptor of the lock that says that a learner is here."""
        self._next_look = 0.0

    def enter(self) -> str:
        """Start the coordinator unless it runs, and return its address.

        Raises:
            LockTimeoutError: If another process takes too long to start it, or to end that of an earlier training.
            SupervisorError: If it does not start.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + ANNOUNCE_S
        with file_lock(self._folder / "start.lock", START_S):
            while True:
                self._start_if_dead()
                if self._learner is None:
                    self._learner = os.open(self._folder / "learners.lock", os.O_RDWR | os.O_CREAT, 0o644)
                    fcntl.flock(self._learner, fcntl.LOCK_SH)
                # a coordinator whose starter was killed may not have replaced an earlier one's note yet
                if (address := read_address(self._note)) is not None and not self._coordinator().gone():
                    return address
                if time.monotonic() > deadline:
                    raise self._stranger()
                time.sleep(0.05)

    @property
    def _note(self) -> Path:
        return self._folder / "coordinator" / NOTE

    def _coordinator(self) -> ProcessIdentity:
        """The process that the coordinator's note names."""
        try:
            return ProcessIdentity.read(json.loads(self._note.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return ProcessIdentity()

    def _stranger(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"{self._folder / 'coordinator.lock'} is held, but not by the coordinator that {self._note} names: end the "
            "process that holds it (`fuser` names it), or give the ring another folder"
        )

    def revive(self) -> None:
        """Restart the coordinator with its state if it has died; looks once in a while."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self.enter()

    def close(self) -> None:
        """Leave the folder."""
        if self._learner is not None:
            os.close(self._learner)
            self._learner = None

    def _start_if_dead(self) -> None:
        deserted = self._deserted()
        with (self._folder / "coordinator.lock").open("a") as file:
            if not _locked(file):
                if not deserted:
                    return
                self._end_previous(file)
            # held from now on by the coordinator, which inherits it
            self._start(file.fileno(), fresh=deserted)

    def _end_previous(self, lock: TextIO) -> None:
        """End the coordinator of an earlier training, whose learners have all ended.

        The note may name another process: if its writer was killed, or the coordinator has not announced itself yet.
        """
        deadline, ended = time.monotonic() + END_S, ProcessIdentity()
        while not _locked(lock):
            if (process := self._coordinator()) != ended and process.signal(signal.SIGTERM):
                ended = process
            if time.monotonic() > deadline:
                if ended.alive():
                    raise LockTimeoutError(
                        f"{self._folder} has a coordinator that does not end: kill process {ended.pid}"
                    )
                raise self._stranger()
            time.sleep(0.05)

    def _deserted(self) -> bool:
        with (self._folder / "learners.lock").open("a") as file:
            return _locked(file)

    def _start(self, lock: int, fresh: bool) -> None:
        if not self.key_file.exists():
            RingKey.generate().save(self.key_file)
        job, place = self._folder / "job.json", self._note.parent
        if fresh or not job.exists():  # else the configuration stays that of the process that started the training
            job.write_text(json.dumps(ring_job(self._folder, self._config)), encoding="utf-8")
        words = ["--folder", str(place), "--job", str(job), "--listen", "127.0.0.1:0"]
        words += ["--key-file", str(self.key_file), "--linger", str(LINGER_S), *(["--fresh"] if fresh else [])]
        command = [sys.executable, "-m", "training.coordinator.server", *words]
        log = self._folder / "coordinator.log"
        process = ManagedProcess("coordinator", command, log, restarts=0, lock=lock, detached=True)
        process.start()
        process.address(self._note)


def _locked(file: TextIO) -> bool:
    """Try to lock an open file until it is closed; returns whether it succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
