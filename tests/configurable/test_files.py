"""Files that are replaced or created appear whole or not at all."""

import hashlib
import os
import stat

import pytest

from configurable.files import (
    create_private_file,
    file_sha256,
    known_sha256,
    publish_file,
    replace_file,
    replacing,
    temporary_file,
)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("sync", [False, True])
def test_file_is_replaced_when_the_block_ends(tmp_path, sync):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with replacing(path, sync) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_replacement_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", None])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_replaced_files_follow_the_umask(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    replace_file(tmp_path / "x", b"1")
    assert mode(tmp_path / "x") == mode(tmp_path / "plain")


def test_private_file_is_readable_by_its_owner_only_from_the_start(tmp_path):
    path = tmp_path / "key"
    create_private_file(path, b"1")
    assert (mode(path), path.read_bytes()) == (0o600, b"1")
    with temporary_file(tmp_path, mode=0o600) as (_, temporary):
        assert mode(temporary) == 0o600


def test_private_file_never_replaces_another(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        create_private_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_and_folder_are_synced_if_asked(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("configurable.files._sync", lambda path: synced.append((path, path.exists())))
    for number, sync in enumerate((False, True)):
        (tmp_path / "draft").write_bytes(b"1")
        publish_file(tmp_path / "draft", tmp_path / str(number), sync)
    assert synced == [(tmp_path / "draft", True), (tmp_path, True)]


def test_error_of_a_full_disk_names_the_final_file(tmp_path):
    with replacing(tmp_path / "x") as file:
        with open("/dev/full", "wb", buffering=0) as full:
            os.dup2(full.fileno(), file.fileno())
        with pytest.raises(OSError, match="No space left") as caught:
            file.write(b"123")
    assert (caught.value.filename, caught.value.needed_bytes) == (str(tmp_path / "x"), 3)


def test_error_of_a_missing_folder_names_the_final_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "none" / "x", b"1")
    assert caught.value.filename == str(tmp_path / "none" / "x")


def test_remembered_digest_follows_the_content(tmp_path):
    file = tmp_path / "words.txt"
    digests = []
    for text in ("one", "two words", "two words"):
        file.write_text(text)
        digests.append(known_sha256(file))
        assert digests[-1] == file_sha256(file) == hashlib.sha256(text.encode()).hexdigest()
    assert len(set(digests)) == 2
