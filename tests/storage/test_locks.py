"""Locks between processes: exclusive, freed by death, and honest about who holds them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage.locks import LockTimeoutError, file_lock

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
    with file_lock(lock, wait_s=60, poll_s=0.0002):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def run(code, *arguments, **options):
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=root, text=True, **options)


@pytest.fixture
def holder(tmp_path):
    process = run(HOLDER, tmp_path / "lock", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_waits_in_vain_and_learns_who_holds_it(tmp_path, holder):
    with (
        pytest.raises(LockTimeoutError, match=f"lock is held by process {holder.pid}: "),
        file_lock(tmp_path / "lock", 0),
    ):
        pass


def test_a_killed_holder_frees_it(tmp_path, holder):
    holder.kill()
    holder.wait()
    with file_lock(tmp_path / "lock", wait_s=0):
        pass


def test_it_is_taken_as_soon_as_the_holder_ends(tmp_path, holder):
    entered = threading.Event()

    def wait():
        with file_lock(tmp_path / "lock", wait_s=60, poll_s=0.01):
            entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    assert not entered.is_set()
    holder.kill()
    assert entered.wait(30)
    waiter.join()


def test_no_update_is_lost_between_processes(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [run(COUNTER, tmp_path / "lock", counter) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert counter.read_text() == "200"


def test_it_excludes_a_second_user_in_the_same_process(tmp_path):
    with (
        file_lock(tmp_path / "lock", 0),
        pytest.raises(LockTimeoutError),
        file_lock(tmp_path / "lock", 0.01, poll_s=0.005),
    ):
        pass


def test_it_is_free_after_the_block_and_after_an_error_in_it(tmp_path):
    path = tmp_path / "new" / "folders" / "lock"
    with pytest.raises(KeyError), file_lock(path, 0):
        raise KeyError
    with file_lock(path, 0):
        pass
    assert path.exists()  # deleting it would let two processes hold "the" lock


def test_different_locks_do_not_meet(tmp_path):
    with file_lock(tmp_path / "a", 0), file_lock(tmp_path / "b", 0):
        pass
