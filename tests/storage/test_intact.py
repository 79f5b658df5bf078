"""Any damage is reported in one line: the object's URL, what is wrong, and the remedy."""

import io
import json
import pickle
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load, save

from storage.index import ShardIndex
from storage.intact import DamagedObjectError, check_content, object_sha256, parse_json, readable, remedy
from storage.objects import ObjectMissingError, ObjectStore, ObjectStoreError
from storage.shards import Sample, build_index, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000, "text": "some words", "speaker": "s"}
OUTPUT = f"shard/{'a' * 16}"


@pytest.fixture
def store(tmp_path):
    return ObjectStore(tmp_path / "objects")


def one_line(error, url):
    """The message is one line that begins with the URL and ends with a remedy that works for it."""
    text = str(error)
    assert text.startswith(url), text
    assert "\n" not in text
    root = url.split("/shard/")[0]
    assert f"starling storage verify --repair --url {root}`" in text
    return text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"nonsense"])
def test_damaged_json_is_reported(store, content):
    store.write(f"{OUTPUT}/x.json", content)
    with pytest.raises(DamagedObjectError) as caught:
        store.read_json(f"{OUTPUT}/x.json")
    one_line(caught.value, store.join(f"{OUTPUT}/x.json"))


@pytest.mark.parametrize("wrong", ["[1]", "{}", '{"a": {"b": "x"}}', "null"])
def test_json_of_another_shape_is_reported(wrong):
    url = f"s3://bucket/deep/{OUTPUT}/x.json"
    with pytest.raises(DamagedObjectError) as caught, readable(url):
        int(parse_json(url, wrong.encode())["a"]["b"])
    one_line(caught.value, url)


def indexed(store):
    folder = store.child(f"{OUTPUT}/train")
    samples = [Sample(f"u{n}", {"flac": b"x"}, {**ROW, "text": f"the words of number {n}"}) for n in range(300)]
    build_index([write_shard(folder, "0.tar", samples, "flac")], {}).write(folder)
    return folder


def use(index):
    for _ in index.batches():
        pass
    return index.digest, [index.column(name) for name in index.table.schema.names]


def test_flipped_bit_of_an_index_is_detected_or_harmless(store):
    """It is detected, with URL and remedy, or what readers see is unchanged (shards are in the footer)."""
    folder = indexed(store)
    data, known = folder.read("index.parquet"), str(use(ShardIndex.read(folder)))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    noticed, source = 0, random.Random(1)
    for _ in range(80):
        place, bit = source.randrange(len(data)), 1 << source.randrange(8)
        folder.write("index.parquet", data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        try:
            assert str(use(ShardIndex.read(folder))) == known or place >= footer
        except DamagedObjectError as error:
            one_line(error, folder.join("index.parquet"))
            noticed += 1
    assert noticed > 40


@pytest.mark.parametrize("cut", [0, 3, 200, -1])
def test_truncated_index_is_reported(store, cut):
    folder = indexed(store)
    folder.write("index.parquet", folder.read("index.parquet")[:cut])
    with pytest.raises(DamagedObjectError) as caught:
        ShardIndex.read(folder)
    one_line(caught.value, folder.join("index.parquet"))


def table(**options):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [f"word {n}" for n in range(500)]}), buffer, **options)
    return buffer.getvalue()


WHOLE = {
    "a.json": json.dumps({"a": [1, 2]}).encode(),
    "zstd.parquet": table(compression="zstd"),
    "plain.parquet": table(compression="none", use_dictionary=False, write_page_checksum=True),
    "model.safetensors": save({"w": np.arange(10.0), "b": np.zeros((2, 3))}, {"format": "pt"}),
    "empty.safetensors": save({}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_content_is_accepted_and_truncated_content_refused(store, name):
    url = f"{OUTPUT}/{name}"
    store.write(url, WHOLE[name])
    check_content(store, url, len(WHOLE[name]))
    for size in (0, 4, len(WHOLE[name]) // 2, len(WHOLE[name]) - 1):
        store.write(url, WHOLE[name][:size])
        with pytest.raises(DamagedObjectError) as caught:
            check_content(store, url, size)
        one_line(caught.value, store.join(url))


@pytest.mark.parametrize("name", ["zstd.parquet", "plain.parquet"])
def test_tables_are_checked_to_their_end(store, name):
    data = WHOLE[name]
    store.write(f"{OUTPUT}/{name}", data[:60] + bytes(60) + data[120:])
    with pytest.raises(DamagedObjectError):
        check_content(store, f"{OUTPUT}/{name}", len(data))


def test_objects_of_another_kind_and_missing_ones_are_reported(store):
    store.write(f"{OUTPUT}/x.tar", b"read by its index")
    check_content(store, f"{OUTPUT}/x.tar", 3)
    with pytest.raises(ObjectMissingError):
        check_content(store, f"{OUTPUT}/gone.json", 3)


def test_safetensors_and_system_errors_are_reported():
    url = f"file:///x/{OUTPUT}/m.safetensors"
    with pytest.raises(DamagedObjectError, match="SafetensorError"), readable(url):
        load(b"12345678nonsense")
    with pytest.raises(OSError, match="No space"), readable(url):
        raise OSError(28, "No space left on device")
    with pytest.raises(ObjectStoreError, match="away"), readable(url):
        raise ObjectStoreError("the server is away")
    with pytest.raises(AssertionError), readable(url):
        raise AssertionError("a mistake of ours")


def test_remedy_for_objects_that_no_stage_made():
    assert "part file" in remedy("file:///somewhere/x.tar")
    assert "--url file:///a/b`" in remedy(f"file:///a/b/{OUTPUT}/train/0.tar")
    assert "--url s3://bucket`" in remedy(f"s3://bucket/{OUTPUT}")


def test_damage_error_can_be_pickled():
    error = DamagedObjectError("x is damaged", "because")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason) == ("x is damaged", "because")


@pytest.mark.parametrize("size", [0, 5, (8 << 20) + 3])
def test_digests_of_large_objects_are_read_in_pieces(store, size, monkeypatch):
    import hashlib

    data = random.Random(size).randbytes(size)
    store.write("x", data)
    longest, read = [], ObjectStore.read

    def watched(self, *arguments):
        longest.append(len(data := read(self, *arguments)))
        return data

    monkeypatch.setattr(ObjectStore, "read", watched)
    assert object_sha256(store, "x", size) == hashlib.sha256(data).hexdigest()
    assert max(longest) <= 8 << 20
