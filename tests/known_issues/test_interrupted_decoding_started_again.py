"""A run that was interrupted while its own threads decoded a test set began the set again."""

import pytest
from support import copy_finished, tiny_document

from recognition import inference
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages import decode
from tasks.stages.base import Run
from tasks.stages.decode import DECODE


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of a few utterances, each of which is kept at once."""
    monkeypatch.setattr(decode, "_KEEP_S", 0.0)
    true_decode_set = decode.decode_set
    monkeypatch.setattr(decode, "decode_set", lambda *args, **more: true_decode_set(*args, batch_seconds=4.0, **more))


@pytest.fixture
def searched(monkeypatch):
    """Batches that are decoded, by the number of their utterances; the third one is interrupted if asked for."""
    sizes, each = [], inference.DecodingPool.each

    def counted(self, encoded):
        for what, hypotheses in each(self, encoded):
            if searched.interrupted and len(sizes) == 2:
                raise KeyboardInterrupt
            sizes.append(len(hypotheses))
            yield what, hypotheses

    def searched():
        return sizes

    searched.interrupted = True
    monkeypatch.setattr(inference.DecodingPool, "each", counted)
    return searched


def a_run(finished, **fields):
    run = Run(parse_config(tiny_document(decode={"kind": "beam", "beam": 3}, **fields)), "r")
    names = ("prepare", "shard", "features", "train")
    run.results = {name: result for name, result in finished.results.items() if name in names}
    return run


def test_what_was_decoded_before_ctrl_c_is_kept(finished, tmp_path, monkeypatch, small_batches, searched):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    with pytest.raises(KeyboardInterrupt):
        DECODE.execute(a_run(finished))
    first = sum(searched())
    assert 0 < first < 12
    searched.interrupted = False
    resumed = DECODE.execute(a_run(finished))
    assert sum(searched()) == 12  # each utterance once
    assert resumed.counts["utterances"] == 12
    assert resumed.record["speed"] == {}  # the time of a part says nothing
    assert not resumed.store.list("work")
    rows = read_table(resumed.store, "test.parquet")
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "whole")))
    whole = DECODE.execute(a_run(finished))
    assert rows == read_table(whole.store, "test.parquet")


def test_hypotheses_of_other_decoding_parameters_are_not_taken(
    finished, tmp_path, monkeypatch, small_batches, searched
):
    """Those that a section `tune` finds are no part of the stage's address."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    with pytest.raises(KeyboardInterrupt):
        DECODE.execute(a_run(finished))
    searched.interrupted = False
    searched().clear()
    monkeypatch.setattr(
        decode, "digest_json", lambda value: decode.json.dumps(value | {"beam": 4}, sort_keys=True, default=str)
    )
    DECODE.execute(a_run(finished))
    assert sum(searched()) == 12
