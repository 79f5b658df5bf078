"""Full, read-only and forbidden disks ended stages with a bare "[Errno 28]", and trainings without any message.

The disks are real if the test can mount them.
"""

import errno
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import ROOT, fill, small_corpus, small_disk, tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from storage.disks import disk_trouble
from storage.objects import ObjectStore, ObjectStoreError
from storage.retries import DiskError, check_disk, disk_named
from tasks.config.pipeline import parse_config
from tasks.failures import passes
from tasks.stages.base import Run, get_stage
from tasks.stages.shard import warn_of_room
from training.processes.exit_reason import leave_reason, read_reason, reserve_note

REMEDY = "Free some space there .*STARLING_HOME.*run the same command again"


@pytest.fixture
def disk(tmp_path):
    """A file system of two megabytes."""
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def config_of(tmp_path):
    table = small_corpus(tmp_path / "corpus")
    return tiny_document(data={"sources": [{"kind": "table", "path": str(table)}], "sample_rate": 8000})


def test_truncated_object_is_not_published(disk):
    store = ObjectStore(disk / "objects")
    store.write("old", b"whole")
    fill(disk, leave=65536)
    for write in (lambda: store.write("new", bytes(200_000)), lambda: store.write("old", bytes(200_000))):
        with pytest.raises(DiskError, match=f"objects/(new|old): no space is left on the disk of {disk}.*{REMEDY}"):
            write()
    with pytest.raises(DiskError), store.create("table") as file:  # pyarrow ignores the count, too
        pq.write_table(pa.table({"x": [os.urandom(200_000)]}), file)
    assert store.list() == ["old"]
    assert store.read("old") == b"whole"
    assert not list((disk / "objects").glob(".tmp-*"))


@pytest.mark.parametrize("stage", ["prepare", "shard"])
def test_stage_names_the_full_disk_and_finishes_once_space_is_free(disk, tmp_path, monkeypatch, stage):
    monkeypatch.setenv("STARLING_HOME", str(disk / "home"))
    run = Run(parse_config(config_of(tmp_path)), "full")
    names = ["prepare", "shard"]
    for name in names[: names.index(stage)]:
        get_stage(name).execute(run)
    for room in (0, 8192):
        hog = fill(disk, leave=room)
        said = rf"{disk}/home/.*no space is left.* of 2\.1 MB free\)\. {REMEDY}"
        with pytest.raises(DiskError, match=said) as caught:
            get_stage(stage).execute(run)
        assert not passes(caught.value)
        hog.unlink()
    assert not list((disk / "home" / "objects" / stage).rglob("done.json"))
    result = get_stage(stage).execute(run)
    assert (result.cached, result.counts["written"]) == (False, 12)
    assert not list((disk / "home").rglob(".tmp-*"))


def test_warning_if_shards_may_not_fit(disk, caplog):
    store = ObjectStore(disk / "shard")
    warn_of_room(store, 120.0, 8000)  # 1.92 of 2.1 MB
    assert caplog.text == ""
    store.write("train/shard-000000.tar", bytes(1_000_000))  # a part of it
    warn_of_room(store, 120.0, 8000)
    assert caplog.text == ""
    store.write("train/shard-000000.tar", bytes(10))
    hog = fill(disk, leave=1_000_000)
    warn_of_room(store, 120.0, 8000)
    assert "the shards may not fit: 999.4 kB are free" in caplog.text
    assert "about half of 1.9 MB" in caplog.text
    hog.unlink()
    warn_of_room(ObjectStore("memory://room"), 1e9, 8000)


def test_command_on_full_or_read_only_home_names_a_remedy(disk, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(disk / "home"))
    monkeypatch.setattr("flows.cli.common.err.width", 200, raising=False)
    path = write_config(tmp_path / "config.yaml", config_of(tmp_path))
    (disk / "home").mkdir()
    hog = fill(disk)

    def said(*words):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.lstrip().startswith("error: ")
        return " ".join(result.stderr.split())

    assert "no space is left on the disk of" in said("run", path, "--until", "shard", "--no-prefect")
    # before starting a server, which could only fail
    assert f"{disk}/home: no space is left on its disk (0 B of 2.1 MB free)" in said("run", path, "--until", "shard")
    hog.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for words in (["--no-prefect"], []):
        text = said("run", path, "--until", "shard", *words)
        assert "is read-only. Mount it for writing, or name another folder (STARLING_HOME" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user for a moment")
def test_permission_denied_names_folder_and_user():
    with tempfile.TemporaryDirectory(prefix="theirs-") as folder:  # other users cannot enter the folders above tmp_path
        Path(folder).chmod(0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(ObjectStoreError, match=r"theirs-.*denied, user 65534 .*the owner or the mode"):
                ObjectStore(folder).write("x", b"1")
            with pytest.raises(DiskError, match="permission denied, user 65534"):
                check_disk(Path(folder))
        finally:
            os.seteuid(0)


def raise_and_catch(error):
    """The exception with a traceback, as after a raise."""
    try:
        raise error
    except Exception as caught:
        return caught


def with_cause(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (OSError(errno.EROFS, "ro"), errno.EROFS),
        (PermissionError(errno.EACCES, "no", "/x"), errno.EACCES),
        (OSError(errno.EPERM, "no", "/x"), errno.EPERM),
        (PermissionError(errno.EACCES, "no"), 0),  # a port below 1024
        (PermissionError(errno.EPERM, "no"), 0),  # a process of another user
        (sqlite3.OperationalError("database or disk is full"), errno.ENOSPC),
        (sqlite3.OperationalError("attempt to write a readonly database"), errno.EROFS),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (with_cause(KeyError("x"), OSError(errno.ENOSPC, "full")), errno.ENOSPC),
        (sqlite3.OperationalError("disk I/O error"), 0),  # ambiguous: it may have another cause while space is free
        (FileNotFoundError(errno.ENOENT, "none"), 0),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), 0),
        (ValueError("28"), 0),
    ],
)
def test_disk_errors_are_recognized_among_other_errors(error, number, tmp_path):
    assert disk_trouble(raise_and_catch(error), [tmp_path]) == number


def test_ambiguous_error_on_full_disk_counts_as_disk_error(disk):
    fill(disk)
    assert disk_trouble(sqlite3.OperationalError("disk I/O error"), [disk]) == errno.ENOSPC
    said = rf'^{disk}: no space is left on its disk, "disk I/O error" \(0 B of 2\.1 MB free\)\. {REMEDY}'
    with pytest.raises(DiskError, match=said), disk_named(disk):
        raise sqlite3.OperationalError("disk I/O error")


def test_error_without_file_name_is_located_by_the_open_file(disk):
    fill(disk)
    with pytest.raises(DiskError, match=rf"^{disk}/deep\.txt: no space is left on the disk of {disk} "), disk_named():
        (disk / "deep.txt").write_text("x" * 100_000)


def test_our_own_errors_are_not_treated_as_disk_errors():
    for error in (ValueError("No space left on device"), ObjectStoreError("database or disk is full")):
        with pytest.raises(type(error), match=str(error)), disk_named(Path("/")):
            raise error


def test_exit_reason_can_be_written_on_full_disk(disk):
    note = disk / "note.txt"
    env = os.environ | reserve_note(note) | {"PYTHONPATH": str(ROOT)}
    hog = fill(disk)
    code = (
        "import sys; from pathlib import Path; from training.processes.exit_reason import run_with_reason\n"
        f"sys.exit(run_with_reason(lambda: Path({str(disk / 'weights')!r}).write_text('x' * 100_000), 3))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert read_reason(note).startswith(f"{disk}/weights: no space is left on the disk of {disk} (0 B of 2.1 MB free)")
    leave_reason("a second reason", note)
    assert "second" not in read_reason(note)
    hog.unlink()
    reserve_note(note)
    assert read_reason(note) == ""


def test_exit_reason_contains_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-indeed")
    leave_reason("it said very-secret-indeed", tmp_path / "note")
    assert read_reason(tmp_path / "note") == "it said ***"
    assert read_reason(tmp_path / "nothing") == ""
