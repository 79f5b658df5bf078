"""With `cmvn: speaker`, all utterances that name no speaker were normalized together, as if one person spoke them.

New recordings, whose speakers are unknown, too, were normalized by themselves, as the documentation says.
"""

import pytest
import torch
from support import write_table, write_tone

from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD


@pytest.fixture
def extracted(home, tmp_path):
    """A run with the features of three utterances of Ann and six of people without a name."""
    rows = []
    for number in range(9):
        path = write_tone(tmp_path / "audio" / f"{number}.wav", rate=8000, seed=number)
        rows.append((f"u{number}", path.relative_to(tmp_path), f"word {number}", "ann" if number % 3 == 0 else ""))
    write_table(tmp_path, rows)
    document = {
        "name": "unknown",
        "data": {
            "sources": [{"kind": "table", "path": str(tmp_path / "metadata.csv")}],
            "sample_rate": 8000,
            "split_by": "utterance",
            "speeds": [0.9],
        },
        "features": {"num_mels": 20, "cmvn": "speaker"},
    }
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


def test_unknown_speakers_are_normalized_by_the_utterance(extracted):
    speakers = extracted.result("features").record["speakers"]
    assert set(speakers) == {"ann", "ann-speed0_9"}
    stats = {who: CmvnStats.from_dict(value) for who, value in speakers.items()}
    frontend = FrontEnd(extracted.config.features, 8000, speakers=stats)
    waves = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    feats, _ = frontend(waves, torch.tensor([4000, 4000]), ["", "-speed0_9"])
    assert feats.mean(dim=1).abs().max() < 1e-3
