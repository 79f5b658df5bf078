"""On a full disk half a line was written, the next line was appended to it, and an epoch's entry was lost.

Where a small file system cannot be mounted, a limit on file sizes simulates the full disk.
"""

import errno
import json
import os
import resource
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small_disk

from training.coordinator import event_log as store_log
from training.coordinator.event_log import EventLog
from training.coordinator.journal import Journal, JournalTail, LineFile, read_journal
from training.coordinator.node_client import JournalSpool


@contextmanager
def file_size_limit(path, more):
    """Limit the files of this process to the size of `path` and `more` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """Replaces `os.write` as on a disk with `left` bytes free; short writes precede the error, as on a real disk."""

    def __init__(self, draws, only=None):
        self.left, self.draws, self.only, self.real = 0, draws, only, os.write

    def write(self, fd, data):
        if self.only not in (None, fd):
            return self.real(fd, data)
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        short = self.draws.pop() if self.draws else len(data)
        done = self.real(fd, bytes(data)[: max(1, min(short, self.left, len(data)))])
        self.left -= done
        return done


def entry(number, size=10):
    return {"kind": "step", "step": number, "text": "x" * size}


def steps(path):
    """Steps in the journal, every line of which must be whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line)["step"] for line in data.splitlines()]


def sent_steps(spool):
    """Steps of the lines that a spool sends, each acknowledged at once."""
    steps = []
    while portions := spool.portions():
        steps += [line["step"] for line in portions[0].lines]
        spool.arrived({portions[0].name: portions[0].end})
    return steps


def test_journal_on_full_disk_has_only_whole_lines(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(**entry(1))
    with file_size_limit(path, 30):
        for number in (2, 3):
            with pytest.raises(OSError, match="large"):
                journal.write(**entry(number))
        assert steps(path) == [1]
    journal.write(**entry(4))
    journal.close()
    assert steps(path) == [1, 4]


def test_coordinator_writes_waiting_journal_lines_once_space_is_free(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_log, "RETRY_S", 0.0)
    path = tmp_path / "j" / "journal.jsonl"
    log = EventLog(tmp_path / "db", path)
    log.commit([], [entry(1)])
    disk = Disk([], only=log.journal._file._fd)  # the database is on another disk
    disk.left = 70
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        log.commit([{"event": "a"}], [entry(2), entry(3), entry(3)])
        log.commit([{"event": "b"}], [entry(4)])
        assert steps(path) == [1, 2]
        copy = tmp_path / "killed"
        copy.mkdir()
        for name in ("db", "db-wal"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
        (copy / "journal.jsonl").write_bytes(path.read_bytes() + b'{"half')
    log.commit([], [])
    assert steps(path) == [1, 2, 3, 3, 4]
    log.commit([{"event": "c"}], [entry(5)])
    log.close()
    assert steps(path) == [1, 2, 3, 3, 4, 5]
    assert caplog.text.count("cannot be written") == 1
    # killed while lines waited: the restarted coordinator writes them
    for _ in range(2):
        again = EventLog(copy / "db", copy / "journal.jsonl")
        assert again.load()[1] == [{"event": "a"}, {"event": "b"}]
        again.close()
        assert steps(copy / "journal.jsonl") == [1, 2, 3, 3, 4]


def test_spool_sends_lines_that_its_disk_cannot_hold(tmp_path):
    spool = JournalSpool(tmp_path, "s", "a")
    spool.write(entry(1))
    (file,) = tmp_path.glob("*.jsonl")
    with file_size_limit(file, 20):
        spool.write(entry(2))
        spool.write(entry(3))
        assert sent_steps(spool) == [1, 2, 3]
        spool.write(entry(4))
    assert sent_steps(spool) == [4]
    spool.write(entry(5))
    assert sent_steps(spool) == [5]
    spool.close()
    assert steps(file) == [1, 2, 3, 4, 5]


def test_lines_dropped_by_a_spool_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("training.coordinator.node_client.MOST_WAITING", 120)
    spool = JournalSpool(tmp_path, "s", "a")
    (file,) = tmp_path.glob("*.jsonl")
    with file_size_limit(file, 20):
        for number in range(6):
            spool.write(entry(number))
    assert sent_steps(spool) == [0, 1]
    assert "4 journal lines are lost" in caplog.text
    spool.close()


REFUSED: list[int] = []
"""How often the disk was full in each example below."""
SPACE = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 4)), min_size=12, max_size=30)


@settings(max_examples=40)
@given(SPACE, st.lists(st.integers(1, 40), min_size=40, max_size=80))
def test_lines_stay_whole_and_ordered_under_short_writes(tmp_path_factory, rounds, draws):
    """With changing free space, readers never see half a line, and no line is written twice."""
    folder = tmp_path_factory.mktemp("short")
    disk, number, told = Disk([*draws]), 0, []
    file, waiting, refused = LineFile(folder / "lines"), b"", 0
    tail = JournalTail(folder / "lines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        for space, lines in rounds:
            disk.left += space
            for _ in range(lines):
                number += 1
                waiting += (json.dumps(entry(number)) + "\n").encode()
            before = len(waiting)
            waiting = waiting[file.append(waiting) :]
            refused += bool(waiting)
            assert bool(waiting) == (file.trouble is not None)
            assert len(waiting) < before or not space or waiting
            told += [entry["step"] for entry in tail.new_entries()]
            if space % 7 == 0:  # killed, and started again
                file.close()
                file = LineFile(folder / "lines")
        disk.left = len(waiting)
        assert file.append(waiting) == len(waiting)
    REFUSED.append(refused)
    told += [entry["step"] for entry in tail.new_entries()]
    assert told == steps(folder / "lines") == [*range(1, number + 1)]
    file.close()


def test_property_test_covers_enough_full_disks(tmp_path_factory):
    test_lines_stay_whole_and_ordered_under_short_writes(tmp_path_factory)
    assert sum(REFUSED) > 2 * len(REFUSED)


@pytest.mark.parametrize("cut", ["now", "later"])
def test_torn_line_is_truncated_at_once_or_by_next_append(tmp_path, monkeypatch, cut):
    file, disk, real = LineFile(tmp_path / "lines"), Disk([]), os.ftruncate
    disk.left = 9

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        patch.setattr(os, "ftruncate", refuse if cut == "later" else real)
        assert file.append(b"first\nsecond\n") == 6
        assert file.trouble.errno == errno.ENOSPC
        assert file.size == 6
        assert file.append(b"second\n") == 0
    assert file.append(b"second\n") == 7
    assert (tmp_path / "lines").read_bytes() == b"first\nsecond\n"
    assert file.read(6, 100) == b"second\n"
    file.close()


@pytest.fixture
def disk(tmp_path):
    """A file system of 200 KB."""
    with small_disk(tmp_path / "disk", "200k") as folder:
        yield folder


def test_full_disk_loses_no_journal_line(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(store_log, "RETRY_S", 0.0)
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * 180224)
    path = disk / "journal.jsonl"
    log, spool = EventLog(tmp_path / "db", path), JournalSpool(disk, "s", "a")
    for number in range(200):
        log.commit([{"event": str(number)}], [entry(number, 90)])
        spool.write(entry(number, 90))
    assert len(steps(path)) < 200
    assert sent_steps(spool) == [*range(200)]
    ballast.unlink()
    log.commit([], [])
    log.close()
    spool.portions()
    spool.close()
    assert steps(path) == [*range(200)]
    assert [entry["step"] for entry in read_journal(path)] == [*range(200)]
    assert steps(next(disk.glob("lines-*"))) == [*range(200)]


def test_coordinator_waits_for_space_when_its_disk_is_full(disk, monkeypatch):
    log = EventLog(disk / "db", disk / "journal.jsonl")
    ballast = disk / "ballast"
    monkeypatch.setattr(store_log, "RETRY_S", 0.01)
    waits = []

    def free(_):
        waits.append(1)
        ballast.unlink(missing_ok=True)

    monkeypatch.setattr(store_log.time, "sleep", free)
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096) == 4096:
                pass
    except OSError:
        pass
    log.commit([{"event": "x" * 9000}], [entry(1, 9000)])
    assert waits
    assert log.load()[1] == [{"event": "x" * 9000}]
    assert steps(disk / "journal.jsonl") == [1]
    monkeypatch.setattr(store_log, "FULL_S", -1.0)
    ballast.write_bytes(b"x" * 8192)
    with pytest.raises(Exception, match="full"):
        log.commit([{"event": "x" * 300_000}], [])
    log.close()
