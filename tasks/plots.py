"""Plots of a training run, from its journal."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: a worker has no screen

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Entry = dict[str, Any]
_TRAIN, _VALID = "#1f6f8b", "#d1495b"


def _curve(axes: Axes, entries: list[Entry], field: str, label: str, color: str, marker: str = "") -> None:
    points = [(entry["epoch"], entry[field]) for entry in entries if entry.get(field) is not None]
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=color, marker=marker, markersize=3, linewidth=1.2, label=label)


def _throughput(steps: list[Entry]) -> list[Entry]:
    """Seconds of audio trained per second, between journal lines."""
    pairs = itertools.pairwise(steps)
    return [
        {"epoch": b["epoch"], "rate": (b["audio_seconds"] - a["audio_seconds"]) / (b["elapsed"] - a["elapsed"])}
        for a, b in pairs
        if b["elapsed"] > a["elapsed"]
    ]


def learning_curves(journal: list[Entry], path: Path) -> Path:
    """Loss, WER, learning rate and throughput over epochs, as one PNG.

    Args:
        journal: Entries of a training journal.
        path: Where the picture goes.
    """
    steps = [entry for entry in journal if entry["kind"] == "step"]
    valid = [entry for entry in journal if entry["kind"] == "valid"]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2)
    _curve(axes[0, 0], steps, "loss", "training (batch)", _TRAIN)
    _curve(axes[0, 0], valid, "valid_loss", "validation", _VALID, "o")
    axes[0, 0].set(title="CTC loss", ylabel="nats per token", yscale="log")
    percent = [{**entry, "wer": 100 * entry["valid_wer"]} for entry in valid]
    _curve(axes[0, 1], percent, "wer", "validation, greedy", _VALID, "o")
    axes[0, 1].set(title="Word error rate", ylabel="%", ylim=(0, None))
    _curve(axes[1, 0], steps, "lr", "learning rate", _TRAIN)
    axes[1, 0].set(title="Learning rate", ylim=(0, None))
    _curve(axes[1, 1], _throughput(steps), "rate", "audio seconds per second", _TRAIN)
    axes[1, 1].set(title="Throughput", ylabel="s of audio / s", ylim=(0, None))
    for axis in axes.flat:
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    return path
