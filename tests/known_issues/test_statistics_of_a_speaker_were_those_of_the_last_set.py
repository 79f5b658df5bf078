"""With `cmvn: speaker`, a speaker of several sets had the statistics of the last one by name: mostly of `valid`.

Where validation has the speakers of training, all speech was normalized by a tenth of it or less.
"""

import numpy as np
import torch
from support import small_corpus

from speech.audio import decode_audio
from speech.features import build_features
from speech.features.cmvn import CmvnStats
from storage.index import ShardIndex
from storage.reading import ShardReader
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD


def test_statistics_are_of_all_speech_of_a_speaker(home, tmp_path):
    small_corpus(tmp_path, speakers=1, each=6, rate=8000)
    document = {
        "name": "shared",
        "data": {
            "sources": [{"kind": "table", "path": str(tmp_path / "metadata.csv")}],
            "sample_rate": 8000,
            "split_by": "utterance",
        },
        "features": {"num_mels": 20, "cmvn": "speaker"},
    }
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    extract = build_features(run.config.features, 8000)
    parts = []
    for name in ("train", "valid", "test"):
        store = run.result("shard").store.child(name)
        reader = ShardReader(store, ShardIndex.read(store))
        for row in range(len(reader)):
            wave, _ = decode_audio(reader.payload(row))
            parts.append(extract(wave[None], torch.tensor([len(wave)]))[0][0])
    assert len(parts) == 6
    stats = CmvnStats.from_dict(run.result("features").record["speakers"]["s0"])
    assert stats.count == sum(map(len, parts))
    np.testing.assert_allclose(stats.mean, torch.cat(parts).mean(dim=0), atol=1e-4)
