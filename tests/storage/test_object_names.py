"""URLs of object stores and names of objects, and files of a local store in a crash or a race."""

import os
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import backends
from storage.objects import (
    ObjectNameError,
    ObjectStore,
    check_name,
)


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "memory://", "", "s3://bucket/../x", "s3://bucket//x"])
def test_refuses_bad_urls(url):
    with pytest.raises(ObjectNameError):
        ObjectStore(url)


@pytest.mark.parametrize(("url", "extra"), [("gs://bucket/x", "gcs"), ("az://container/x", "azure")])
def test_missing_package_is_named_with_its_extra(url, extra, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ObjectNameError, match=rf"needs the package \w+: pip install '\.\[{extra}\]'"):
        ObjectStore(url)


def test_refuses_credentials_without_repeating_them():
    with pytest.raises(ObjectNameError, match="AWS_") as caught:
        ObjectStore("s3://AKIAXX:hunter22@bucket/x")
    assert "hunter22" not in str(caught.value)
    with pytest.raises(ObjectNameError, match="environment") as caught:
        ObjectStore("s3://bucket/x", secret="hunter22")
    assert "hunter22" not in str(caught.value)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=12))
def test_checked_name_never_leaves_the_store(name):
    try:
        check_name(name)
    except ObjectNameError:
        return
    joined = os.path.normpath(f"/base/store/{name}")
    assert joined.startswith("/base/store/")


@pytest.mark.parametrize("way", ["write", "create", "write_file"])
def test_published_object_survives_a_power_cut(tmp_path, monkeypatch, way):
    """The bytes reach the disk before the name does, and the name before the call returns."""
    store, done = ObjectStore(tmp_path / "store"), []
    store.write("folder/former", b"")  # the folder exists
    (tmp_path / "source").write_bytes(b"12345")
    fsync, replace = os.fsync, type(tmp_path).replace

    def synced(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else ("file", status.st_size))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(type(tmp_path), "replace", lambda *paths: done.append("renamed") or replace(*paths))
    if way == "write":
        store.write("folder/x", b"12345")
    elif way == "write_file":
        store.write_file("folder/x", tmp_path / "source")
    else:
        with store.create("folder/x") as file:
            file.write(b"12345")
    assert done == [("file", 5), "renamed", "folder"]


def test_concurrent_deletions_of_a_folder_both_succeed(tmp_path):
    store = ObjectStore(tmp_path / "store")
    for number in range(300):
        store.write(f"a/{number % 7}/{number}", b"")
    failed = []

    def work():
        try:
            store.delete_tree("a")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert failed == []
    assert store.list() == []


@pytest.mark.parametrize("url", ["s3://bucket/../other", "s3://bucket/a//b", "memory://a/./b", "s3://bucket/a\\b"])
def test_path_of_a_url_is_checked_like_a_name(url):
    with pytest.raises(ObjectNameError):
        ObjectStore(url)
