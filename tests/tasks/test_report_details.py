"""Audio of single utterances, from shards that are written here; tests/tasks/test_report.py has a whole run's."""

import base64
from types import SimpleNamespace

import pytest
import torch

from speech.audio import encode_flac
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from tasks.stages.report_details import audio_of

SIZES = {"a": 800, "b": 1600, "c": 400}
"""Samples of the utterances, each in a shard of its own."""


@pytest.fixture
def run(tmp_path):
    store = ObjectStore(str(tmp_path / "shards" / "test"))
    parts = []
    for name, size in SIZES.items():
        wave = torch.rand(size, generator=torch.Generator().manual_seed(size)) - 0.5
        row = {"duration": size / 8000, "num_frames": size, "sample_rate": 8000}
        parts.append(write_shard(store, f"{name}.tar", [Sample(name, {"flac": encode_flac(wave, 8000)}, row)], "flac"))
    build_index(parts, {"payload": "flac"}).write(store)
    shards = SimpleNamespace(store=ObjectStore(str(tmp_path / "shards")))
    return SimpleNamespace(result={"shard": shards}.__getitem__, cache_folder=tmp_path / "cache")


def decoded(urls):
    return {name: base64.b64decode(url.removeprefix("data:audio/flac;base64,")) for name, url in urls.items()}


def test_audio_of_the_first_utterances_that_fit_is_there(run):
    every = decoded(audio_of(run, "test", ["b", "a", "c"], 1_000_000))
    assert list(every) == ["b", "a", "c"]
    assert all(data.startswith(b"fLaC") for data in every.values())
    sizes = {name: len(data) for name, data in every.items()}
    assert list(audio_of(run, "test", ["a", "b", "c"], sizes["a"] + sizes["b"])) == ["a", "b"]
    assert list(audio_of(run, "test", ["a", "b", "c"], sizes["a"] + sizes["b"] - 1)) == ["a"]  # the next is not tried


def test_unknown_utterances_and_damaged_shards_are_left_out(run, tmp_path):
    path = tmp_path / "shards" / "test" / "b.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(bytes(data))
    assert list(audio_of(run, "test", ["unknown", "a", "b", "c"], 1_000_000)) == ["a", "c"]


def test_without_room_for_audio_no_shard_is_read(run):
    unreadable = SimpleNamespace(result={}.__getitem__, cache_folder=run.cache_folder)
    assert audio_of(unreadable, "test", ["a"], 0) == {}
    with pytest.raises(KeyError):
        audio_of(unreadable, "test", ["a"], 1)
