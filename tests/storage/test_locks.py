"""Locks between processes: exclusive, released when the owner dies, and with the owner's name."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage import locks
from storage.locks import LockTimeoutError, any_file_lock, file_lock, is_locked, passing_lock

HOLDER = """
import sys, time
from pathlib import Path
from storage.locks import file_lock

with file_lock(Path(sys.argv[1]), wait_s=0):
    print("held", flush=True)
    time.sleep(600)
"""

COUNTER = """
import sys
from pathlib import Path
from storage.locks import file_lock

lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(100):
    with file_lock(lock, wait_s=240, poll_s=0.0002):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def run(code, *arguments, **options):
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=root, text=True, **options)


@pytest.fixture
def lock_owner(tmp_path):
    process = run(HOLDER, tmp_path / "lock", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_process_times_out_with_the_owners_name(tmp_path, lock_owner):
    with (
        pytest.raises(LockTimeoutError, match=f"lock is held by process {lock_owner.pid}: "),
        file_lock(tmp_path / "lock", 0),
    ):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path, lock_owner):
    lock_owner.kill()
    lock_owner.wait()
    with file_lock(tmp_path / "lock", wait_s=0):
        pass


def test_waiting_process_gets_the_lock_when_its_owner_ends(tmp_path, lock_owner):
    entered = threading.Event()

    def wait():
        with file_lock(tmp_path / "lock", wait_s=240, poll_s=0.01):
            entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    assert not entered.is_set()
    lock_owner.kill()
    assert entered.wait(240)
    waiter.join()


def test_no_update_is_lost_between_processes(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [run(COUNTER, tmp_path / "lock", counter) for _ in range(2)]
    assert [process.wait(240) for process in processes] == [0, 0]
    assert counter.read_text() == "200"


def test_lock_excludes_a_second_user_in_the_same_process(tmp_path):
    with (
        file_lock(tmp_path / "lock", 0),
        pytest.raises(LockTimeoutError),
        file_lock(tmp_path / "lock", 0.01, poll_s=0.005),
    ):
        pass


def test_lock_is_free_after_the_block_and_after_an_error(tmp_path):
    path = tmp_path / "new" / "folders" / "lock"
    with pytest.raises(KeyError), file_lock(path, 0):
        raise KeyError
    with file_lock(path, 0):
        pass
    assert path.exists()  # deleting it would let two processes hold "the" lock


def test_different_locks_are_independent(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    with file_lock(a, 0):
        assert (is_locked(a), is_locked(b)) == (True, False)
        with file_lock(b, 0):
            assert (is_locked(a), is_locked(b)) == (True, True)
            for path in (a, b):
                with pytest.raises(LockTimeoutError, match=f"{path.name} is held"), file_lock(path, 0):
                    pass
        assert (is_locked(a), is_locked(b)) == (True, False)
    assert (is_locked(a), is_locked(b)) == (False, False)


def test_only_the_current_owner_is_named(tmp_path):
    for name in ("a former holder with a long name", "the present one"):
        with (
            file_lock(tmp_path / "lock", 0, holder=name),
            pytest.raises(LockTimeoutError, match=f"held by {name}: "),
            file_lock(tmp_path / "lock", 0),
        ):
            pass


def test_first_free_of_several_locks_is_taken(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with any_file_lock(paths, 0, holder="one"):
        assert [is_locked(path) for path in paths] == [True, False]
        with any_file_lock(paths, 0, holder="two"):
            assert [is_locked(path) for path in paths] == [True, True]
            waited = []
            with (
                pytest.raises(LockTimeoutError, match="a and .*b is held by one and two"),
                any_file_lock(paths, 0.02, poll_s=0.005, on_wait=waited.append),
            ):
                pass
            assert set(waited) == {"one and two"}


def test_short_lock_on_a_removed_file_is_taken_again(tmp_path):
    """A process that opened the file while another held it locks a deleted file: a third one has a new file."""
    path = tmp_path / "lock"
    with path.open("a") as former:
        path.unlink()
        assert not locks._hold(former.fileno(), path)
        with passing_lock(path, 0):
            assert not locks._hold(former.fileno(), path)
    with path.open("a") as file:
        assert locks._hold(file.fileno(), path)


def test_only_one_of_many_processes_is_inside_a_short_lock(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    code = COUNTER.replace("file_lock", "passing_lock").replace("wait_s=240, ", "240, ")
    processes = [run(code, tmp_path / "lock", counter) for _ in range(2)]
    assert [process.wait(240) for process in processes] == [0, 0]
    assert counter.read_text() == "200"
