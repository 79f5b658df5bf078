"""Batches from shards, and their reading ahead."""

import io
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import wait_until

from recognition.data.dataset import Batch, SpeechDataset, read_ahead
from speech.audio import decode_audio
from speech.tokens import TokenConfig, TokenError, train_tokenizer
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError, ShardReader
from storage.shards import Sample, build_index, write_shard


def open_set(url, **options):
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    return SpeechDataset(index, ShardReader(store, index), **options)


def test_a_batch_is_its_utterances_padded(corpus):
    tokenizer = corpus.spec().build_tokenizer()
    dataset = open_set(corpus.url("train"), tokenizer=tokenizer)
    rows = [7, 0, 31]
    batch = dataset.batch(rows)
    assert len(dataset) == 48
    assert batch.ids == ["t007", "t000", "t031"]
    assert batch.speakers == ["speaker1", "speaker0", "speaker1"]
    for place, row in enumerate(rows):
        sample = corpus.train[row]
        wave, _ = decode_audio(sample.members["flac"])
        length = int(batch.lengths[place])
        assert torch.equal(batch.inputs[place, :length], wave)
        assert not batch.inputs[place, length:].any()
        tokens = batch.tokens[place, : int(batch.token_lengths[place])].tolist()
        assert tokenizer.decode(tokens) == batch.texts[place] == sample.row["text"]
    assert batch.seconds == pytest.approx(sum(corpus.train[row].row["duration"] for row in rows))


def test_utterances_cost_as_much_of_a_batch_as_is_computed_for_them(corpus):
    plain, padded = open_set(corpus.url("train")), open_set(corpus.url("train"), min_seconds=0.6)
    assert np.array_equal(plain.computed_seconds, plain.durations)
    assert np.array_equal(padded.durations, plain.durations)
    assert np.array_equal(padded.computed_seconds, np.maximum(plain.durations, 0.6))
    assert padded.batch([0]).seconds == plain.durations[0]


def test_without_a_tokenizer_there_are_no_tokens(corpus):
    batch = open_set(corpus.url("valid")).batch([0, 1])
    assert batch.tokens.shape == (2, 0)
    assert batch.token_lengths.tolist() == [0, 0]
    assert batch.texts == [sample.row["text"] for sample in corpus.valid[:2]]


def test_audio_is_resampled_when_asked(corpus):
    plain, doubled = open_set(corpus.url("valid")), open_set(corpus.url("valid"), sample_rate=16000)
    assert len(doubled.load(0)) == 2 * len(plain.load(0))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stored_features_are_read_into_batches(tmp_path, dtype):
    feats = [np.random.default_rng(k).normal(size=(4 + k, 3)).astype(dtype) for k in range(3)]
    samples = []
    for number, array in enumerate(feats):
        buffer = io.BytesIO()
        np.save(buffer, array)
        row = {"duration": 1.0, "num_frames": len(array), "sample_rate": 8000, "text": "x"}
        samples.append(Sample(f"u{number}", {"npy": buffer.getvalue()}, row))
    store = ObjectStore(str(tmp_path))
    build_index([write_shard(store, "0.tar", samples, "npy")], {}).write(store)
    batch = open_set(str(tmp_path)).batch([2, 0])
    assert batch.inputs.shape == (2, 6, 3)
    assert batch.inputs.dtype == torch.float32
    assert batch.lengths.tolist() == [6, 4]
    assert torch.equal(batch.inputs[1, :4], torch.from_numpy(feats[0]).float())


def test_pickled_features_are_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    row = {"duration": 1.0, "num_frames": 1, "sample_rate": 8000, "text": "x"}
    store = ObjectStore(str(tmp_path))
    part = write_shard(store, "0.tar", [Sample("u", {"npy": buffer.getvalue()}, row)], "npy")
    build_index([part], {}).write(store)
    with pytest.raises(ValueError, match="allow_pickle"):
        open_set(str(tmp_path)).load(0)


def test_audio_that_cannot_be_decoded_in_a_whole_shard_is_named(tmp_path):
    row = {"duration": 1.0, "num_frames": 8000, "sample_rate": 8000, "text": "x"}
    store = ObjectStore(tmp_path)
    build_index([write_shard(store, "0.tar", [Sample("u 1", {"flac": b"no audio"}, row)], "flac")], {}).write(store)
    with pytest.raises(ShardError, match=r"0\.tar: utterance 'u 1' cannot be decoded .* --from shard") as caught:
        open_set(str(tmp_path)).load(0)
    assert caught.value.shard.name == "0.tar"


def test_text_outside_the_vocabulary_is_refused_when_a_set_is_opened(corpus):
    tokenizer = train_tokenizer(TokenConfig(kind="words"), ["ba ce"])
    with pytest.raises(TokenError, match=r"di|fu|gu|ly"):
        open_set(corpus.url("train"), tokenizer=tokenizer)


def fake_batch(number):
    none = torch.zeros(0)
    return Batch(np.array([number]), [str(number)], [], [], none, none, none, none, 0.0)


def numbers(batches):
    return [int(batch.rows[0]) for batch in batches]


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_reading_ahead_keeps_the_order(depth):
    assert numbers(read_ahead(fake_batch, range(20), depth)) == list(range(20))


def test_empty_plan_yields_no_batches():
    assert numbers(read_ahead(fake_batch, [])) == []


def test_at_most_depth_batches_are_held():
    loaded = []
    released = threading.Semaphore(0)

    def load(number):
        loaded.append(number)
        released.release()
        return fake_batch(number)

    batches = read_ahead(load, range(100), depth=2)
    assert numbers([next(batches)]) == [0]
    for _ in range(4):  # one was consumed, two wait, one is being loaded
        assert released.acquire(timeout=240)
    assert not released.acquire(timeout=0.3)
    assert loaded == [0, 1, 2, 3]
    batches.close()


class DiskOnFireError(OSError):
    pass


@pytest.mark.parametrize("bad", [0, 3])
def test_an_error_of_the_loader_is_raised_at_the_consumer(bad):
    def load(number):
        if number == bad:
            raise DiskOnFireError("the disk is on fire")
        return fake_batch(number)

    seen = []
    batches = read_ahead(load, range(10))
    with pytest.raises(DiskOnFireError, match="on fire"):
        seen.extend(int(batch.rows[0]) for batch in batches)
    assert seen == list(range(bad))


def read_ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_a_consumer_that_stops_early_stops_the_loader():
    loaded = []

    def load(number):
        loaded.append(number)
        return fake_batch(number)

    batches = read_ahead(load, range(10_000), depth=2)
    next(batches)
    batches.close()
    wait_until(lambda: not read_ahead_threads())
    assert len(loaded) < 10


def test_a_damaged_shard_is_named(corpus, tmp_path):
    url = tmp_path / "copy"
    url.mkdir()
    for file in (corpus.folder / "valid").glob("*.*"):
        (url / file.name).write_bytes(file.read_bytes())
    shard = url / "000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1024] + bytes([1]) * 1024)
    dataset = open_set(str(url))
    plan = [np.array([0, 1]), np.array([11])]
    with pytest.raises(ShardError, match=r"000001\.tar"):
        list(read_ahead(dataset.batch, plan))


def test_batches_are_plain_values(corpus):
    batch = open_set(corpus.url("valid")).batch([3])
    assert replace(batch, seconds=1.0).ids == batch.ids == ["v003"]
