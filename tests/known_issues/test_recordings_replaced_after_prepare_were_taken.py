"""A recording that was replaced between `prepare` and `shard` was trained on with the transcript of the former one.

A pipe in its place was waited for, and a device read into the memory.
"""

import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from support import small_corpus

from tasks.config.pipeline import parse_config
from tasks.dataset.audio import untouched_flac
from tasks.dataset.manifest import MANIFEST
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD


@pytest.fixture
def prepared(tmp_path):
    """A run whose recordings are prepared, with their paths."""
    table = small_corpus(tmp_path / "corpus", speakers=3, each=4)
    data = {"sources": [{"kind": "table", "path": str(table)}], "sample_rate": 8000, "max_quarantined": 0.5}
    run = Run(parse_config({"name": "replaced", "data": data}), "r")
    PREPARE.execute(run)
    manifest = run.result("prepare").output.fetch(MANIFEST, tmp_path)
    return run, sorted(pq.read_table(manifest, columns=["audio"]).column(0).to_pylist())


def test_replaced_recording_is_quarantined(prepared):
    run, files = prepared
    soundfile.write(files[0], np.full(40_000, 0.1), 8000)
    samples, rate = soundfile.read(files[1])
    soundfile.write(files[1], samples, 2 * rate)
    SHARD.execute(run)
    counts, lost = run.result("shard").counts, SHARD.record(run)["quarantined"]
    assert (counts["read"], counts["written"], counts["quarantined"]) == (12, 10, 2)
    assert all("has changed since it was prepared" in entry["detail"] for entry in lost)
    assert "5.000 s instead of" in " ".join(entry["detail"] for entry in lost)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_neither_pipes_nor_devices_are_read(tmp_path, make):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.full(8000, 0.1), 8000)
    row = {"audio": str(path), "start": 0.0, "end": None, "channel": None, "sample_rate": 8000, "duration": 1.0}
    assert untouched_flac(row, 8000) == (path.read_bytes(), 8000)
    shutil.move(path, tmp_path / "away")
    make(path)
    assert untouched_flac(row, 8000) is None
