"""Threads that decoded pieces at the same time each made a copy of the model; all but one were removed at once.

So were copies that more than two models' pieces had replaced in the cache, while their pieces still read them.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.stages import decode


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Decodes pieces of models in threads; returns what each piece recognizes after a while, and the copies made."""
    copies = []

    def copied(source, folder):
        copies.append(source)
        time.sleep(0.1)  # until all threads are here
        (folder / "bundle.json").write_text(source)
        return folder

    def loaded(folder, *_):
        return SimpleNamespace(
            spec=SimpleNamespace(sample_rate=8000),
            said=(Path(folder) / "bundle.json").read_text(),
            prepare=lambda: (Path(folder) / "bundle.json").read_text(),
        )

    def slow(recognizer, *_, **__):
        time.sleep(0.3)
        return {0: SimpleNamespace(hyp=recognizer.said, score=0.0, confidence=1.0)}

    monkeypatch.setattr(decode, "make_bundle", copied)
    monkeypatch.setattr(decode.Recognizer, "load", staticmethod(loaded))
    monkeypatch.setattr(decode, "open_set", lambda *_: None)
    monkeypatch.setattr(decode, "decode_set", slow)
    decode._loaded.cache_clear()

    def run(models):
        common = {"decode": {"kind": "greedy"}, "files": {}, "url": "", "device": "cpu", "speakers": {}, "rows": [0]}
        pieces = [
            common | {"bundle": model, "work": str(tmp_path), "result": f"{number}.json"}
            for number, model in enumerate(models)
        ]
        with ThreadPoolExecutor(len(pieces)) as pool:
            answers = list(pool.map(decode.decode_piece, pieces))
        return [answer["rows"][0][1][0] for answer in answers], copies

    yield run
    decode._loaded.cache_clear()


@pytest.mark.parametrize("names", [("a", "a", "a", "a"), ("a", "b", "c", "d")])
def test_a_model_stays_while_a_piece_reads_it(read, names):
    said, copies = read(names)
    assert said == list(names)
    assert sorted(copies) == sorted(set(names))
