"""A pattern with a few asterisks took hours for one file with a long name: fsspec made a regular expression of it."""

import fsspec
import pytest

from speech.lm import TextConfig
from speech.lm.base import LmError
from speech.lm.sources import text_files


def names(folder, pattern):
    files = text_files(TextConfig(paths=[f"{folder}/{pattern}"]))
    root = str(folder).removeprefix("memory:/")
    return [file.rpartition(f"{root}/")[2] for file in files]


@pytest.mark.timeout(60)
def test_pattern_of_many_asterisks_is_compared_at_once(tmp_path):
    (tmp_path / ("a" * 200)).touch()
    assert names(tmp_path, "*a" * 40) == ["a" * 200]
    with pytest.raises(LmError, match="there is no file"):
        names(tmp_path, "*a" * 40 + "*b")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["x.txt", "y.txt"]),
        ("*/*.txt", ["a/x.txt"]),
        ("**/x.txt", ["a/b/x.txt", "a/x.txt", "x.txt"]),
        ("a/**", ["a/b/x.txt", "a/x.txt"]),
        ("**/b/*", ["a/b/x.txt"]),
        ("?.*t", ["x.txt", "y.txt"]),
    ],
)
@pytest.mark.parametrize("where", ["", "memory:/"])
def test_patterns_stand_for_files(tmp_path, pattern, expected, where):
    folder = f"{where}{tmp_path}"
    system, root = fsspec.core.url_to_fs(folder)
    for name in ("x.txt", "y.txt", "z.bin", "a/x.txt", "a/b/x.txt"):
        system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe(f"{root}/{name}", b"text")
    assert names(folder, pattern) == expected
