"""A training that runs while a test kills or stops its processes: start it, find its processes, wait for epochs."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import forks
from support import environment, processes_naming, slow_nodes, wait_until
from tones import train

from training.coordinator.journal import read_journal
from training.launch.training_process import TrainingFailedError

SLOW = 4
"""Each learner so many times slower: an epoch takes half a second or more."""
QUICK = {"beat_s": 0.2, "dead_after_s": 3.0, "start_patience_s": 60.0, "coordinator_grace_s": 5.0}


class Running:
    """A training under way in a thread, and its processes."""

    def __init__(self, job, slow=SLOW, **nodes):
        self.job, self.folder = job, job.journal.parent
        self._env = slow_nodes({str(number): slow for number in range(job.train.nodes)} | nodes)
        self.trained = self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        forks.THREADS.add(self._thread)

    def _run(self):
        try:
            self.trained = train(self.job)
        except TrainingFailedError as error:
            self.error = error

    def __enter__(self):
        self._stack = environment(**self._env, OMP_NUM_THREADS="1")
        self._stack.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_):
        try:
            self._thread.join(5)
            for pid in processes_naming(str(self.folder)) if self._thread.is_alive() else ():
                send_signal(pid, signal.SIGKILL)
        finally:
            self._stack.__exit__(None, None, None)

    def finish(self, patience_s=400):
        """Wait for the end; the finished training."""
        self._thread.join(patience_s)
        assert not self._thread.is_alive(), "the training does not end"
        if self.error:
            raise self.error
        return self.trained

    def entries(self, kind):
        return [entry for entry in read_journal(self.job.journal) if entry["kind"] == kind]

    def wait_for_epoch(self, epochs, patience_s=240):
        """Wait until a number of epochs are closed."""
        wait_until(lambda: len(self.entries("epoch")) >= epochs or not self._thread.is_alive(), patience_s, 0.05)
        assert self._thread.is_alive(), f"the training ended too early: {self.error}"

    def processes(self, module, node=None):
        """Process numbers of a module of this training, and of one node."""
        pids = []
        for pid in processes_naming(str(self.folder)):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if module in words and (node is None or any(f"node-{node:03d}" in word for word in words)):
                pids.append(int(pid))
        return pids

    def learner(self, node):
        """The process number of a node's only rank."""
        return wait_until(lambda: self.processes("training.node.rank", node))[0]


def send_signal(pid, number):
    with suppress(ProcessLookupError):
        os.kill(int(pid), number)
