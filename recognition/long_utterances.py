"""Utterances that are longer than an encoder's positions, such as Whisper's 30 s: recognized in pieces.

They are cut in pauses. The scores of the pieces follow each other, so a decoder, and its language model, sees one
utterance.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from speech.frontend import FrontEnd
from speech.vad import Vad, build_vad, cut_whole, default_vad

_BATCH = 8
"""Pieces of an utterance that are computed at once."""

ScoresOf = Callable[[Tensor, Tensor, Sequence[str] | None], tuple[Tensor, Tensor, Tensor]]
"""Log probabilities, frames and starts of inputs [batch, ...], their lengths, and their speakers."""


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


def scores_in_pieces(
    scores: ScoresOf,
    frontend: FrontEnd,
    inputs: Tensor,
    lengths: Tensor,
    speakers: Sequence[str] | None,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of a batch in which utterances are longer than the model can read.

    Args:
        scores: Computes those of shorter ones.
        frontend: Of the model.
        inputs: Waveforms [batch, samples] or stored features [batch, frames, F].
        lengths: Samples or frames of each utterance [batch].
        speakers: Speaker of each utterance.
        most: Samples or frames of the longest one that the model can read.

    Returns:
        Log probabilities [batch, frames, outputs], frames [batch], and starts [batch] in seconds.
    """
    joined, starts = [], []
    for row, length in enumerate(lengths.tolist()):
        pieces = pieces_of(inputs[row, :length], most, frontend)
        parts: list[Tensor] = []
        for first in range(0, len(pieces), _BATCH):
            some = pieces[first : first + _BATCH]
            padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            who = [speakers[row]] * len(some) if speakers is not None else None
            log_probs, frames, begins = scores(padded, torch.tensor([len(piece) for piece in some]), who)
            starts += [begins[0]] if first == 0 else []
            parts += [piece[:count] for piece, count in zip(log_probs, frames.tolist(), strict=True)]
        joined.append(torch.cat(parts))
    counts = torch.tensor([len(utterance) for utterance in joined])
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True), counts, torch.stack(starts)
