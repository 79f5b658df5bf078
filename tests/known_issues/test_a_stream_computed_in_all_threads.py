"""A stream computed its chunks in all of torch's threads: on two busy cores that took twelve times the CPU time of one
thread (200 digits, five sizes of chunks), and a server's streams disturbed each other.
"""

import torch
from support import tiny_bundle

from recognition.frame_stream import FrameStream
from recognition.recognizer import Recognizer
from recognition.streaming import StreamResult
from speech.models import ChunkConfig, ConformerConfig


def test_chunks_are_computed_and_searched_in_one_thread(tmp_path, monkeypatch, two_threads):
    tiny_bundle(tmp_path, model=ConformerConfig(dim=8, layers=1, heads=1, channels=1, chunk=ChunkConfig()))
    stream, threads = FrameStream(Recognizer.load(tmp_path)), {}

    def watch(place, name):
        real = getattr(place, name)

        def watched(*args, **kwargs):
            threads.setdefault(name, set()).add(torch.get_num_threads())
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, watched)

    for place, name in [(stream._features, "accept"), (stream, "_outputs"), (stream, "_searched"), (stream, "_close")]:
        watch(place, name)
    results = [result for _ in range(4) for result in stream.accept(torch.randn(8000).numpy() / 8)] + stream.finish()
    assert all(isinstance(result, StreamResult) for result in results)
    assert threads == {name: {1} for name in ("accept", "_outputs", "_searched", "_close")}
    assert torch.get_num_threads() == 2
