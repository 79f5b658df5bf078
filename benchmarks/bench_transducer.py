"""Memory of a transducer's joiner, loss and backward pass on a CPU, by the limit `train.objective.joint_mb`.

    python -m benchmarks.bench_transducer --joint-mb 256

Prints the greatest sum of allocations above what was there before. The encoder is left out.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

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


def peak_of(prof: Any) -> int:
    """Greatest sum of allocations in a profile, bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    return max(totals) - totals[0]


def main() -> None:
    """Measure one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joint-mb", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=80, help="of each text")
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--joint-dim", type=int, default=512)
    given = parser.parse_args()
    encoder = cast(AcousticModel, _Encoder(given.vocab))
    network = Transducer(encoder, StatelessPredictorConfig(), given.joint_dim, given.vocab, ctc=False)
    network.joint_bytes = given.joint_mb << 20
    encoded = torch.randn(given.batch, given.frames, WIDTH, requires_grad=True)
    tokens = torch.randint(1, given.vocab, (given.batch, given.tokens))
    frames, lengths = torch.full((given.batch,), given.frames), torch.full((given.batch,), given.tokens)
    objective = JointTransducer(TransducerConfig())
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        outputs = network.outputs(encoded, frames, with_start(tokens, ((0,),)))
        losses, _ = objective.losses(outputs, frames, SimpleNamespace(tokens=tokens, token_lengths=lengths))
        losses.sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - begin
    print(f"joint_mb {given.joint_mb}: {peak_of(prof) / 2**20:,.0f} MiB, {seconds:.1f} s")


if __name__ == "__main__":
    main()
