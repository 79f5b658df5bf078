"""Speed of LSTMs over sequences of different lengths on a CPU: torch's packed ones beside ours over padded tensors.

    python -m benchmarks.bench_lstm

One thread, forward and backward, medians of rounds in which both take turns. Rates are frames per second, without those
of the padding.
"""

import torch
from torch import nn

from benchmarks.common import compare, show
from speech.models.networks.lstm import run_packed, run_padded

SHAPES = {
    "segments of the published model": (128, 21, 21, 512, 2),
    "segments of a small model": (768, 21, 21, 32, 1),
    "utterances of a small model": (10, 200, 400, 192, 3),
}
"""Sequences, least and most frames, cells of each direction, layers."""


def main() -> None:
    """Time both and print tables."""
    torch.set_num_threads(1)
    for name, (count, least, most, cells, layers) in SHAPES.items():
        torch.manual_seed(1)
        lstm = nn.LSTM(cells, cells, layers, bidirectional=True, batch_first=True)
        lengths = torch.linspace(least, most, count).long()
        frames = torch.randn(count, most, cells)

        def work(run, lstm=lstm, frames=frames, lengths=lengths):  # type: ignore[no-untyped-def]
            run(lstm, frames, lengths, lstm.all_weights).sum().backward()

        rivals = {"padded": lambda w=work: w(run_padded), "packed (torch)": lambda w=work: w(run_packed)}
        title = f"{name}: {count} x {most} frames, {layers} x {cells} cells"
        show(title, compare(rivals, 3), "padded", "frames/s", float(lengths.sum()))


if __name__ == "__main__":
    main()
