"""Forced alignment of a set of shards with a CTC model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from devices.portions import Portions
from recognition.bundle import load_spec
from recognition.data.dataset import Batch
from recognition.inference import open_set, whole_batches
from recognition.recognizer import Recognizer
from recognition.systems.acoustic import FrameRecognizer, Scores
from speech.ctc_alignment import AlignmentError, CtcAlignment, align_tokens
from speech.decoding.greedy import GreedyConfig, GreedyDecoder
from speech.features.cmvn import CmvnStats
from speech.hypotheses import DecodeError
from storage.reading import ShardError


@dataclass(frozen=True)
class AlignedRow:
    """An utterance of a set.

    Attributes:
        row: Its row in the index.
        text: Its normalized transcript.
        heard: What the model hears without it: the best token of each frame.
        alignment: The alignment, or the reason why there is none.
    """

    row: int
    text: str
    heard: str
    alignment: CtcAlignment | str


def align_set(
    recognizer: FrameRecognizer,
    url: str,
    *,
    cache: Path,
    batch_seconds: float = 240.0,
    on_damage: Callable[[ShardError], object] | None = None,
) -> Iterator[AlignedRow]:
    """Align the transcripts of a set with its speech, utterance by utterance.

    Args:
        recognizer: The model.
        url: Store of the set's index and audio shards.
        cache: Local folder for copies of remote shards.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_damage: Called once for each damaged shard; without it the first damaged shard raises.
    """
    dataset = open_set(url, recognizer.spec.sample_rate, cache)
    portions = Portions()
    decoder = GreedyDecoder(GreedyConfig(), recognizer.tokenizer)

    def compute(part: Batch) -> Scores:
        return recognizer.encode(part.inputs, part.lengths, part.speakers)

    for batch in whole_batches(dataset, np.arange(len(dataset.index)), batch_seconds, on_damage):
        for part, scores in portions.each(batch, compute):
            heard = decoder.decode(scores.log_probs, scores.frames)
            for i, text in enumerate(part.texts):
                yield AlignedRow(int(part.rows[i]), text, heard[i].text, _aligned(recognizer, scores, i, text))


def _aligned(recognizer: FrameRecognizer, scores: Scores, i: int, text: str) -> CtcAlignment | str:
    frames = int(scores.frames[i])
    try:
        return align_tokens(
            scores.log_probs[i, :frames],
            recognizer.tokenizer,
            text,
            recognizer.frame_seconds,
            float(scores.starts[i]),
        )
    except AlignmentError as error:
        return str(error)


def load_recognizer(bundle: Path, device: str, speakers: Mapping[str, CmvnStats]) -> FrameRecognizer:
    """The recognizer of a bundle.

    Raises:
        ValueError: Its model is not a CTC model.
    """
    try:
        load_spec(bundle).system.require("forced alignment")
    except DecodeError as error:
        raise ValueError(f"{bundle} is not a CTC model: {error}") from error
    recognizer = Recognizer.load(bundle, None, device, dict(speakers))
    assert isinstance(recognizer, FrameRecognizer)
    return recognizer
