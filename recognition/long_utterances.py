"""Utterances that are longer than an encoder's positions, such as Whisper's 30 s: recognized in pieces.

They are cut in pauses, and the frames of the pieces follow each other. A decoder of frames, and its language model,
sees one utterance. A decoder network attends to no more frames than its encoder has positions: the pieces are searched
one by one, and their hypotheses are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from recognition.alternatives import joined_alternatives, joined_confidence, joined_language, timed_alternatives
from recognition.systems.base import FrameOutputs
from speech.frontend import FrontEnd
from speech.hypotheses import Alternative, Hypothesis
from speech.vad import Vad, build_vad, cut_whole, default_vad
from speech.words import Piece

PIECES = 8
"""Pieces of an utterance that are computed at once."""

OutputsOf = Callable[[Tensor, Tensor, Sequence[str] | None], FrameOutputs]
"""What a network puts out for inputs [batch, ...], their lengths, and their speakers."""


@cache
def _vad() -> Vad:
    return build_vad(default_vad())


def pieces_of(item: Tensor, most: int, frontend: FrontEnd) -> list[Tensor]:
    """Cut an utterance in its pauses.

    Args:
        item: Samples [num_samples], or stored features [frames, F], which are cut at the softest frames.
        most: Samples or frames of the longest piece.
        frontend: Of the model.
    """
    if item.ndim == 1:
        return cut_whole(_vad(), item, frontend.sample_rate, max(3, most))
    levels, start, pieces = frontend.cfg.levels(frontend.extract, item), 0, []
    while len(item) - start > most:
        tail = start + most * 2 // 3
        end = tail + 1 + int(levels[tail : start + most - 1].argmin()) if most > 2 else start + most
        pieces.append(item[start:end])
        start = end
    return [*pieces, item[start:]]


def outputs_in_pieces(
    outputs: OutputsOf,
    frontend: FrontEnd,
    inputs: Tensor,
    lengths: Tensor,
    speakers: Sequence[str] | None,
    most: int,
) -> FrameOutputs:
    """What a network puts out for a batch in which utterances are longer than it can read.

    Args:
        outputs: Computes it for shorter ones.
        frontend: Of the model.
        inputs: Waveforms [batch, samples] or stored features [batch, frames, F].
        lengths: Samples or frames of each utterance [batch].
        speakers: Speaker of each utterance.
        most: Samples or frames of the longest one that the model can read.
    """
    step = 1 / frontend.sample_rate if inputs.ndim == 2 else frontend.cfg.hop_ms / 1000
    joined: list[list[Tensor]] = []
    starts: list[Tensor] = []
    places: dict[int, tuple[Piece, ...]] = {}
    for row, length in enumerate(lengths.tolist()):
        pieces = pieces_of(inputs[row, :length], most, frontend)
        parts: list[list[Tensor]] = []
        begins: list[Piece] = []
        passed = frames_passed = 0
        for first in range(0, len(pieces), PIECES):
            some = pieces[first : first + PIECES]
            padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            who = [speakers[row]] * len(some) if speakers is not None else None
            given = outputs(padded, torch.tensor([len(piece) for piece in some]), who)
            starts += [given.starts[0]] if first == 0 else []
            for number, (piece, count) in enumerate(zip(some, given.frames.tolist(), strict=True)):
                begin = passed * step
                begins.append(Piece(frames_passed, begin + float(given.starts[number]), begin))
                parts.append([tensor[number, :count] for tensor in given.tensors])
                passed, frames_passed = passed + len(piece), frames_passed + count
        joined.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
        if len(pieces) > 1:
            places[row] = tuple(begins[1:])
    counts = torch.tensor([len(tensors[0]) for tensors in joined])
    whole = (torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True) for tensors in zip(*joined, strict=True))
    return FrameOutputs(tuple(whole), counts, torch.stack(starts), places)


def joined_hypothesis(parts: Sequence[Hypothesis], firsts: Sequence[int], count: int) -> Hypothesis:
    """The hypothesis of an utterance from those of its pieces.

    Args:
        parts: Of each piece, in order.
        firsts: Number of each piece's first frame within the utterance.
        count: How many hypotheses are asked for.
    """
    placed = [
        replace(
            part,
            frames=[first + frame for frame in part.frames],
            word_frames=[(first + begin, first + end) for begin, end in part.word_frames],
        )
        for part, first in zip(parts, firsts, strict=True)
    ]
    several = joined_alternatives((timed_alternatives(part, None) for part in parts), count) if count > 1 else []
    return Hypothesis(
        tokens=[token for part in parts for token in part.tokens],
        text=" ".join(part.text for part in parts if part.text),
        score=sum(part.score for part in parts),
        frames=[frame for part in placed for frame in part.frames],
        confidence=joined_confidence(parts),
        word_confidences=[confidence for part in parts for confidence in part.word_confidences],
        nbest=[Alternative(option.text, option.score, option.posterior) for option in several],
        word_frames=[frames for part in placed for frames in part.word_frames],
        language=joined_language(parts),
    )
