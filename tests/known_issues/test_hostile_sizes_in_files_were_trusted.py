"""Claims in files that readers trusted: each took unbounded memory or time, or raised another library's error.

A tar with a negative size passed the check; one that claimed a name of 8 GB made tarfile reserve 8 GB; JSON nested
100,000 deep raised RecursionError and ended a training's coordinator; nine lines of YAML aliases stood for a
billion values, and reading the configuration never ended.
"""

import tarfile

import pytest
import yaml

from storage.safety import UnsafeTarError, check_tar
from tasks.config.yaml_text import parse_yaml
from training.coordinator.messages import CoordinatorError, read_request


def header(kind, field):
    info = tarfile.TarInfo("a.flac")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + b"\0" * 1024


def test_negative_size_is_refused():
    with pytest.raises(UnsafeTarError):
        check_tar(header(b"0", b"\xff" * 8 + (-5).to_bytes(4, "big", signed=True)))


def test_claimed_name_of_8_gb_is_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(header(b"L", b"77777777777\0"))
    with pytest.raises(UnsafeTarError, match="claims 8589934591 bytes"):
        check_tar(tmp_path / "x.tar")


def test_deeply_nested_json_is_the_senders_error():
    with pytest.raises(CoordinatorError, match="not valid JSON"):
        read_request(b"[" * 100_000)


def test_yaml_aliases_are_counted_before_expansion():
    text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml(text)
    assert parse_yaml("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}
