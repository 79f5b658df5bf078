"""Accuracy of speech as it comes: `python -m benchmarks.streaming --config configs/fsdd_streaming.yaml [--model M]`.

Clips of the configuration's test set are recognized whole, with all the context, and as streams with chunks of several
sizes. For each: the word error rate, the unstable partial word ratio (words of partial results that changed, to the
words of final ones), the seconds from the end of a word to the first result that has it in its place for good, as
audio that had to be heard and without the time of computing, and the time of computing as a share of the audio's.
"""

import json
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.silence import clip_arguments, load_clips, open_model
from recognition.frame_stream import FrameStream, FrameStreamConfig
from recognition.recognizer import Recognizer
from recognition.streaming import StreamResult
from speech.scoring import score_sets

PIECE_S = 0.02
"""Audio that a stream gets at once."""


@dataclass
class Row:
    """What was measured with one size of chunks; `chunk_ms` is 0 for whole recordings."""

    chunk_ms: float
    wer: float
    unstable: float
    latency_s: float
    """Median over the words."""
    real_time_factor: float


def whole(recognizer: Recognizer[object], clips: list[Tensor], said: list[tuple[str, str, str]]) -> Row:
    """Recognize the clips one by one, each as a whole."""
    begin, texts = time.perf_counter(), []
    for clip in clips:
        (hypothesis,) = recognizer.search(recognizer.encode(clip[None], torch.tensor([len(clip)])))
        texts.append(hypothesis.text)
    seconds = sum(map(len, clips)) / recognizer.spec.sample_rate
    return Row(0.0, _wer(said, texts), 0.0, 0.0, (time.perf_counter() - begin) / seconds)


def streamed(
    recognizer: Recognizer[object], clips: list[Tensor], said: list[tuple[str, str, str]], chunk_ms: float
) -> Row:
    """Recognize the clips one by one, each as a stream."""
    begin, rate = time.perf_counter(), recognizer.spec.sample_rate
    texts: list[str] = []
    latencies: list[float] = []
    changed = shown = 0
    for clip in clips:
        stream, heard = FrameStream(recognizer, FrameStreamConfig(chunk_ms=chunk_ms)), []
        for number, piece in enumerate(torch.split(clip, max(1, int(PIECE_S * rate))), 1):
            heard += [(number * PIECE_S, result) for result in stream.accept(piece.numpy())]
        heard += [(len(clip) / rate, result) for result in stream.finish()]
        texts.append(" ".join(result.text for _, result in heard if result.final))
        latencies += _latencies(heard)
        changed, shown = changed + stream.changed_words, shown + stream.shown_words
    seconds = sum(map(len, clips)) / rate
    return Row(
        chunk_ms,
        _wer(said, texts),
        changed / max(1, shown),
        float(np.median(latencies)) if latencies else 0.0,
        (time.perf_counter() - begin) / seconds,
    )


def _latencies(heard: list[tuple[float, StreamResult]]) -> list[float]:
    """For each word of a final result, seconds from its end to the first of the results that keep it."""
    found = []
    for final in (result for _, result in heard if result.final):
        own = [(at, [word.word for word in result.words]) for at, result in heard if result.segment == final.segment]
        for place, word in enumerate(final.words):
            since = None
            for at, words in reversed(own):
                if words[place : place + 1] != [word.word]:
                    break
                since = at
            if since is not None:
                found.append(since - word.start - word.duration)
    return found


def _wer(said: list[tuple[str, str, str]], texts: list[str]) -> float:
    rows = [(who, ref, text, speaker, "") for (who, ref, speaker), text in zip(said, texts, strict=True)]
    return float(score_sets(rows).wer or 0.0)


def main() -> None:
    """Print a row for whole recordings, and one for each size of chunks."""
    parser = clip_arguments(__doc__, clips=1000, levels=())
    parser.add_argument("--chunk-ms", type=float, nargs="*", default=(80, 160, 320, 640))
    options = parser.parse_args()
    transcriber, run = open_model(options)
    recognizer = transcriber.recognizer
    clips, said = load_clips(run, options.test_set, options.clips, recognizer.spec.sample_rate)
    rows = [whole(recognizer, clips, said)]
    rows += [streamed(recognizer, clips, said, chunk_ms) for chunk_ms in options.chunk_ms]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        what = f"{row.chunk_ms:g} ms" if row.chunk_ms else "whole"
        print(
            f"{what:>8}: WER {100 * row.wer:.2f} %, {row.unstable:.2f} words changed for each final one, "
            f"word after {row.latency_s:.2f} s, real-time factor {row.real_time_factor:.3f}"
        )


if __name__ == "__main__":
    main()
