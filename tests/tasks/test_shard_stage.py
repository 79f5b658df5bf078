import json
import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from forks import Forkable
from support import ROOT, small_corpus, wait_until, write_tone

from speech.audio import AudioError, encode_flac
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.safety import check_tar
from storage.shards import load_part, shard_name
from tasks.config.pipeline import parse_config
from tasks.dataset.manifest import iter_manifest
from tasks.stages import shard
from tasks.stages.base import Run, StageError
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.quarantined import QuarantineError
from tasks.stages.shard import SHARD, make_sample, plan_shards, write_one

ROWS = [{"id": f"u{n}", "duration": 1.0 + n % 3} for n in range(50)]


def document(path, url="", **data):
    return {
        "name": "s",
        "data": {"sources": [{"kind": "table", "path": str(path)}], "sample_rate": 8000, "max_quarantined": 0.5} | data,
        "storage": {"url": str(url), "shard_seconds": 1.5, "workers": 2},
    }


def sharded(path, url="", **data):
    run = Run(parse_config(document(path, url, **data)), "r")
    PREPARE.execute(run)
    return SHARD.execute(run), run


def objects(store):
    return {name: store.read(name) for name in store.list()}


def plan(rows, seconds, seed):
    order, starts = plan_shards((r["id"] for r in rows), (r["duration"] for r in rows), seconds, seed)
    return [[rows[i] for i in order[first:last]] for first, last in pairwise(starts.tolist())]


def test_plan_has_every_utterance_once_in_shards_of_target_size():
    shards = plan(ROWS, 10.0, seed=1)
    assert sorted(row["id"] for part in shards for row in part) == sorted(row["id"] for row in ROWS)
    seconds = [sum(row["duration"] for row in part) for part in shards]
    assert all(10 <= s < 13 for s in seconds[:-1])
    assert shards == plan(ROWS[::-1], 10.0, seed=1)
    assert shards != plan(ROWS, 10.0, seed=2)


@pytest.mark.parametrize("rows_at_once", [1, 4, 1000])
def test_large_set_is_sorted_in_parts(home, tmp_path, monkeypatch, rows_at_once):
    monkeypatch.setattr(shard, "_PARTITION_ROWS", rows_at_once)
    run = Run(parse_config(document(small_corpus(tmp_path / "corpus", speakers=6, each=4))), "r")
    store = PREPARE.execute(run).store
    rows = list(iter_manifest(store, tmp_path, "train"))
    order, starts = plan_shards((r["id"] for r in rows), (r["duration"] for r in rows), 1.5, 1)
    written = list(shard.shard_rows(store.local_path("utterances.parquet"), "train", order, starts, tmp_path))
    expected = [[rows[i] | {"speed": 1.0} for i in order[first:last]] for first, last in pairwise(starts.tolist())]
    assert written == list(enumerate(expected))
    assert len(written) > 3


def flac_rows(tmp_path, **changes):
    path = tmp_path / "a.flac"
    path.write_bytes(encode_flac(torch.linspace(-0.5, 0.5, 8000), 8000))
    row = {"id": "a", "audio": str(path), "start": 0.0, "end": None, "channel": None, "duration": 1.0}
    row |= {"text": "t", "speaker": "s", "corpus": "c", "domain": "", "language": "en", "sample_rate": 8000}
    return path, row | changes


def test_flac_that_needs_no_change_is_copied(tmp_path):
    path, row = flac_rows(tmp_path)
    sample = make_sample(row, 8000)
    assert sample.members["flac"] == path.read_bytes()
    assert (sample.row["num_frames"], sample.row["duration"]) == (8000, 1.0)


@pytest.mark.parametrize(
    ("changes", "rate", "samples"),
    [
        ({"start": 0.5, "duration": 0.5}, 8000, 4000),
        ({"end": 0.5, "duration": 0.5}, 8000, 4000),
        ({}, 16000, 16000),
    ],
)
def test_flac_that_needs_a_change_is_encoded_again(tmp_path, changes, rate, samples):
    path, row = flac_rows(tmp_path, **changes)
    sample = make_sample(row, rate)
    assert sample.row["num_frames"] == samples
    assert sample.members["flac"] != path.read_bytes()


def test_flac_of_another_length_than_was_prepared_is_refused(tmp_path):
    _, row = flac_rows(tmp_path, duration=0.9)
    with pytest.raises(AudioError, match="has changed since it was prepared: 1.000 s instead of 0.900 s"):
        make_sample(row, 8000)


@pytest.mark.parametrize("left", [0.3, 0.99])
def test_flac_truncated_since_prepare_is_not_copied(tmp_path, left):
    path, row = flac_rows(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * left)])
    with pytest.raises(AudioError):
        make_sample(row, 8000)


def test_flac_with_large_metadata_is_encoded_again(tmp_path):
    path, row = flac_rows(tmp_path)
    content = path.read_bytes()
    padding = bytes([0x01]) + (100_000).to_bytes(3, "big") + bytes(100_000)
    assert not content[4] & 0x80  # another metadata block follows the first
    path.write_bytes(content[:42] + padding + content[42:])
    assert len(make_sample(row, 8000).members["flac"]) < 50_000


def test_shards_have_resampled_audio_and_index_has_the_metadata(home, tmp_path):
    result, run = sharded(small_corpus(tmp_path / "corpus", rate=16000))
    sets = result.record["sets"]
    assert result.counts["read"] == result.counts["written"] == 12
    assert result.counts["shards"] == sum(entry["shards"] for entry in sets.values()) > 3
    for name, entry in sets.items():
        store = result.store.child(name)
        index = ShardIndex.read(store)
        reader = ShardReader(store, index)
        assert len(index) == entry["utterances"]
        assert index.digest == entry["digest"]
        for record in index.shards:
            check_tar(store.local_path(record.name))
        for i in range(len(index)):
            row = index.row(i)
            assert (row["sample_rate"], row["num_frames"]) == (8000, 4000)
            assert row["text"].startswith("word number ")
            assert reader.payload(i)[:4] == b"fLaC"
    assert run.result("prepare").counts["written"] == sum(entry["utterances"] for entry in sets.values())


@pytest.mark.parametrize("url", ["memory://shards", "file"])
def test_shards_are_the_same_in_any_object_store(home, tmp_path, url):
    path = small_corpus(tmp_path / "corpus")
    first = sharded(path, "")[0]
    other = sharded(path, f"file://{tmp_path}/objects" if url == "file" else url)[0]
    assert not other.cached
    assert other.record == first.record


def test_rerun_is_cached_for_any_number_of_workers(home, tmp_path):
    path = small_corpus(tmp_path / "corpus")
    first, run = sharded(path)
    assert SHARD.execute(run).cached
    other = parse_config(document(path) | {"storage": {"shard_seconds": 1.5, "workers": 1}})
    again = Run(other, "r2")
    assert PREPARE.execute(again).cached
    assert SHARD.execute(again).key == first.key


def test_a_killed_stage_continues_with_the_missing_shards(home, tmp_path, monkeypatch):
    path = small_corpus(tmp_path / "corpus")
    run = Run(parse_config(document(path)), "r")
    PREPARE.execute(run)
    written = []

    def failing(store, number, *given):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append((store.url, number))
        return write_one(store, number, *given)

    monkeypatch.setattr(shard, "write_one", failing)
    with pytest.raises(KeyboardInterrupt):
        SHARD.execute(run)
    output = SHARD.output(run)
    assert output.record() is None
    before = {
        name: output.store.local_path(name).stat().st_mtime_ns for name in output.store.list() if name.endswith(".tar")
    }
    assert len(before) == 3
    monkeypatch.undo()
    monkeypatch.setenv("STARLING_HOME", str(home))
    result = SHARD.execute(run)
    assert result.counts["written"] == 12
    assert all(result.store.local_path(name).stat().st_mtime_ns == stamp for name, stamp in before.items())


KILLED = """
import json, sys, time
from pathlib import Path
import tasks.stages.shard as shard
from tasks.config.pipeline import parse_config
from tasks.stages.prepare import PREPARE
from tasks.stages.base import Run

run = Run(parse_config(json.loads(sys.argv[1])), "killed")
PREPARE.execute(run)
make = shard.make_sample
def endless(*given):
    if len(list(Path(sys.argv[2]).glob("shard/*/*/*.tar"))) >= 2:
        time.sleep(600)
    return make(*given)
shard.make_sample = endless
shard.SHARD.execute(run)
"""


def test_killed_stage_publishes_nothing_partial_and_a_rerun_finishes(home, tmp_path):
    path = small_corpus(tmp_path / "corpus", speakers=6, each=4)
    config = document(path, tmp_path / "objects")
    child = subprocess.Popen(
        [sys.executable, "-c", Forkable(KILLED), json.dumps(config), str(tmp_path / "objects")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    try:
        tars = lambda: list((tmp_path / "objects").glob("shard/*/*/*.tar"))  # noqa: E731
        wait_until(lambda: len(tars()) >= 2, every_s=0.02)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not list((tmp_path / "objects").glob("shard/*/done.json"))
    for tar in tars():
        check_tar(tar)
    kept = {tar: tar.stat().st_mtime_ns for tar in tars() if (tar.parent / "parts" / f"{tar.name}.json").exists()}

    for torn in (tmp_path / "objects").rglob(".tmp-*"):
        os.utime(torn, (0, 0))  # younger ones are left to writers that may be alive

    resumed = sharded(path, tmp_path / "objects")[0]
    assert not resumed.cached
    assert all(tar.stat().st_mtime_ns == stamp for tar, stamp in kept.items())
    undisturbed = sharded(path, tmp_path / "other")[0]
    assert resumed.record == undisturbed.record
    assert objects(resumed.store) == objects(undisturbed.store)
    assert not [p for p in (tmp_path / "objects").rglob("*") if ".tmp" in p.name]


def test_audio_deleted_since_prepare_is_quarantined_and_counted(home, tmp_path):
    path = small_corpus(tmp_path / "corpus")
    run = Run(parse_config(document(path)), "r")
    PREPARE.execute(run)
    (tmp_path / "corpus" / "audio" / "s1-1.wav").unlink()
    result = SHARD.execute(run)
    assert (result.counts["read"], result.counts["written"], result.counts["quarantined"]) == (12, 11, 1)
    assert [(row["id"], row["reason"]) for row in result.record["quarantined"]] == [("s1-1", "unreadable")]
    assert sum(entry["utterances"] for entry in result.record["sets"].values()) == 11


def test_corpus_deleted_since_prepare_stops_the_stage(home, tmp_path):
    path = small_corpus(tmp_path / "corpus")
    run = Run(parse_config(document(path)), "r")
    PREPARE.execute(run)
    for file in (tmp_path / "corpus" / "audio").iterdir():
        file.unlink()
    with pytest.raises(QuarantineError, match=r"12 of 12 .* --from prepare"):
        SHARD.execute(run)
    assert SHARD.output(run).record() is None


def test_data_without_a_training_set_are_sharded_but_not_trained_on(home, tmp_path):
    path = small_corpus(tmp_path / "corpus")
    source = {"kind": "table", "path": str(path), "set": "eval"}
    run = Run(parse_config({"name": "s", "data": {"sources": [source]}}), "r")
    PREPARE.execute(run)
    assert SHARD.execute(run).record["sets"]["eval"]["utterances"] == 12
    with pytest.raises(StageError, match=r"no training set, only eval.*`starling evaluate MODEL CORPUS`"):
        FEATURES.execute(run)


def test_note_of_lost_audio_is_ignored_once_the_audio_is_back(tmp_path):
    store = ObjectStore(str(tmp_path / "objects"))
    audio = write_tone(tmp_path / "a.wav")
    row = {"id": "a", "audio": str(audio), "start": 0.0, "end": None, "channel": None, "duration": 0.5}
    row |= {"text": "t", "speaker": "s", "corpus": "c", "domain": "", "language": "en", "sample_rate": 8000}
    audio.rename(tmp_path / "b.wav")
    note = "quarantine/shard-000000.json"
    write_one(store, 0, [row], 8000)
    assert load_part(store, shard_name(0)).record.count == 0
    assert [entry["id"] for entry in store.read_json(note)] == ["a"]
    (tmp_path / "b.wav").rename(audio)
    store.delete(f"parts/{shard_name(0)}.json")  # the state that a kill right before the part would leave
    for _ in range(2):
        write_one(store, 0, [row], 8000)
        assert load_part(store, shard_name(0)).record.count == 1
        assert not store.exists(note)


def test_missing_note_of_lost_audio_is_written_again(tmp_path):
    """Otherwise the stage that runs again would count less than it read."""
    store = ObjectStore(str(tmp_path / "objects"))
    fields = {"start": 0.0, "end": None, "channel": None, "duration": 0.5, "sample_rate": 8000}
    fields |= {"text": "t", "speaker": "s", "corpus": "c", "domain": "", "language": "en"}
    rows = [{"id": name, "audio": str(tmp_path / f"{name}.wav"), **fields} for name in "ab"]
    write_tone(tmp_path / "a.wav")
    for damage in (b"{", b"[]", b"3", b""):
        write_one(store, 0, rows, 8000)
        assert [entry["id"] for entry in store.read_json("quarantine/shard-000000.json")] == ["b"]
        store.write("quarantine/shard-000000.json", damage)
    store.delete("quarantine/shard-000000.json")
    write_one(store, 0, rows, 8000)
    assert store.exists("quarantine/shard-000000.json")
