"""The S3 server is killed and restarted while a writer works: bounded retries survive the outage."""

import random
import threading
import time

import pytest

from storage.index import ShardIndex
from storage.objects import ObjectStore, ObjectStoreError, RetryPolicy
from storage.reading import ShardReader
from storage.shards import Sample, build_index, load_part, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
PATIENT = RetryPolicy(attempts=100, base_s=0.05, cap_s=1.0)
"""A busy machine takes long to start the server again."""


def samples(shard):
    source = random.Random(shard)
    return [Sample(f"u{shard}-{number}", {"flac": source.randbytes(50_000)}, ROW) for number in range(4)]


def test_writes_survive_restarts_of_the_server(s3_server, tmp_path):
    store = ObjectStore("s3://speech/outage", retry=PATIENT)
    calm = ObjectStore(tmp_path / "calm")
    stop = threading.Event()
    restarts = []

    def disturb():
        while not stop.is_set() and len(restarts) < 3:
            time.sleep(0.25)
            s3_server.kill()
            time.sleep(0.25)
            s3_server.start()
            restarts.append(time.monotonic())

    disturber = threading.Thread(target=disturb)
    disturber.start()
    parts = []
    try:
        shard = 0
        while shard < 10 or len(restarts) < 3:
            parts.append(write_shard(store, f"{shard:06d}.tar", samples(shard), "flac"))
            assert load_part(store, f"{shard:06d}.tar") == parts[-1]
            shard += 1
    finally:
        stop.set()
        disturber.join()
    build_index(parts, {}).write(store)
    assert len(restarts) == 3
    undisturbed = [write_shard(calm, part.record.name, samples(number), "flac") for number, part in enumerate(parts)]
    assert undisturbed == parts
    reader = ShardReader(store, ShardIndex.read(store), tmp_path / "cache")
    for shard in range(len(parts)):
        assert reader.payload(4 * shard + 3) == samples(shard)[3].members["flac"]
    assert sorted(store.list("parts")) == [f"parts/{number:06d}.tar.json" for number in range(len(parts))]


def test_lasting_outage_is_an_error_without_partial_objects(s3_server):
    store = ObjectStore("s3://speech/lasting", retry=RetryPolicy(attempts=3, base_s=0.02))
    write_shard(store, "0.tar", samples(0), "flac")
    s3_server.kill()
    try:
        with pytest.raises(ObjectStoreError, match="after 3 attempts"):
            write_shard(store, "1.tar", samples(1), "flac")
    finally:
        s3_server.start()
    assert store.list() == ["0.tar", "parts/0.tar.json"]
    assert load_part(store, "1.tar") is None
    assert write_shard(store, "1.tar", samples(1), "flac") == load_part(store, "1.tar")


def test_reads_survive_a_restart_of_the_server(s3_server):
    store = ObjectStore("s3://speech/reads", retry=PATIENT)
    content = random.Random(1).randbytes(300_000)
    store.write("x", content)
    s3_server.kill()
    starter = threading.Timer(0.4, s3_server.start)
    starter.start()
    try:
        assert store.read("x", 1000, 2000) == content[1000:2000]
        assert store.exists("x")
        assert store.list() == ["x"]
    finally:
        starter.join()
