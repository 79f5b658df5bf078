"""A damaged shard is quarantined by features and decoding: counted and named; too many stop the run."""

import pytest
from support import copy_finished, small_corpus, tiny_document

from speech.features.cmvn import CmvnStats
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import TooManyShardsError
from storage.reading import ShardError
from storage.shards import Sample, build_index, load_part, write_shard
from tasks.config.pipeline import parse_config
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.decode import DECODE
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.tracking.significance import known_damage


def sharded(tmp_path, limit=0.5, **features):
    """A run up to its shards, of which the training set has several."""
    path = tmp_path / "corpus" / "metadata.csv"
    if not path.exists():
        small_corpus(tmp_path / "corpus", speakers=6, each=4)
    data = {"sources": [{"kind": "table", "path": str(path)}], "sample_rate": 8000, "max_quarantined": limit}
    storage = {"shard_seconds": 1.5, "workers": 2}
    run = Run(
        parse_config({"name": "f", "data": data, "storage": storage, "features": {"num_mels": 20} | features}), "r"
    )
    PREPARE.execute(run)
    SHARD.execute(run)
    return run


def damage(store):
    """Flip a bit of the first shard of a set; its record and its former content."""
    record = ShardIndex.read(store).shards[0]
    content = store.read(record.name)
    store.write(record.name, content[:900] + bytes([content[900] ^ 1]) + content[901:])
    return record, content


@pytest.mark.parametrize("stored", [False, True])
def test_features_skip_a_damaged_shard_until_it_is_repaired(home, tmp_path, stored):
    whole = FEATURES.execute(sharded(tmp_path, stored=stored))
    run = sharded(tmp_path, stored=stored)
    run.force_from = "features"
    store = run.result("shard").store.child("train")
    record, content = damage(store)
    result = FEATURES.execute(run)
    assert result.counts["quarantined"] == record.count
    (entry,) = result.record["quarantined_shards"]
    assert entry["shard"] == record.name
    assert entry["reason"].startswith("its SHA-256 differs")
    assert (entry["utterances"], entry["seconds"]) == (record.count, record.seconds)
    if stored:
        assert result.counts["stored"] + record.count == whole.counts["stored"]
        index = ShardIndex.read(result.store.child("train"))
        noted = result.store.read_json(f"train/damaged-shards/{record.name.replace('.', '%2E')}.json")
        assert len(noted["ids"]) == record.count
        assert not set(noted["ids"]) & set(index.column("id"))
    assert CmvnStats.from_dict(result.record["stats"]).count < CmvnStats.from_dict(whole.record["stats"]).count
    store.write(record.name, content)
    run.force_from = ""
    mended = FEATURES.execute(run)
    assert not mended.cached
    assert mended.counts == whole.counts
    assert mended.record["stats"] == whole.record["stats"]
    assert FEATURES.execute(run).cached


def test_features_skip_a_shard_with_undecodable_audio(home, tmp_path):
    run = sharded(tmp_path)
    store = run.result("shard").store.child("train")
    index = ShardIndex.read(store)
    part = load_part(store, index.shards[0].name)
    samples = [Sample(row["id"], {"flac": b"no audio"}, row) for row in part.rows]
    parts = [write_shard(store, part.record.name, samples, "flac")]
    parts += [load_part(store, record.name) for record in index.shards[1:]]
    build_index(parts, index.metadata).write(store)
    result = FEATURES.execute(run)
    (entry,) = result.record["quarantined_shards"]
    assert entry["shard"] == part.record.name
    assert "cannot be decoded" in entry["reason"]


def test_too_much_damage_stops_features_with_the_reason(home, tmp_path):
    run = sharded(tmp_path, limit=0.0)
    record, _ = damage(run.result("shard").store.child("train"))
    with pytest.raises(TooManyShardsError, match=rf"{record.name}: its SHA-256"):
        FEATURES.execute(run)
    assert FEATURES.output(run).record() is None


@pytest.fixture
def decodable(home):
    """A copy of the finished run, its test set in several shards."""
    copy_finished(home)

    def make(limit):
        document = tiny_document(storage={"shard_seconds": 3, "workers": 2})
        document["data"] = document["data"] | {"max_quarantined": limit}
        run = Run(parse_config(document), "damaged")
        for stage in (PREPARE, SHARD, FEATURES):
            stage.execute(run)
        import support

        run.results["train"] = support.finished()[1].result("train")
        return run

    return make


def test_decoding_skips_a_damaged_shard(decodable, fragment, monkeypatch):
    run = decodable(0.5)
    store = run.result("shard").store.child("test")
    index = ShardIndex.read(store)
    assert len(index.shards) > 2
    record, content = damage(store)
    result = DECODE.execute(run)
    assert result.counts["utterances"] + record.count == len(index)
    assert result.counts["quarantined"] == record.count
    lost = {index.row(n)["id"] for n in range(len(index)) if index.row(n)["shard"] == 0}
    assert len(result.store.read("test.hyp.trn").splitlines()) == len(index) - record.count
    assert not any(f"({name})" in result.store.read("test.ref.trn").decode() for name in lost)
    assert record.name in fragment("damage", stages=run.results)
    check = known_damage(run)
    check(ShardError("again", record))
    with pytest.raises(ShardError):
        check(ShardError("another", index.shards[1]))
    store.write(record.name, content)
    again = DECODE.execute(run)
    assert not again.cached
    assert again.counts["utterances"] == len(index)
    assert fragment("damage", stages=run.results) == ""


def test_too_much_damage_stops_decoding(decodable):
    run = decodable(0.0)
    damage(ObjectStore(run.result("shard").store.child("test").url))
    with pytest.raises(TooManyShardsError, match=r"are lost with 1 damaged shards"):
        DECODE.execute(run)


def test_damaged_shard_is_announced_with_the_number_of_its_utterances(home, tmp_path):
    run = sharded(tmp_path)
    record, _ = damage(run.result("shard").store.child("train"))
    lines = []
    with progress.following(lambda *line: lines.append(line)):
        FEATURES.execute(run)
    said = f"quarantined: {record.count} in damaged shards: {record.name} (its SHA-256 differs"
    assert lines[1][1].startswith(said)
