"""Files that name a process: after its end, its id may belong to another one, which must be left alone."""

import fcntl
import json
import os
import signal
import subprocess

import pytest

import training.processes.supervision as supervision
import training.ring.folder as folder_module
from storage.locks import LockTimeoutError
from tasks.locking.lock_owner import LockOwner
from training.processes.identity import ProcessIdentity
from training.processes.supervision import ManagedProcess, SupervisorError
from training.ring.config import RingConfig
from training.ring.folder import RingFolder


@pytest.fixture
def stranger():
    """A process that has nothing to do with a ring."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_process_is_known_by_its_start_and_not_by_its_id(stranger):
    known = ProcessIdentity.of(stranger.pid)
    earlier = ProcessIdentity(stranger.pid, known.place, "1")
    elsewhere = ProcessIdentity(stranger.pid, "another machine", known.started)
    assert ProcessIdentity.read(json.loads(json.dumps(vars(known) | {"address": "a:1"}))) == known
    assert (known.alive(), earlier.alive(), elsewhere.alive()) == (True, False, False)
    assert (known.gone(), earlier.gone(), elsewhere.gone()) == (False, True, False)
    assert ProcessIdentity.read({}) == ProcessIdentity.read("1") == ProcessIdentity()
    for other in (earlier, elsewhere, ProcessIdentity.read({"pid": stranger.pid}), ProcessIdentity.read(["x"])):
        assert not other.signal(signal.SIGKILL)
    assert stranger.poll() is None
    assert known.signal(signal.SIGTERM)
    os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its id
    assert (known.alive(), known.gone(), known.signal(signal.SIGTERM)) == (False, True, False)


def test_an_owner_of_a_lock_is_gone_if_its_id_has_another_process(stranger):
    owner = LockOwner.here("nightly")
    assert LockOwner.read(json.loads(json.dumps(vars(owner)))) == owner
    assert not owner.gone()
    known = vars(owner) | {"pid": stranger.pid}
    assert LockOwner.read(known).gone()
    assert not LockOwner.read(known | vars(ProcessIdentity.of(stranger.pid))).gone()


@pytest.mark.parametrize("note", [{}, {"started": "1"}, {"place": "elsewhere", "started": "1"}, None])
def test_ring_signals_no_process_but_its_coordinator(tmp_path, stranger, monkeypatch, note):
    monkeypatch.setattr(folder_module, "END_S", 0.2)
    (tmp_path / "coordinator").mkdir()
    if note is not None:
        note = vars(ProcessIdentity.of(stranger.pid)) | note if "started" in note else {"pid": stranger.pid}
        document = json.dumps({"address": "127.0.0.1:1"} | note)
        (tmp_path / "coordinator" / "coordinator.json").write_text(document)
    with (tmp_path / "coordinator.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LockTimeoutError, match=r"coordinator.lock is held, but not by .* give the ring another"):
            RingFolder(tmp_path, RingConfig()).enter()
    assert stranger.poll() is None


def test_address_of_an_earlier_server_with_the_same_id_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "START_S", 0.3)
    server, note = ManagedProcess("server", ["sleep", "600"], tmp_path / "log", 0), tmp_path / "note.json"
    server.start()
    try:
        known = vars(ProcessIdentity.of(server.process.pid)) | {"address": "127.0.0.1:1"}
        note.write_text(json.dumps(known | {"started": "1"}))
        with pytest.raises(SupervisorError, match="server did not listen"):
            server.address(note)
        monkeypatch.setattr(supervision, "START_S", 240.0)
        note.write_text(json.dumps(known))
        assert server.address(note) == "127.0.0.1:1"
    finally:
        server.process.kill()
        server.process.wait()


def test_coordinator_is_restarted_with_the_configuration_of_its_training(tmp_path):
    first, second = (RingFolder(tmp_path, RingConfig(seed=seed)) for seed in (1, 2))
    note, job = tmp_path / "coordinator" / "coordinator.json", tmp_path / "job.json"
    try:
        first.enter()
        coordinators = [ProcessIdentity.read(json.loads(note.read_text()))]
        assert coordinators[0].signal(signal.SIGKILL)
        os.waitid(os.P_PID, coordinators[0].pid, os.WEXITED | os.WNOWAIT)
        second.enter()
        coordinators.append(ProcessIdentity.read(json.loads(note.read_text())))
        assert coordinators[0].gone()
        assert coordinators[1].alive()
        assert json.loads(job.read_text())["seed"] == 1
        first.close()
        second.close()
        second.enter()  # nobody was left: another training, which ends the last coordinator
        assert coordinators[1].gone()
        assert json.loads(job.read_text())["seed"] == 2
    finally:
        second.close()
        ProcessIdentity.read(json.loads(note.read_text())).signal(signal.SIGKILL)
