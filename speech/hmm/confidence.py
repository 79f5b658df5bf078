"""Confidence of an alignment: posteriors of the frames' phones, after "goodness of pronunciation".

See Witt & Young 2000. All tied states are equally probable a priori. Phones that differ only in stress or position
count as one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.align import Alignment
from speech.hmm.model import HmmModel
from speech.hmm.topology import Ints
from speech.hypotheses import Word


def phone_families(model: HmmModel) -> tuple[Ints, Ints]:
    """The family of each phone `[phones + 1]`, and the family of each pdf `[P]`; families are numbered from 0."""
    phones = model.tree.phones
    of_phone = np.zeros(len(phones) + 1, dtype=np.int32)
    for number, family in enumerate(phones.families()):
        of_phone[family] = number
    of_pdf = np.zeros(model.gmm.num_pdfs, dtype=np.int32)
    keys = model.transitions.keys
    of_pdf[keys[:, 2]] = of_phone[keys[:, 0]]
    return of_phone, of_pdf


def frame_confidences(model: HmmModel, frames: Tensor, alignment: Alignment) -> NDArray[np.float64]:
    """Posterior of the aligned phone at each frame.

    Args:
        model: The model.
        frames: Transformed features `[T, D]`.
        alignment: The alignment of the utterance.

    Returns:
        `[T]`, 0 to 1.
    """
    _, families = phone_families(model)
    return pdf_confidences(model.gmm.log_likelihoods(frames), alignment.pdfs(model.tree), families)


def pdf_confidences(log_likelihoods: Tensor, pdfs: Ints, families: Ints) -> NDArray[np.float64]:
    """Posterior of each frame's phone.

    Args:
        log_likelihoods: Of all pdfs, `[T, P]`.
        pdfs: int32 `[T]`, the pdf of each frame.
        families: int32 `[P]`, the phone of each pdf, from `phone_families`.

    Returns:
        `[T]`, 0 to 1.
    """
    device = log_likelihoods.device
    family = torch.from_numpy(families.astype(np.int64)).to(device)
    summed = log_likelihoods.new_zeros(len(log_likelihoods), int(families.max()) + 1)
    summed.index_add_(1, family, log_likelihoods.softmax(dim=1))
    chosen = family[torch.from_numpy(pdfs.astype(np.int64)).to(device)]
    found: NDArray[np.float64] = summed.gather(1, chosen[:, None])[:, 0].double().cpu().numpy()
    return found


def timed_units(
    alignment: Alignment,
    words: tuple[str, ...],
    names: tuple[str, ...],
    confidences: NDArray[np.float64],
    frame_seconds: float,
) -> tuple[list[Word], list[Word]]:
    """Words and phones with times and confidences, the means over their frames.

    Args:
        alignment: The alignment.
        words: The transcript.
        names: Names of the phones, from number 1.
        confidences: Of each frame.
        frame_seconds: Frame shift in seconds.
    """

    def unit(label: str, start: int, end: int) -> Word:
        mean = float(confidences[start:end].mean())
        return Word(label, round(start * frame_seconds, 3), round((end - start) * frame_seconds, 3), round(mean, 4))

    starts = alignment.starts.tolist()
    phones = [
        unit(names[phone - 1], start, end)
        for phone, start, end in zip(alignment.phones.tolist(), starts[:-1], starts[1:], strict=True)
    ]
    return [unit(words[number], start, end) for number, start, end in alignment.word_times()], phones
