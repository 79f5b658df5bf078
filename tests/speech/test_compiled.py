"""Compiled code is kept for later processes, by the content of the file that it comes from."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core import caching, config

from speech import compiled

SOURCE = """
from speech.compiled import compiled

@compiled
def doubled(number):
    return 2 * number
"""


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder where code is kept."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiled, "_told", False)
    return tmp_path / "kept"


def module(folder: Path, source=SOURCE):
    """A copy of a module in a folder of its own, as a process finds it that has just begun."""
    folder.mkdir(exist_ok=True)
    path = folder / "twice.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("twice", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["twice"] = made
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules["twice"]
    return made.doubled


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_copies_of_a_file_share_what_was_compiled_once(tmp_path, caplog):
    first, second = module(tmp_path / "first"), module(tmp_path / "second")
    assert (first(3), second(4)) == (6, 8)
    assert (hits(first), hits(second)) == (0, 1)
    assert [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()] == [
        "the search is compiled (numba): some ten seconds of one core, once on this machine"
    ]


def test_changed_file_is_compiled_again(tmp_path):
    assert module(tmp_path / "code")(3) == 6
    changed = module(tmp_path / "code", SOURCE.replace("2 *", "50 *"))  # another size: the bytecode is another, too
    assert (changed(3), hits(changed)) == (150, 0)


def test_damaged_code_is_compiled_again_and_kept(tmp_path, kept):
    assert module(tmp_path / "first")(3) == 6
    for file in [*kept.rglob("*.nbc"), *kept.rglob("*.nbi")]:
        file.write_bytes(file.read_bytes()[:50])
    second, third = module(tmp_path / "second"), module(tmp_path / "third")
    assert (second(3), third(3)) == (6, 6)
    assert (hits(second), hits(third)) == (0, 1)


def test_function_runs_where_nothing_can_be_kept(tmp_path, kept, monkeypatch):
    kept.write_text("a file where a folder should be")
    monkeypatch.setattr(caching.InTreeCacheLocator, "from_function", classmethod(lambda *_: None))
    function = module(tmp_path / "code")
    with compiled.one_compiles(function):
        assert function(3) == 6


def test_full_disk_is_no_failure(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    assert module(tmp_path / "code")(3) == 6


def test_others_wait_while_one_process_compiles(tmp_path, monkeypatch):
    function = module(tmp_path / "code")
    waits = []
    monkeypatch.setattr(compiled, "time", SimpleNamespace(monotonic=lambda: 60.0 * len(waits), sleep=waits.append))
    with compiled.one_compiles(function):
        assert not waits
        with compiled.one_compiles(function):  # another open file, as in another process: waits, then goes on
            assert waits
