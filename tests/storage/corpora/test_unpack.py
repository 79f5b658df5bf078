"""Unpacking untrusted archives: only what is allowed is written."""

import io
import os
import stat
import tarfile
import zipfile

import pytest

from storage.corpora.unpack import UnsafeArchiveError, unpack


def make_tar(path, members, mode="w:gz"):
    """A tar of (name, content or link target, type)."""
    with tarfile.open(path, mode) as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                tar.addfile(info)
    return path


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_are_unpacked(tmp_path, mode):
    archive = make_tar(tmp_path / "x.tar", [("./a/b.txt", b"one", FILE), ("a", "", tarfile.DIRTYPE)], mode)
    done = unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "a" / "b.txt").read_bytes() == b"one"
    assert (done.files, done.bytes, done.left_out) == (1, 3, 0)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\..\\evil", "a\nb"])
@pytest.mark.parametrize("box", ["tar", "zip"])
def test_names_outside_the_folder_are_refused(tmp_path, name, box):
    archive = tmp_path / f"x.{box}"
    if box == "tar":
        make_tar(archive, [(name, b"x", FILE)])
    else:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(UnsafeArchiveError, match="would leave"):
        unpack(archive, tmp_path / "in" / "out")
    assert not list(tmp_path.rglob("*evil*"))


def test_links_become_files_or_are_left_out(tmp_path):
    members = [
        ("data/a.sph", b"one", FILE),
        ("legacy/dev/a.sph", "../../data/a.sph", LINK),
        ("hard.sph", "data/a.sph", HARD),
        ("passwd", "/etc/passwd", LINK),
        ("up", "../..", LINK),
        ("folder", "data", LINK),
        ("none", "nowhere", LINK),
        ("pipe", "", tarfile.FIFOTYPE),
        ("device", "", tarfile.CHRTYPE),
    ]
    done = unpack(make_tar(tmp_path / "x.tgz", members), tmp_path / "out")
    assert (done.files, done.left_out) == (3, 6)
    assert (tmp_path / "out" / "legacy" / "dev" / "a.sph").read_bytes() == b"one"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert sorted(os.listdir(tmp_path / "out")) == ["data", "hard.sph", "legacy"]


def test_no_member_is_written_through_a_link(tmp_path):
    (tmp_path / "victim").mkdir()
    archive = make_tar(tmp_path / "x.tar", [("d", "../victim", LINK), ("d/evil", b"x", FILE)])
    unpack(archive, tmp_path / "out")
    assert list((tmp_path / "victim").iterdir()) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "d").symlink_to(tmp_path / "victim")
    with pytest.raises(UnsafeArchiveError, match="because of an existing symbolic link"):
        unpack(archive, tmp_path / "other")
    assert list((tmp_path / "victim").iterdir()) == []


def test_links_in_a_zip_are_left_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
        file.writestr("a/b.txt", "one")
    done = unpack(tmp_path / "x.zip", tmp_path / "out")
    assert (done.files, done.left_out) == (1, 1)
    assert not (tmp_path / "out" / "link").exists()


@pytest.mark.parametrize("box", ["tar", "zip"])
def test_archive_bombs_are_stopped(tmp_path, box):
    archive = tmp_path / f"x.{box}"
    if box == "tar":
        make_tar(archive, [(f"{n}", bytes(600), FILE) for n in range(3)])
    else:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("a", bytes(2000))
    with pytest.raises(UnsafeArchiveError, match="more than 1500 bytes"):
        unpack(archive, tmp_path / "out", max_bytes=1500)
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*")) <= 1500


@pytest.mark.parametrize("cut", [0.3, 0.7])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_truncated_archives_are_refused(tmp_path, cut, mode):
    archive = make_tar(tmp_path / "x.tar", [(f"{n}", os.urandom(3000), FILE) for n in range(5)], mode)
    archive.write_bytes(archive.read_bytes()[: int(archive.stat().st_size * cut)])
    with pytest.raises(UnsafeArchiveError, match="fetch it again"):
        unpack(archive, tmp_path / "out")


def test_file_that_is_not_an_archive_is_refused(tmp_path):
    (tmp_path / "x.tgz").write_text("<html>not found</html>")
    with pytest.raises(UnsafeArchiveError, match="not an archive"):
        unpack(tmp_path / "x.tgz", tmp_path / "out")
