"""Plots of a training run, from its journal."""

import io
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: a worker has no display

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from storage.stages import StageOutput
from tasks.tracking.metrics import StepRounds
from training.coordinator.journal import read_journal

Entry = dict[str, Any]
COLORS = _TRAIN, _VALID, _THIRD = "#1f6f8b", "#d1495b", "#edae49"
_FAINT = 0.25
FONT = 12.0
"""Points, at 110 pixels an inch: as large as the report's text where it shows the figure at its full width."""
WIDTH, _ROW = 10.0, 3.7
"""Inches: width of the figure, height of a row of panels."""
_FEWEST_TICKS = 3
"""Of a logarithmic axis; if there are fewer, those of the next finer division are taken."""
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN, _BELOW = 1.1, 0.2, 0.4, 0.95, 1.65, 1.4
"""Inches around the panels for ticks, titles and legends, and between columns and rows. They are fixed: a layout
engine would measure all text, which takes longer than drawing it."""


def _curve(
    axes: Axes, entries: list[Entry], field: str, label: str | None, color: str, marker: str = "", alpha: float = 1.0
) -> None:
    points = [(entry["epoch"], entry[field]) for entry in entries if entry.get(field) is not None]
    if points:
        x, y = zip(*points, strict=True)
        width = 1.2 if alpha == 1.0 else 0.7
        axes.plot(x, y, color=color, marker=marker, markersize=3, linewidth=width, label=label, alpha=alpha)


class _LogTicks(Locator):
    """Ticks of a logarithmic axis: powers of ten, 1, 2 and 5 times these, or, where few are in view, round numbers."""

    def __call__(self) -> Any:
        """The ticks of the axis' present limits."""
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks between two limits."""
        low, high = vmin * (1 - 1e-9), vmax * (1 + 1e-9)  # a tick at a limit is in view, whatever its last bit
        decades = range(math.floor(math.log10(vmin)), math.ceil(math.log10(vmax)) + 1) if vmin > 0 else ()
        for steps in ((1,), (1, 2, 5)):
            ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) >= _FEWEST_TICKS:
                return ticks
        round_ones = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(vmin, vmax)
        return [tick for tick in round_ones if low <= tick <= high and tick > 0]


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, at least two of them, however narrow its range is.

    By default, matplotlib labels an axis from 1.9 to 3.1 with "2 × 10⁰" and "3 × 10⁰".
    """
    axis.set_major_locator(_LogTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axis.set_minor_locator(NullLocator())


def joined_steps(journal: list[Entry]) -> list[Entry]:
    """The learners' step entries combined into one curve: means of losses, sums of throughputs.

    Args:
        journal: Valid entries, in order.
    """
    rounds, joined = StepRounds(), []
    for entry in journal:
        if entry["kind"] in ("start", "resume"):
            joined += rounds.flush()
            steps = entry.get("steps")
            rounds.restart(steps if isinstance(steps, dict) else {})
        elif entry["kind"] == "step" and "learner" in entry:
            joined += rounds.feed(entry)
    return joined + rounds.flush()


def by_learner(journal: list[Entry]) -> dict[str, list[Entry]]:
    """Step entries by learner; empty if there is only one."""
    entries: dict[str, list[Entry]] = {}
    for entry in journal:
        if entry["kind"] == "step" and "learner" in entry:
            entries.setdefault(entry["learner"], []).append(entry)
    return entries if len(entries) > 1 else {}


def _losses(axes: Axes, journal: list[Entry], steps: list[Entry], valid: list[Entry]) -> None:
    learners = by_learner(journal)
    for number, (_, own) in enumerate(sorted(learners.items())):
        _curve(axes, own, "loss", "one learner" if number == 0 else None, _TRAIN, alpha=_FAINT)
    _curve(axes, steps, "loss", f"training, mean of {len(learners)} learners" if learners else "training", _TRAIN)
    for number, node in enumerate(sorted({node for entry in valid for node in entry.get("replicas") or {}})):
        own = [{"epoch": e["epoch"], "loss": (e.get("replicas") or {}).get(node)} for e in valid]
        if len(valid[-1].get("replicas") or {}) > 1:
            _curve(axes, own, "loss", "validation, one replica" if number == 0 else None, _VALID, alpha=_FAINT)
    _curve(axes, valid, "valid_loss", "validation", _VALID, "o")
    axes.set(title="Loss", ylabel="nats per target", yscale="log")
    plain_log(axes.yaxis)


def _legend(axes: Axes, **more: Any) -> None:
    """Put the legend below the curves."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.47, -0.2), "ncols": 2, "columnspacing": 1.0}
    axes.legend(fontsize=FONT - 2, frameon=False, **place, **more)


def _exchange(axes: Axes, steps: list[Entry]) -> None:
    """Staleness, and on a second axis the distance between replicas, if there are any."""
    _curve(axes, steps, "staleness", "staleness", _TRAIN)
    if not any(_shown(entry.get("distance")) for entry in steps):
        axes.set(title="Staleness", ylabel="steps", ylim=(0, None))
        return
    axes.set(title="Exchange of weights", ylabel="own steps", ylim=(0, None))
    other = axes.twinx()
    _curve(other, steps, "distance", "consensus distance", _THIRD)
    other.set(ylabel="RMS difference", ylim=(0, None))
    lines = [line for part in (axes, other) for line in part.get_legend_handles_labels()[0]]
    _legend(axes, handles=lines)


def _members(axes: Axes, steps: list[Entry]) -> None:
    _curve(axes, steps, "nodes", "nodes in the ring", _TRAIN)
    axes.set(title="Nodes", ylim=(0, None))


def _rates(axes: Axes, valid: list[Entry]) -> None:
    """Word error rate; frame accuracy for models of tied states, which have none."""
    name, label, title = "valid_wer", "validation, greedy", "Word error rate"
    if any(entry.get("valid_frame_accuracy") is not None for entry in valid):
        name, label, title = "valid_frame_accuracy", "validation", "Frame accuracy"
    percent = [{**entry, "percent": 100 * rate} for entry in valid if (rate := entry.get(name)) is not None]
    _curve(axes, percent, "percent", label, _VALID, "o")
    axes.set(title=title, ylabel="%", ylim=(0, None))


def _shown(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def stored_journal(output: StageOutput) -> list[Entry]:
    """The journal of a finished training.

    Args:
        output: Output of the stage `train`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(output.read("journal.jsonl"))
        return read_journal(path)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file's content."""
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    return content.getvalue()


def curves_png(journal: list[Entry]) -> bytes:
    """The plot of `learning_curves` as a PNG file's content."""
    with tempfile.TemporaryDirectory() as folder:
        return learning_curves(journal, Path(folder) / "curves.png").read_bytes()


def _places(rows: int) -> dict[str, float]:
    """Margins and distances of the panels as matplotlib wants them: relative to the figure and to a panel."""
    height = _ROW * rows
    width_of_one = (WIDTH - _LEFT - _RIGHT - _BETWEEN) / 2
    height_of_one = (height - _TOP - _BOTTOM - (rows - 1) * _BELOW) / rows
    columns = {"left": _LEFT / WIDTH, "right": 1 - _RIGHT / WIDTH, "wspace": _BETWEEN / width_of_one}
    return columns | {"top": 1 - _TOP / height, "bottom": _BOTTOM / height, "hspace": _BELOW / height_of_one}


@matplotlib.rc_context({"font.size": FONT})
def learning_curves(journal: list[Entry], path: Path) -> Path:
    """Plot loss, WER, learning rate and throughput over epochs; staleness, distance and nodes if weights are averaged.

    Args:
        journal: Entries of a training journal.
        path: The PNG file to write.
    """
    steps = joined_steps(journal)
    valid = [entry for entry in journal if entry["kind"] == "valid"]
    exchanged = any(_shown(entry.get(name)) for entry in steps for name in ("staleness", "distance"))
    rows = 3 if exchanged else 2
    figure = Figure(figsize=(WIDTH, _ROW * rows))
    axes = figure.subplots(rows, 2, gridspec_kw=_places(rows))
    _losses(axes[0, 0], journal, steps, valid)
    _rates(axes[0, 1], valid)
    _curve(axes[1, 0], steps, "lr", "learning rate", _TRAIN)
    axes[1, 0].set(title="Learning rate", ylim=(0, None))
    _curve(axes[1, 1], steps, "throughput", "audio seconds per second", _TRAIN)
    axes[1, 1].set(title="Throughput", ylabel="s of audio / s", ylim=(0, None))
    if exchanged:
        _exchange(axes[2, 0], steps)
        _members(axes[2, 1], steps)
    for axis in axes.flat:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if len(axis.get_legend_handles_labels()[0]) > 1 and axis.get_legend() is None:
            _legend(axis)
    figure.savefig(path, dpi=110)
    return path


@matplotlib.rc_context({"font.size": FONT})
def likelihood_png(iterations: list[Entry]) -> bytes:
    """Plot a GMM-HMM's training over its iterations: log-likelihood of a frame, and number of Gaussians.

    Args:
        iterations: Figures of each iteration (`speech.hmm.train.TrainingProgress`), in order.

    Returns:
        A PNG file's content.
    """
    figure = Figure(figsize=(WIDTH, _ROW))
    panels = figure.subplots(1, 2, gridspec_kw=_places(1))
    titles = {"log_likelihood": "Log-likelihood of a frame", "gaussians": "Gaussians"}
    for axis, (field, title) in zip(panels, titles.items(), strict=True):
        axis.plot(range(1, len(iterations) + 1), [row[field] for row in iterations], color=_TRAIN, linewidth=1.2)
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.25)
    return png(figure)
