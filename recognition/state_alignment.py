"""Forced alignment of a set of shards with a network of tied states (Bourlard and Morgan 1994)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from devices.padding import frame_multiple, rounded_up
from devices.portions import Portions
from recognition.bundle import BundleSpec, load_bundle
from recognition.data.dataset import Batch, SpeechDataset
from recognition.inference import whole_batches
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from speech.hmm.align import Alignment
from speech.hmm.aligner import Aligner
from speech.hmm.priors import scaled_likelihoods
from speech.hmm.steps import align_frames, no_path
from speech.hmm.utterances import InMemoryUtterance, Shard
from speech.models.networks.base import TrainableNetwork
from storage.reading import ShardError


@dataclass(frozen=True)
class StateNetwork:
    """A network whose outputs are tied states.

    Attributes:
        spec: What its bundle says.
        model: The network.
        frontend: Its front end.
        device: Where both compute.
    """

    spec: BundleSpec
    model: TrainableNetwork
    frontend: FrontEnd
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def load(cls, bundle: Path, device: torch.device, speakers: Mapping[str, CmvnStats]) -> "StateNetwork":
        """Load a network from the folder of its bundle.

        Raises:
            BundleError: The folder is no bundle, or the bundle is damaged.
            ValueError: Its outputs are not tied states.
        """
        spec, model = load_bundle(bundle)
        if spec.states is None:
            raise ValueError(f"{bundle} has a network for tokens, not for tied states: name a hybrid recognizer's")
        return cls(spec, model.to(device).eval(), spec.build_frontend(dict(speakers)).to(device), device)

    @torch.no_grad()
    def likelihoods(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log likelihoods of a batch's utterances, each `[T, P]` up to a constant for each frame; all frames count."""
        assert self.spec.states is not None
        feats, counts = self.frontend(batch.inputs.to(self.device), batch.lengths.to(self.device), batch.speakers)
        log_probs, frames = self.model(rounded_up(feats, frame_multiple(self.device)), counts)
        priors, factor = self.spec.states.log_priors, self.spec.frame_factor
        rows = zip(log_probs.cpu().numpy(), frames.tolist(), strict=True)
        return [scaled_likelihoods(row[:count], priors, factor) for row, count in rows]


def align_states(
    network: StateNetwork,
    aligner: Aligner,
    dataset: SpeechDataset,
    rows: Sequence[int],
    *,
    batch_seconds: float = 240.0,
    on_damage: Callable[[ShardError], object] | None = None,
) -> Iterator[tuple[int, Alignment | str]]:
    """Align the transcripts of some utterances with their speech.

    Args:
        network: Its scaled likelihoods take the place of the mixtures'.
        aligner: Tree, transitions and lexicon of the GMM-HMM that the network's states come from.
        dataset: The set.
        rows: The utterances' rows in its index.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_damage: Called once for each damaged shard; without it the first damaged shard raises.

    Yields:
        The row of an utterance, and its alignment, or the reason why there is none.
    """
    portions = Portions()
    for batch in whole_batches(dataset, np.asarray(rows, dtype=np.int64), batch_seconds, on_damage):
        for part, found in portions.each(batch, network.likelihoods):
            yield from zip(part.rows.tolist(), _aligned(aligner, part, found), strict=True)


def _aligned(aligner: Aligner, part: Batch, found: Sequence[NDArray[np.float32]]) -> Iterator[Alignment | str]:
    words = (tuple(text.split()) for text in part.texts)
    own = [InMemoryUtterance(*about) for about in zip(part.ids, part.speakers, part.inputs, words, strict=True)]
    graphs = aligner.graphs([Shard(own)])
    for name, likelihoods in zip(part.ids, found, strict=True):
        alignment, _ = align_frames(aligner.model, graphs[name], partial(_columns, likelihoods), aligner.options)
        yield no_path(len(likelihoods)) if alignment is None else alignment


def _columns(likelihoods: NDArray[np.float32], pdfs: NDArray[np.int64]) -> NDArray[np.float32]:
    return likelihoods[:, pdfs]
