"""Dynamic chunk training of a small Conformer: it learns, resumes bit for bit, and recognizes in chunks."""

import pytest
from tones import LEARNS, RATE, TINY, train_here

from recognition.frame_stream import FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from speech.audio import decode_audio
from speech.features import LogMelConfig
from speech.models import ChunkConfig

FEATURES = LogMelConfig(num_mels=16)


def streaming_spec(corpus, **changes):
    chunk = ChunkConfig(left=8, longest=6)
    model = TINY["conformer"].model_copy(update={"chunk": chunk, **changes})
    return corpus.spec("conformer", features=FEATURES, model=model)


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.variants(1)
def test_stopping_and_resuming_draws_the_same_chunks(corpus, tmp_path, stop):
    spec = streaming_spec(corpus)
    whole = train_here(corpus.job(tmp_path / "whole", spec=spec, epochs=1))
    job = corpus.job(tmp_path / "stopped", spec=spec, epochs=1)
    train_here(job, stop_at=stop)
    resumed = train_here(job)
    assert resumed.model_bytes == whole.model_bytes
    assert resumed.losses == whole.losses


@pytest.mark.slow
def test_a_chunked_conformer_learns_the_words_whole_and_in_chunks(corpus, tmp_path):
    job = corpus.job(tmp_path, spec=streaming_spec(corpus), epochs=16, average=2, optimizer={"lr": 1e-2}, **LEARNS)
    trained = train_here(job)
    assert trained.result["valid"]["wer"] == 0.0
    recognizer = Recognizer.load(trained.bundle)
    for ms in (80, 160, 640):
        for sample in corpus.valid:
            stream = FrameStream(recognizer, FrameStreamConfig(chunk_ms=ms))
            wave, _ = decode_audio(sample.members["flac"])
            results = []
            for piece in wave.split(400):
                results += stream.accept(piece.numpy())
            finals = [result for result in [*results, *stream.finish()] if result.final]
            assert " ".join(result.text for result in finals) == sample.row["text"], ms
            assert all(0 <= word.start <= len(wave) / RATE for result in finals for word in result.words)
