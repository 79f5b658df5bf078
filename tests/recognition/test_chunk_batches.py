"""Streams in threads of their own share the network: what waits at the same time is computed together."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import wait_until

from recognition.chunk_batches import ChunkBatches
from speech.models import ChunkConfig, ConformerConfig, build_model

DIM, CHUNK = 16, 4


@pytest.fixture
def model():
    cfg = ConformerConfig(dim=DIM, layers=2, heads=2, kernel=5, feed_forward=2, channels=3, chunk=ChunkConfig(left=8))
    torch.manual_seed(0)
    return build_model(cfg, 12, 7).eval()


class Gate:
    """Computes as a model does, after `opened`; notes how many streams each batch has."""

    def __init__(self, model, monkeypatch):
        self.opened, self.sizes, self._advance = threading.Event(), [], model.advance
        monkeypatch.setattr(model, "advance", self)

    def __call__(self, part, chunk, layers):
        self.sizes.append(len(part))
        assert self.opened.wait(60)
        with torch.inference_mode():
            return self._advance(part, chunk, layers)


def spoken(model, count, frames=CHUNK):
    """A chunk of each of some streams, and what the layers remember of each."""
    parts = torch.randn(count, frames, DIM, generator=torch.Generator().manual_seed(1))
    layers = [model.advance(torch.randn(1, CHUNK, DIM), CHUNK, model.layers_before(1))[1] for _ in range(count)]
    return [(part[None], CHUNK, memory) for part, memory in zip(parts, layers, strict=True)]


def together(batches, streams, gate):
    """The answers of streams in threads, of which the first computes until the others wait."""
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = []
        for number, stream in enumerate(streams):
            answers.append(pool.submit(batches.advance, *stream))
            wait_until(lambda number=number: gate.sizes and len(batches._waiting) == number)
        gate.opened.set()
        return answers


@torch.inference_mode()
def test_chunks_that_wait_are_computed_together_and_give_what_each_gives_alone(model, monkeypatch):
    streams = spoken(model, 6)
    expected = [model.advance(*stream) for stream in streams]
    gate = Gate(model, monkeypatch)
    answers = [answer.result() for answer in together(ChunkBatches(model, at_once=1), streams, gate)]
    assert gate.sizes == [1, 5]
    for (scores, layers), (other, others) in zip(answers, expected, strict=True):
        torch.testing.assert_close(scores, other, atol=1e-5, rtol=1e-5)
        for memory, same in zip(layers, others, strict=True):
            torch.testing.assert_close(memory, same, atol=1e-5, rtol=1e-5)
            # a stream keeps nothing of the others
            assert [x.untyped_storage().nbytes() for x in memory] == [x.untyped_storage().nbytes() for x in same]


@torch.inference_mode()
def test_only_chunks_of_equal_shapes_are_computed_together(model, monkeypatch):
    short, long = spoken(model, 3), spoken(model, 2, frames=2 * CHUNK)
    gate = Gate(model, monkeypatch)
    answers = together(ChunkBatches(model, at_once=1), [short[0], long[0], short[1], long[1], short[2]], gate)
    assert sorted(gate.sizes) == [1, 2, 2]
    assert [answer.result()[0].shape[1] for answer in answers] == [CHUNK, 2 * CHUNK, CHUNK, 2 * CHUNK, CHUNK]


@torch.inference_mode()
def test_batches_are_bounded(model, monkeypatch):
    monkeypatch.setattr("recognition.chunk_batches._MOST", 3)
    streams = spoken(model, 9)
    gate = Gate(model, monkeypatch)
    answers = together(ChunkBatches(model, at_once=1), streams, gate)
    assert all(answer.result()[0].shape == (1, CHUNK, 7) for answer in answers)
    assert gate.sizes == [1, 3, 3, 2]


@torch.inference_mode()
def test_a_chunk_does_not_wait_while_a_core_is_free(model, monkeypatch):
    streams = spoken(model, 3)
    gate = Gate(model, monkeypatch)
    batches = ChunkBatches(model, at_once=2)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(batches.advance, *stream) for stream in streams]
        wait_until(lambda: len(gate.sizes) == 2 and len(batches._waiting) == 1)
        gate.opened.set()
        assert all(len(answer.result()[0]) == 1 for answer in answers)
    assert gate.sizes == [1, 1, 1]


@torch.inference_mode()
def test_an_error_reaches_all_streams_of_its_batch_and_the_next_batch_is_computed(model, monkeypatch):
    streams = spoken(model, 4)
    gate = Gate(model, monkeypatch)
    gate._advance = lambda part, chunk, layers: (_ for _ in ()).throw(RuntimeError("out of memory"))
    batches = ChunkBatches(model, at_once=1)
    for answer in together(batches, streams, gate):
        with pytest.raises(RuntimeError, match="out of memory"):
            answer.result()
    monkeypatch.undo()
    assert batches.advance(*streams[0])[0].shape == (1, CHUNK, 7)
