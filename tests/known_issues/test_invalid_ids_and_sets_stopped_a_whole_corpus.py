"""One utterance whose id no shard can hold, or whose set no metric can name, stopped the run in a later stage."""

import json

import pytest
from support import write_tone

from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE, QUARANTINE
from tasks.stages.shard import SHARD


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"id": "long" * 100}, "bad-id"),
        ({"id": "line\nbreak"}, "bad-id"),
        ({"id": "lone\ud800"}, "bad-id"),
        ({"text": "lone\udc00"}, "bad-text"),
        ({"speaker": "lone\ud800"}, "bad-text"),
        ({"split": "test (clean)"}, "bad-set"),
        ({"split": "../train"}, "bad-set"),
    ],
)
def test_utterance_with_invalid_id_or_set_is_quarantined(tmp_path, home, fields, reason):
    audio = str(write_tone(tmp_path / "a.wav"))
    rows = [{"id": f"u{n}", "audio": audio, "text": "word", "speaker": f"s{n}", "split": "train"} for n in range(3)]
    rows[1] |= fields
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": [{"kind": "table", "path": str(table)}], "max_quarantined": 0.5}
    document = {"name": "k", "data": data | {"valid_share": 0, "test_share": 0}}
    run = Run(parse_config(document), "r")
    prepared = PREPARE.execute(run)
    assert [row["reason"] for row in read_table(prepared.store, QUARANTINE)] == [reason]
    assert SHARD.execute(run).counts["written"] == 2
