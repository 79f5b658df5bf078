"""Plots of the experiments' results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import experiment_plans as plans
from benchmarks.experiment_report import interval, ring_rows, strategy_rows, sweep_rows
from benchmarks.experiment_runs import Results

STYLE = {
    "scpsgd": ("#1f5fa8", "o"),
    "adpsgd ring per_step=1": ("#c8501e", "s"),
    "adpsgd ring per_step=4": ("#7a2a0a", "P"),
    "adpsgd random-ring per_step=1": ("#e0a020", "D"),
    "adpsgd random-ring per_step=4": ("#8a6a00", "X"),
    "bmuf (plain SGD)": ("#3a8f4d", "^"),
}
CEILING = 10.0
"""Higher losses (diverged trainings) are drawn at this value."""
SECONDS = (10, 20, 50, 100, 200, 500, 1000)
LOSSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, CEILING)


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    """A figure with panels side by side; sizes in inches."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, axes[0]


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def _losses(axes: Any) -> None:
    """Set up an axis of losses, with lines at the reference values."""
    axes.axhline(plans.UNLEARNED["digits"], color="#666666", linestyle="--", linewidth=1.2)
    axes.axhline(plans.CONVERGED["digits"], color="#666666", linestyle=":", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylim(LOSSES[0], CEILING * 1.15)
    axes.set_yticks(LOSSES, [f"{loss:g}" if loss < CEILING else f"{loss:g}+" for loss in LOSSES])
    axes.minorticks_off()


def _doubling(axes: Any, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])


def _shown(loss: float | None) -> float:
    return CEILING if loss is None else min(loss, CEILING)


def draw_headline(results: Results, folder: Path) -> Path:
    """Plot held-out loss against total batch, at the best learning rate of each."""
    figure, panels = new_figure(7.5, 4.6)
    axes, rows = panels[0], sweep_rows(results)
    for method in dict.fromkeys(row["method"] for row in rows):
        color, marker = STYLE[method]
        own = [row for row in rows if row["method"] == method]
        axes.plot(
            [row["batch"] for row in own],
            [_shown(row["loss"]) for row in own],
            color=color,
            marker=marker,
            label=method,
        )
    _losses(axes)
    note = {"color": "#444444", "fontsize": 9, "va": "bottom", "transform": axes.get_yaxis_transform()}
    axes.text(0.01, plans.UNLEARNED["digits"] * 1.02, "not learned: ln 10, uniform over the words", **note)
    axes.text(0.01, plans.CONVERGED["digits"] * 1.02, "converged below this", **note)
    _doubling(axes, sorted({row["batch"] for row in rows}))
    axes.set_xlabel(f"total batch of {plans.HEADLINE_LEARNERS} learners, utterances")
    axes.set_ylabel("held-out loss at the best learning rate, nats per word")
    axes.legend(title="method", loc="lower right")
    return save_figure(figure, folder / "experiment-headline.png")


def draw_rates(results: Results, folder: Path) -> Path:
    """Plot held-out loss against learning rate, with a panel for each batch size."""
    sweep = plans.SWEEPS["headline"]
    batches = [b for b in sweep.batches if any(results.get(r) for c in sweep.choices for r in sweep.runs(b, c))]
    figure, panels = new_figure(3.3 * len(batches), 4.0, len(batches))
    for axes, batch in zip(panels, batches, strict=True):
        for choice in sweep.choices:
            runs = [run for run in sweep.runs(batch, choice) if results.get(run) is not None]
            if not runs:
                continue
            losses = [_shown((results.get(run) or {})["loss"]) for run in runs]
            color, marker = STYLE[runs[0].method]
            axes.plot([run.lr for run in runs], losses, color=color, marker=marker, label=runs[0].method)
        axes.set_xscale("log")
        axes.set_xticks(plans.RATES, [f"{rate:g}" for rate in plans.RATES], fontsize=8)
        axes.set_xlim(plans.RATES[0] / 1.5, plans.RATES[-1] * 1.5)
        _losses(axes)
        axes.set_title(f"total batch {batch}")
        axes.set_xlabel("highest learning rate")
    panels[0].set_ylabel("held-out loss, nats per word")
    panels[0].legend(title="method", fontsize=8)
    return save_figure(figure, folder / "experiment-rates.png")


def draw_strategies(results: Results, folder: Path) -> Path:
    """Plot virtual time to the target loss, with equal learners and with a slow one."""
    rows = strategy_rows(results)
    methods = list(dict.fromkeys(row["method"] for row in rows))[::-1]
    figure, panels = new_figure(7.5, 0.42 * len(methods) + 1.4)
    axes = panels[0]
    conditions = (("equal", 0.2, "#1f5fa8", "8 equal learners"), ("one", -0.2, "#c8501e", "one of 8 is 10x slower"))
    longest = max((row["target_s"] or 0.0 for row in rows), default=1.0)
    for start, shift, color, _ in conditions:
        own = {row["method"]: row["target_s"] for row in rows if row["condition"].startswith(start)}
        for place, method in enumerate(methods):
            seconds = own.get(method)
            if seconds is not None:
                axes.barh(place + shift, seconds, 0.38, color=color)
                axes.text(seconds * 1.03, place + shift, f"{seconds:.0f}", va="center", fontsize=8)
            else:
                axes.text(10.0, place + shift, " not reached", va="center", fontsize=8, color=color)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xscale("log")
    axes.set_xticks(SECONDS, [str(seconds) for seconds in SECONDS])
    axes.set_xlim(10, longest * 1.5)
    axes.minorticks_off()
    axes.set_xlabel(f"virtual seconds to a held-out loss of {plans.TARGET:g} nats per word")
    axes.grid(axis="y", visible=False)
    handles = [Patch(color=color, label=label) for _, _, color, label in conditions]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return save_figure(figure, folder / "experiment-strategies.png")


def draw_rings(results: Results, folder: Path) -> Path:
    """Plot consensus distance and WER against the number of learners."""
    rows = ring_rows(results)
    figure, panels = new_figure(9.5, 4.0, 2)
    for method in dict.fromkeys(row["method"] for row in rows):
        color, marker = STYLE[method]
        own = [row for row in rows if row["method"] == method and row["seed"] == 1]
        learners = [row["learners"] for row in own]
        panels[0].plot(learners, [row["consensus"] for row in own], color=color, marker=marker, label=method)
        done = [row for row in own if row["wer"] is not None]
        bounds = [interval(row["wer"]) for row in done]
        below = [100 * (row["wer"] - low) for row, (low, _) in zip(done, bounds, strict=True)]
        above = [100 * (high - row["wer"]) for row, (_, high) in zip(done, bounds, strict=True)]
        shift = 0.97 if " ring" in method else 1.03
        panels[1].errorbar(
            [row["learners"] * shift for row in done],
            [100 * row["wer"] for row in done],
            yerr=[below, above],
            color=color,
            marker=marker,
            capsize=3,
            label=method,
        )
    for axes in panels:
        _doubling(axes, plans.RING_LEARNERS)
        axes.set_xlabel(f"learners, total batch {plans.RING_BATCH}")
        axes.legend()
    panels[0].set_ylim(bottom=0)
    panels[0].ticklabel_format(axis="y", scilimits=(0, 0), useMathText=True)
    panels[0].set_ylabel("consensus distance, RMS of a weight")
    panels[1].set_ylabel("held-out WER, % (95 % interval)")
    return save_figure(figure, folder / "experiment-rings.png")


def draw(results: Results, folder: Path) -> list[Path]:
    """Plot all experiments with results into a folder; returns the paths."""
    parts = {
        draw_headline: sweep_rows,
        draw_rates: sweep_rows,
        draw_strategies: strategy_rows,
        draw_rings: ring_rows,
    }
    return [part(results, folder) for part, rows in parts.items() if rows(results)]
