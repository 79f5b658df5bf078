"""Malicious JSON, YAML, Parquet and safetensors."""

import gzip
import json
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError
from safetensors.torch import load

from recognition.bundle import BundleError, BundleSpec, load_bundle
from storage.corpora import open_corpus
from storage.index import INDEX_NAME, SCHEMA, ShardIndex, ShardIndexError
from storage.objects import ObjectStore
from tasks.config.pipeline import ConfigError, load_config
from training.coordinator.journal import parse_lines
from training.coordinator.messages import CoordinatorError, read_request
from training.job import TrainJob

DEEP = "[" * 100_000
NUMBER = '{"step": ' + "9" * 5000 + "}"
SMALL = "name: x\ndata: {sources: [{kind: table, path: x.csv}]}\n"
LAUGHS = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n"
LAUGHS += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
YAML = {
    "an object": SMALL + "seed: !!python/object/apply:os.system ['touch {marker}']",
    "a module": SMALL + "seed: !!python/module:os",
    "a name": SMALL + "seed: !!python/name:os.system",
    "a new object": SMALL + "seed: !!python/object/new:os.system ['touch {marker}']",
    "brackets without end": SMALL + "decode: " + "{a: " * 2_000,
    "nine lines that stand for a billion values": LAUGHS + SMALL + "decode: *a8\n",
    "a list in itself": SMALL + "decode: &x [*x]\n",
    "a number without end": SMALL + "seed: " + "9" * 5000,
}


@pytest.mark.parametrize("name", YAML)
def test_malicious_configuration_creates_no_objects_and_is_refused(tmp_path, name):
    marker, path = tmp_path / "marker", tmp_path / "c.yaml"
    path.write_text(YAML[name].replace("{marker}", str(marker)))
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(path)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["{a: " * 2_000, "!!python/name:os.system"])
def test_malicious_override_creates_no_objects_and_is_refused(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match="--set"):
        load_config(path, [f"seed={text}"])


@pytest.mark.parametrize("text", [DEEP, DEEP.replace("[", '{"a":'), NUMBER, "\ud800".encode("utf-8", "surrogatepass")])
def test_deeply_nested_or_huge_json_is_refused_by_each_reader(tmp_path, text):
    data = text if isinstance(text, bytes) else text.encode()
    store = ObjectStore(str(tmp_path))
    store.write("x.json", data)
    with pytest.raises(ValueError, match=r"x\.json"):
        store.read_json("x.json")
    with pytest.raises(CoordinatorError):
        read_request(data)
    assert list(parse_lines([data.decode(errors="replace"), '{"kind": "end"}'])) == [{"kind": "end"}]
    for model in (BundleSpec, TrainJob):
        with pytest.raises(ValueError):
            model.model_validate_json(data)
    manifest = tmp_path / "corpus.jsonl"
    manifest.write_bytes(b'{"audio": "a.wav", "text": "x"}\n' + data + b"\n")
    reader = open_corpus("table", str(manifest))
    list(reader)
    assert "bad-line" in [problem.reason for problem in reader.problems]


def test_endless_line_in_a_compressed_manifest_takes_bounded_memory(tmp_path, monkeypatch):
    from storage.corpora import base

    path = tmp_path / "m.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"n": 1}\n' + b" " * 5_000_000 + b'\n{"n": 2}\n')
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(base, "_LONGEST_LINE", 1 << 16)
    rows = list(base.read_json_lines(path))
    assert [row for _, row in rows] == [{"n": 1}, "not UTF-8, or has null characters or more than 16 MB", {"n": 2}]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                b'{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}',
                b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
                b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,9223372036854775807]}}',
                b'{"w":{"dtype":"F32","shape":[1,-1],"data_offsets":[0,4]}}',
            )
        ),
    ],
)
def test_weights_with_absurd_headers_are_refused(tmp_path, data):
    with pytest.raises(SafetensorError):
        load(data)
    (tmp_path / "bundle.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(BundleError):
        load_bundle(tmp_path)


def columns(count):
    """Many equal rows, which Parquet stores once."""
    zero = {field.name: pa.scalar("x" if pa.types.is_string(field.type) else 0, field.type) for field in SCHEMA}
    return pa.table({name: pa.repeat(value, count) for name, value in zero.items()}, schema=SCHEMA)


def index_bytes(tmp_path, count, shards):
    meta = {b"starling.shards": json.dumps(shards).encode(), b"starling.metadata": b'{"payload": "flac"}'}
    path = tmp_path / INDEX_NAME
    pq.write_table(columns(count).replace_schema_metadata(meta), path, compression="zstd")
    return path


def test_an_index_of_a_few_bytes_that_claims_millions_of_rows_is_refused(tmp_path):
    record = {"name": "000000.tar", "count": 300_000, "seconds": 0.0, "bytes": 10, "sha256": "0" * 64}
    path = index_bytes(tmp_path, 300_000, [record])
    assert path.stat().st_size < 200_000
    with pytest.raises(ShardIndexError, match="more than once"):
        ShardIndex.read(ObjectStore(str(tmp_path)))


def test_index_with_deeply_nested_metadata_is_refused(tmp_path):
    table = columns(1).replace_schema_metadata({b"starling.shards": DEEP.encode(), b"starling.metadata": b"{}"})
    pq.write_table(table, tmp_path / INDEX_NAME)
    with pytest.raises(ShardIndexError):
        ShardIndex.read(ObjectStore(str(tmp_path)))


@pytest.mark.parametrize("cut", [4, 12, 200])
def test_a_parquet_file_with_a_damaged_footer_is_refused(tmp_path, cut):
    path = index_bytes(tmp_path, 3, [])
    data = path.read_bytes()
    path.write_bytes(data[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")
    with pytest.raises(ShardIndexError):
        ShardIndex.read(ObjectStore(str(tmp_path)))
    path.write_bytes(data[:-cut] + b"PAR1")
    with pytest.raises(ShardIndexError):
        ShardIndex.read(ObjectStore(str(tmp_path)))
