"""Threads that decoded pieces at the same time each made a copy of the model; all but one were removed at once.

So were copies that more than two models' pieces had replaced in the cache, while their pieces still read them.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from storage.stages import StageOutput
from tasks.stages import decode


@pytest.fixture
def read(monkeypatch):
    """Decodes pieces of models in threads; returns what each piece finds in its copy after a while."""

    def fetch(source, folder):
        time.sleep(0.1)  # until all threads are here
        (folder / "bundle.json").write_text(source.store.url)

    def slow(folder, url, **_):
        time.sleep(0.3)
        return [(folder / "bundle.json").read_text()] if Path(folder).exists() else []

    monkeypatch.setattr(decode, "fetch_bundle", fetch)
    monkeypatch.setattr(decode, "decode_set", slow)
    monkeypatch.setattr(decode, "asdict", str)
    decode._fetched.cache_clear()

    def run(models):
        common = {"decode": {"kind": "greedy"}, "files": {}, "url": "", "device": "cpu", "speakers": {}, "shards": []}
        pieces = [common | {"model": model, "digest": "1"} for model in models]
        with ThreadPoolExecutor(len(pieces)) as pool:
            return [answer["rows"] for answer in pool.map(decode.decode_piece, pieces)]

    return run


@pytest.mark.parametrize("names", [("a", "a", "a", "a"), ("a", "b", "c", "d")])
def test_a_copy_stays_while_a_piece_reads_it(read, names):
    home = f"memory://{uuid4().hex}"
    models = [f"{home}/train/{name}" for name in names]
    assert read(models) == [[StageOutput.at(model).store.url] for model in models]
