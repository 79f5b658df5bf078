"""Memory and time of a transducer's joiner, loss and backward pass on a CPU, whole, in parts and pruned.

    python -m benchmarks.bench_transducer --joint-mb 320
    python -m benchmarks.bench_transducer --prune-range 5

Prints by how much the process has grown at most, and its CPU seconds. The encoder is left out.
"""

import argparse
import resource
import time
from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from speech.models import StatelessPredictorConfig
from speech.models.networks.base import AcousticModel
from speech.models.networks.transducer import Transducer
from speech.objectives import JointTransducer, TransducerConfig
from speech.objectives.attention import with_start

WIDTH = 256
"""Of the encoder's frames."""


class _Encoder(nn.Module):
    """What a transducer needs of an encoder whose frames are given."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, vocab)


def step(network: Transducer, objective: JointTransducer, batch: int, frames: int, tokens: int) -> None:
    """The part of a training step that is measured, with texts of random tokens."""
    encoded = torch.randn(batch, frames, WIDTH, requires_grad=True)
    texts = torch.randint(1, network.joiner.output.out_features, (batch, tokens))
    lengths = torch.full((batch,), frames), torch.full((batch,), tokens)
    outputs = network.outputs(encoded, lengths[0], with_start(texts, ((0,),)))
    losses, _ = objective.losses(outputs, lengths[0], SimpleNamespace(tokens=texts, token_lengths=lengths[1]))
    losses.sum().backward()  # type: ignore[no-untyped-call]


def peak_mb() -> float:
    """The most memory that the process has had, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joint-mb", type=int, default=1024)
    parser.add_argument("--prune-range", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=80, help="of each text")
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--joint-dim", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    encoder = cast(AcousticModel, _Encoder(given.vocab))
    network = Transducer(encoder, StatelessPredictorConfig(), given.joint_dim, given.vocab, ctc=False)
    network.joint_bytes = given.joint_mb << 20
    if given.prune_range:
        network.prune(given.prune_range)
    objective = JointTransducer(TransducerConfig(prune_range=given.prune_range))
    step(network, objective, 1, 4, 8)  # what libraries need once
    before, begin = peak_mb(), time.process_time()
    step(network, objective, given.batch, given.frames, given.tokens)
    seconds, grown = time.process_time() - begin, peak_mb() - before
    print(f"joint_mb {given.joint_mb}, prune_range {given.prune_range}: {grown:,.0f} MiB, {seconds:.1f} s")


if __name__ == "__main__":
    main()
