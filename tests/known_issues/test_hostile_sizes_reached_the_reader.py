"""Claims of a file that its reader believed: each took memory or time without end, or came out as a foreign error.

A tar with a negative size passed the check; one that claimed a name of 8 GB made tarfile reserve 8 GB; JSON nested
100,000 deep came out as RecursionError and ended a training's store; nine lines of YAML aliases stood for a billion
values and the configuration was never read to its end.
"""

import tarfile

import pytest
import yaml

from storage.safety import UnsafeTarError, check_tar
from tasks.config.yaml_text import parse_yaml
from training.coordinator.messages import CoordinatorError
from training.coordinator.requests import read_request


def header(kind, field):
    info = tarfile.TarInfo("a.flac")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + b"\0" * 1024


def test_a_negative_size_is_no_size():
    with pytest.raises(UnsafeTarError):
        check_tar(header(b"0", b"\xff" * 8 + (-5).to_bytes(4, "big", signed=True)))


def test_a_name_of_8_gb_is_not_waited_for(tmp_path):
    (tmp_path / "x.tar").write_bytes(header(b"L", b"77777777777\0"))
    with pytest.raises(UnsafeTarError, match="claims 8589934591 bytes"):
        check_tar(tmp_path / "x.tar")


def test_deep_json_is_an_error_of_the_one_who_sent_it():
    with pytest.raises(CoordinatorError, match="not valid JSON"):
        read_request(b"[" * 100_000)


def test_aliases_are_counted_before_anybody_follows_them():
    text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml(text)
    assert parse_yaml("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}
