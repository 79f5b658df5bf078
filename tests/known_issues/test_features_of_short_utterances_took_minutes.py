"""On a machine with other work, the threads of torch waited for each other: 667 digits took minutes, not a second."""

import sys
import threading

import pytest
import torch
from support import small_corpus

from devices.compute_threads import one_thread
from tasks.config.pipeline import parse_config
from tasks.stages import feature_shards
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other builds of torch have one thread")


def test_features_stage_computes_each_utterance_in_one_thread(home, tmp_path, monkeypatch, two_threads):
    small_corpus(tmp_path / "corpus")
    source = {"kind": "table", "path": str(tmp_path / "corpus" / "metadata.csv")}
    run = Run(parse_config({"name": "f", "data": {"sources": [source], "sample_rate": 8000}}), "r")
    work, seen = feature_shards.Extractor.features, []

    def counting(self, wave):
        seen.append(torch.get_num_threads())
        return work(self, wave)

    monkeypatch.setattr(feature_shards.Extractor, "features", counting)
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_number_of_threads_is_restored_by_the_last_of_several(two_threads):
    inside, leave = threading.Event(), threading.Event()
    after = []

    def other():
        with one_thread():
            inside.set()
            leave.wait()
        after.append(torch.get_num_threads())

    first = threading.Thread(target=other)
    with one_thread():
        first.start()
        inside.wait()
    leave.set()
    first.join()
    last = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    last.start()
    last.join()
    assert after == [2, 2]
