"""The final results of a transducer's stream were those of the search: `rescore_lm` and `word_score` had no effect."""

import torch
from support import load_beside

from recognition.frame_stream import FrameStream, FrameStreamConfig
from speech.decoding import TransducerDecodeConfig

streams = load_beside(__file__, "../recognition/test_frame_stream.py")


def test_stream_ends_with_the_hypothesis_of_the_whole_recording():
    cfg, samples = TransducerDecodeConfig(beam=100, beam_tokens=0), streams.speech(0.5)
    plain = streams.transducer(cfg, False)
    encoded = plain.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
    ranked = plain.with_decoder(cfg.model_copy(update={"word_score": -30.0}))
    (first,), (whole,) = plain.search(encoded), ranked.search(encoded)
    assert whole.text != first.text
    stream = FrameStream(ranked, FrameStreamConfig(chunk_ms=640, endpoint=streams.NO_ENDPOINT))
    results = streams.streamed(stream, samples, 3000)
    assert [result.text for result in results if result.final] == [whole.text]
