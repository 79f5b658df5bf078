"""MLflow copied a model to a full disk: the error named a file on another one, with "53.6 GB of 270.6 GB free"."""

import errno
import shutil

import pytest
from support import small_disk

from storage.disks import disk_trouble, explain_disk
from storage.retries import DiskError, disk_named


def test_full_disk_is_that_of_the_target(tmp_path):
    source = tmp_path / "model"
    source.write_bytes(bytes(3 << 20))
    with small_disk(tmp_path / "disk", "2m") as disk:
        target = disk / "model"
        with pytest.raises(DiskError, match=rf"^{target}: no space is left on the disk of {disk} \("), disk_named(disk):
            shutil.copyfile(source, target)


def test_advice_before_a_librarys_message_is_not_its_reason(tmp_path):
    advice = "(raised as a result of Query-invoked autoflush)"
    error = RuntimeError(f"{advice}\n(sqlite3.OperationalError) database or disk is full\n[SQL: UPDATE runs]")
    assert disk_trouble(error) == errno.ENOSPC
    text = explain_disk(errno.ENOSPC, error, [tmp_path])
    assert '"(sqlite3.OperationalError) database or disk is full"' in text
    assert advice not in text
