"""Pauses around training utterances, put into the shards so that alignments have them."""

import numpy as np
import pytest
import soundfile
import torch
from support import write_table

from speech.audio import decode_audio
from speech.features.augment import PauseConfig
from storage.index import ShardIndex
from storage.reading import ShardReader
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.pauses import ShardPauses
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD

RATE = 8000
ZEROS = {"probability": 0.5, "edge_s": [0.25, 0.5], "inner_s": [0, 0], "kinds": ["zeros"]}


def corpus(folder):
    times = np.arange(RATE // 2) / RATE
    rows = []
    folder.mkdir()
    for number in range(24):
        soundfile.write(folder / f"{number}.flac", 0.5 * np.cos(2 * np.pi * (400 + 20 * number) * times), RATE)
        rows.append((f"u{number}", f"{number}.flac", "word", f"s{number % 6}"))
    return write_table(folder, rows)


def sharded(table, **data):
    source = {"kind": "table", "path": str(table)}
    document = {
        "name": "s",
        "data": {"sources": [source], "sample_rate": RATE, "max_quarantined": 0.5} | data,
        "storage": {"shard_seconds": 2, "workers": 2},
    }
    run = Run(parse_config(document), "r")
    PREPARE.execute(run)
    SHARD.execute(run)
    return run


def audio(run, name, folder):
    store = run.result("shard").store.child(name)
    index = ShardIndex.read(store)
    reader = ShardReader(store, index, folder)
    rows = [index.row(row) for row in range(len(index))]
    return {row["id"]: (row, decode_audio(reader.payload(place))[0]) for place, row in enumerate(rows)}


def test_some_training_utterances_get_pauses_and_other_sets_do_not(home, tmp_path):
    table = corpus(tmp_path / "corpus")
    plain, run = sharded(table), sharded(table, pauses=ZEROS)
    assert run.result("prepare").key == plain.result("prepare").key
    assert run.result("shard").key != plain.result("shard").key
    for name in ("valid", "test"):
        digests = {pipeline.result("shard").record["sets"][name]["digest"] for pipeline in (plain, run)}
        assert len(digests) == 1
    before, after = (audio(pipeline, "train", tmp_path / "cache") for pipeline in (plain, run))
    assert before.keys() == after.keys()
    paused = [utterance for utterance in after if len(after[utterance][1]) > len(before[utterance][1])]
    assert 0.2 * len(after) < len(paused) < 0.8 * len(after)
    for utterance in after:
        row, wave = after[utterance]
        assert row["duration"] == len(wave) / RATE
        speech = before[utterance][1]
        if utterance not in paused:
            assert torch.equal(wave, speech)
            continue
        first = int(wave.abs().gt(0).nonzero()[0])
        assert 0.25 * RATE - 1 <= first <= 0.5 * RATE
        assert torch.equal(wave[first : first + len(speech)], speech)
        rest = wave[first + len(speech) :]
        assert not rest.any()
        assert 0.25 * RATE - 1 <= len(rest) <= 0.5 * RATE


def test_pauses_are_drawn_deterministically():
    wave = torch.sin(torch.arange(4000) / 5.0)
    config = PauseConfig(probability=1.0, edge_s=(0.1, 0.4))
    first, again, other = (ShardPauses(config, RATE, seed) for seed in (1, 1, 2))
    assert torch.equal(first.around(wave, "a"), again.around(wave, "a"))
    assert not torch.equal(first.around(wave, "a"), other.around(wave, "a"))
    assert not torch.equal(first.around(wave, "a"), first.around(wave, "b"))


def test_folds_have_no_pauses():
    data = {"sources": [{"kind": "table", "path": "t.csv"}], "folds": 3, "pauses": {}}
    with pytest.raises(ConfigError, match="folds are tested on, too, so they get no pauses: leave out pauses"):
        parse_config({"name": "s", "data": data})
