"""Malicious tar files: each is rejected by name, at once and with little memory."""

import tarfile

import pytest

from storage.corpora.tars import tar_members
from storage.corpora.unpack import UnsafeArchiveError, unpack
from storage.safety import UnsafeTarError, check_tar

END = b"\0" * 1024
HUGE = b"\x80" + (2**62).to_bytes(11, "big")


def negative_size(size):
    return b"\xff" * 8 + (-size).to_bytes(4, "big", signed=True)


def header(name="a.flac", size=0, kind=b"0", raw=None):
    """A block with a valid checksum and any size field."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = raw if raw is not None else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax_header(**records):
    """A pax header; records are written as they are."""
    body = b""
    for key, value in records.items():
        rest = f" {key.replace('_', '.')}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        body += str(length).encode() + rest
    return header("p", len(body), b"x") + body + b"\0" * (-len(body) % 512)


BAD = {
    "a negative size": header(raw=negative_size(5)) + END,
    "a size that leads back to the header": header(raw=negative_size(512)) + END,
    "a size that leads back to the member before": header("b.flac") + header(raw=negative_size(1024)) + END,
    "an endless size": header(raw=HUGE) + END,
    "an endless extended header": header(kind=b"x", raw=HUGE) + END,
    "an extended header of 8 GB": header(kind=b"x", size=8**11 - 1) + END,
    "a name of 8 GB": header(kind=b"L", size=8**11 - 1) + END,
    "a link name of 8 GB": header(kind=b"K", size=8**11 - 1) + END,
    "a name of negative length": header(kind=b"L", raw=negative_size(1024)) + END,
    "a negative size by extension": pax_header(size="-1024") + header() + END,
    "an endless size by extension": pax_header(size="9" * 30) + header() + END,
    "a sparse map of letters": pax_header(GNU_sparse_map="0,1,x") + header() + END,
    "extended headers without end": header(kind=b"x") * 5000 + header() + END,
    "long names without end": header(kind=b"L") * 5000 + header() + END,
}


@pytest.mark.parametrize("name", BAD)
def test_tar_with_false_headers_is_refused(tmp_path, name):
    path = tmp_path / "shard.tar"
    path.write_bytes(BAD[name])
    with pytest.raises(UnsafeTarError):
        check_tar(path)
    with pytest.raises(UnsafeTarError):
        check_tar(BAD[name])
    with pytest.raises(UnsafeTarError):
        list(tar_members(path))
    with pytest.raises(UnsafeArchiveError):
        unpack(path, tmp_path / "out")


def test_a_sparse_member_is_never_expanded(tmp_path):
    """It would claim 100 GB for a kilobyte."""
    data = pax_header(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_realsize="99999999999")
    data += header(size=512) + b"1\n0\n5\n".ljust(512, b"\0") + END
    path = tmp_path / "sparse.tar"
    path.write_bytes(data)
    with pytest.raises(UnsafeTarError, match="sparse"):
        check_tar(path)
    assert list(tar_members(path)) == []
    assert unpack(path, tmp_path / "out").left_out == 1
    assert not any((tmp_path / "out").rglob("*"))


def test_long_names_within_the_limit_are_accepted(tmp_path):
    path = tmp_path / "good.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("x" * 5000 + ".flac"))
    check_tar(path)
    assert len(list(tar_members(path))) == 1
