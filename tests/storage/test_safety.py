"""Tar files that must be rejected, and those that must not."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.objects import ObjectStore
from storage.safety import UnsafeTarError, check_tar
from storage.shards import Sample, write_shard


def member(name, data=b"x" * 700, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def make_tar(*members, form=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.size else None)
    return buffer.getvalue()


GOOD = make_tar(member("a.json"), member("a.flac"), member("sub/b.json"), member("sub/b.FLAC"), member("c.seg.wav"))


def test_accepts_bytes_and_paths(tmp_path):
    check_tar(GOOD)
    (tmp_path / "x.tar").write_bytes(GOOD)
    check_tar(tmp_path / "x.tar")
    check_tar(str(tmp_path / "x.tar"))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_accepts_long_and_foreign_names(form):
    check_tar(make_tar(member("ü" * 90 + ".json"), member("n" * 220 + ".flac"), form=form))


def test_accepts_an_empty_tar():
    check_tar(make_tar())


@pytest.mark.parametrize(
    "bad",
    [
        member("/etc/passwd.txt"),
        member("../../evil.txt"),
        member("a/../../evil.txt"),
        member("a\\..\\evil.txt"),
        member("x.pyd"),
        member("x.pickle"),
        member("x.pkl"),
        member("x.pth"),
        member("x.flac.pth"),
        member("x.json.gz"),
        member("x"),
        member(".flac"),
        member("a.flac", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("a.flac", kind=tarfile.LNKTYPE, link="b.flac"),
        member("a.flac", kind=tarfile.CHRTYPE),
        member("a.flac", kind=tarfile.BLKTYPE),
        member("a.flac", kind=tarfile.FIFOTYPE),
        member("a.flac", kind=tarfile.DIRTYPE),
        member("ok.json"),  # a repeated name
    ],
    ids=lambda bad: f"{bad[0].name}-{bad[0].type.decode()}",
)
def test_refuses_dangerous_members(bad):
    with pytest.raises(UnsafeTarError, match="member"):
        check_tar(make_tar(member("ok.json"), bad))


def test_refuses_an_absolute_name_in_a_pax_header():
    info, data = member("harmless.txt")
    info.pax_headers = {"path": "/etc/cron.d/evil.txt"}
    with pytest.raises(UnsafeTarError):
        check_tar(make_tar((info, data)))


@pytest.mark.parametrize("content", [b"", b"no tar", b"\x1f\x8b" + b"z" * 2000, b"x" * 5000])
def test_refuses_files_that_are_not_a_tar(content):
    with pytest.raises(UnsafeTarError):
        check_tar(content)


def test_refuses_every_truncation(tmp_path):
    """Also at a boundary between members, where tarfile itself ends without an error."""
    end = len(make_tar(member("a.json"), member("a.flac")).rstrip(b"\0"))
    whole = make_tar(member("a.json"), member("a.flac"))
    end = 2 * (512 + 1024)
    for size in range(0, end + 1024, 256):
        with pytest.raises(UnsafeTarError):
            check_tar(whole[:size])
    check_tar(whole[: end + 1024])


def test_detects_a_damaged_header():
    whole = bytearray(make_tar(member("a.json"), member("a.flac"), member("b.json")))
    whole[1536 + 3] ^= 0xFF  # in the second header: tarfile would silently end here
    with pytest.raises(UnsafeTarError, match="damaged"):
        check_tar(bytes(whole))


def test_detects_a_damaged_header_of_a_small_last_member():
    """All of it is in the last two blocks of the tar, which tarfile reads as the end marker."""
    data = bytearray(make_tar(member("a.json"), member("b.txt", b"short")))
    data[data.index(b"b.txt") + 150] ^= 1
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["a.json"]
    with pytest.raises(UnsafeTarError, match="no valid header there"):
        check_tar(bytes(data))


@pytest.mark.parametrize("kind", ["bytes", "path", "file"])
def test_messages_use_the_label_as_name(tmp_path, kind):
    (tmp_path / "x.tar").write_bytes(GOOD[:2000])
    with (tmp_path / "x.tar").open("rb") as file, pytest.raises(UnsafeTarError, match="^my shard: "):
        check_tar({"bytes": GOOD[:2000], "path": tmp_path / "x.tar", "file": file}[kind], "my shard")


def test_refuses_bytes_after_the_end():
    with pytest.raises(UnsafeTarError, match="damaged"):
        check_tar(GOOD + b"hidden" + bytes(506))


@settings(max_examples=60)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_any_damaged_byte_raises_only_our_own_error(position, flip):
    damaged = bytearray(GOOD)
    damaged[position] ^= flip
    try:
        check_tar(bytes(damaged))
    except UnsafeTarError:
        return


def test_accepts_our_own_shards(tmp_path):
    row = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
    write_shard(ObjectStore(tmp_path), "x.tar", [Sample("../a.b/ü" + "y" * 150, {"flac": b"1"}, row)], "flac")
    check_tar(tmp_path / "x.tar")
