"""CTC loss and greedy word error rate of a set."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from speech.decoding import DecodeConfig, build_decoder
from speech.frontend import FrontEnd
from speech.models import AcousticModel
from speech.scoring import score_sets
from speech.tokens import Tokenizer
from training.batching import plan_epoch
from training.config import TrainConfig
from training.data import SpeechDataset, read_ahead
from training.shapes import frame_multiple, rounded_up


class Transcribed(Protocol):
    """Tokens of several utterances.

    Attributes:
        tokens: [batch, most tokens].
        token_lengths: [batch].
    """

    tokens: Tensor
    token_lengths: Tensor


def needed_frames(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Output frames that CTC needs at least: one a token, and a blank between two equal ones.

    Args:
        tokens: Token numbers [batch, tokens].
        lengths: Tokens of each utterance [batch].
    """
    inside = torch.arange(1, max(1, tokens.shape[1]), device=tokens.device)[None, :] < lengths[:, None]
    repeats = ((tokens[:, 1:] == tokens[:, :-1]) & inside).sum(dim=1)
    return lengths + repeats


def ctc_losses(log_probs: Tensor, frames: Tensor, batch: Transcribed) -> tuple[Tensor, int]:
    """CTC loss of each utterance (Graves et al. 2006), in nats; unalignable ones count as zero.

    Args:
        log_probs: Log probabilities [batch, frames, vocab].
        frames: Output frames of each utterance [batch].
        batch: Its transcripts.

    Returns:
        Losses [batch], and how many utterances have more tokens than their frames can hold.
    """
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        batch.tokens.to(log_probs.device, non_blocking=True),
        frames,
        batch.token_lengths.to(log_probs.device, non_blocking=True),
        reduction="none",
        zero_infinity=True,
    )
    unalignable = int((needed_frames(batch.tokens, batch.token_lengths) > frames.cpu()).sum())
    return losses, unalignable


@torch.inference_mode()
def validate(
    model: AcousticModel,
    frontend: FrontEnd,
    dataset: SpeechDataset,
    tokenizer: Tokenizer,
    cfg: TrainConfig,
    device: torch.device,
) -> dict[str, float]:
    """Loss per token and greedy WER of a set, without augmentation and in float32.

    Returns:
        `loss` in nats per token, `wer` as a fraction, and `unreadable`, utterances lost with damaged shards, if any.

    Raises:
        TooManyShardsError: So many are lost that the figures would mean something else.
    """
    decoder = build_decoder(DecodeConfig(kind="greedy"), tokenizer)
    plan = plan_epoch(dataset.durations, batch_seconds=cfg.batch_seconds, max_batch=cfg.max_batch)
    loss, tokens, unreadable = 0.0, 0, 0
    rows: list[tuple[str, str, str, str, str]] = []
    for batch in read_ahead(dataset.batch, plan):
        unreadable += batch.unreadable
        if not batch.ids:
            continue
        feats, frames = frontend(batch.inputs.to(device), batch.lengths.to(device), batch.speakers)
        feats = rounded_up(feats, frame_multiple(device))
        log_probs, out_frames = model(feats, frames)
        loss += float(ctc_losses(log_probs, out_frames, batch)[0].double().sum())
        tokens += int(batch.token_lengths.sum())
        for i, hypothesis in enumerate(decoder.decode(log_probs.float().cpu(), out_frames.cpu())):
            rows.append((batch.ids[i], batch.texts[i], hypothesis.text, batch.speakers[i], ""))
    wer = score_sets(rows).wer
    found = {"loss": loss / max(1, tokens), "wer": float("nan") if wer is None else wer}
    return found | ({"unreadable": float(unreadable)} if unreadable else {})
