"""Our own tar headers are tarfile's, byte for byte."""

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.shards import _header


def expected(name, size):
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=98), st.integers(0, 2**34))
def test_short_names(name, size):
    name = name.strip("/").replace("//", "/") or "x"
    assert _header(name, size) == expected(name, size)


@pytest.mark.parametrize("length", [98, 99, 100, 101, 180, 260])
@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11])
def test_long_names_and_sizes(length, size):
    assert _header("n" * length, size) == expected("n" * length, size)
