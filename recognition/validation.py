"""Loss and greedy word error rate of a set."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from devices.padding import frame_multiple, rounded_up
from recognition.data.dataset import Batch, SpeechDataset, read_ahead
from speech.decoding import GreedyConfig, build_decoder
from speech.frontend import FrontEnd
from speech.hypotheses import Hypothesis
from speech.models.networks.base import TrainableNetwork
from speech.objectives import Objective
from speech.scoring import score_sets
from speech.tokens import Tokenizer
from storage.batching import BatchLimits, plan_epoch


class Validation:
    """Accumulates the loss and the hypotheses of a set, batch by batch.

    Args:
        objective: Objective that defines the loss.
        tokenizer: Converts recognized tokens to text; None for models of tied states, and if hypotheses are given.
        comparable: Gives hypotheses the form of the transcripts; by default they have it.
    """

    def __init__(
        self,
        objective: Objective,
        tokenizer: Tokenizer | None,
        comparable: Callable[[Hypothesis], str] = attrgetter("text"),
    ) -> None:
        self._objective, self._comparable = objective, comparable
        # tied states need a graph to become words: their training is followed by loss and frame accuracy
        self._decoder = build_decoder(GreedyConfig(), tokenizer) if tokenizer else None
        self._reads = self._decoder is not None
        self._loss, self._items = 0.0, 0
        self._further: dict[str, tuple[float, int]] = {}
        self._rows: list[tuple[str, str, str, str, str]] = []

    def add(
        self, batch: Batch, log_probs: Tensor, frames: Tensor, hypotheses: Sequence[Hypothesis] | None = None
    ) -> None:
        """Add a batch.

        Args:
            batch: The utterances.
            log_probs: The model's output [batch, frames, vocab].
            frames: Output frames of each utterance [batch].
            hypotheses: What was recognized; by default what a greedy search of the output finds, for models of tokens.
        """
        self._loss += float(self._objective.losses(log_probs, frames, batch)[0].double().sum())
        self._items += self._objective.items(batch)
        for name, (value, count) in self._objective.figures(log_probs, frames, batch).items():
            total, items = self._further.get(name, (0.0, 0))
            self._further[name] = total + value, items + count
        if hypotheses is None:
            hypotheses = self._decoder.decode(log_probs, frames) if self._decoder else ()
        self._reads = self._reads or bool(hypotheses)
        for i, hypothesis in enumerate(hypotheses):
            self._rows.append((batch.ids[i], batch.texts[i], self._comparable(hypothesis), batch.speakers[i], ""))

    def figures(self) -> dict[str, float]:
        """`loss` in nats per token (or frame, as the objective counts), `wer` as a fraction, further figures.

        Models of tied states have no `wer`.
        """
        figures = {name: value / max(1, count) for name, (value, count) in self._further.items()}
        if self._reads:
            wer = score_sets(self._rows).wer
            figures["wer"] = float("nan") if wer is None else wer
        return {"loss": self._loss / max(1, self._items), **figures}


@torch.inference_mode()
def over_batches(dataset: SpeechDataset, limits: BatchLimits, add: Callable[[Batch], None]) -> dict[str, float]:
    """Give each batch of a set to a function, in a fixed order.

    Returns:
        `unreadable`: the utterances lost with damaged shards, if any.

    Raises:
        TooManyShardsError: If too many are lost for the results to be comparable.
    """
    unreadable = 0
    plan = plan_epoch(dataset.computed_seconds, batch_seconds=limits.batch_seconds, max_batch=limits.max_batch)
    for batch in read_ahead(dataset.batch, plan):
        unreadable += batch.unreadable
        if batch.ids:
            add(batch)
    return {"unreadable": float(unreadable)} if unreadable else {}


def validate(
    model: TrainableNetwork,
    frontend: FrontEnd,
    dataset: SpeechDataset,
    tokenizer: Tokenizer | None,
    objective: Objective,
    limits: BatchLimits,
    device: torch.device,
) -> dict[str, float]:
    """Compute loss and WER of a set, without augmentation and in float32, from what recognition reads.

    Returns:
        What `Validation.figures` and `over_batches` give.

    Raises:
        TooManyShardsError: As `over_batches` does.
    """
    validation = Validation(objective, tokenizer)
    # targets that are aligned to frames are those of whole utterances
    features = frontend.trimmed if tokenizer else frontend

    def add(batch: Batch) -> None:
        feats, frames = features(batch.inputs.to(device), batch.lengths.to(device), batch.speakers)[:2]
        validation.add(batch, *model(rounded_up(feats, frame_multiple(device)), frames))

    lost = over_batches(dataset, limits, add)
    return validation.figures() | lost
