"""Plots of a search: history, importance of fields, parallel coordinates, loss against budget, rungs.

All have the style of the plots of a training. They draw a study of ten thousand trials in seconds, and one of a single
trial: what cannot be drawn yet says why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from configurable.wording import counted
from tasks.search.analysis import (
    ENOUGH,
    StudyRung,
    course,
    importances,
    ranked,
    study_rungs,
    study_space,
)
from tasks.search.seeds import seed_spread
from tasks.search.space import ParameterConfig, Space
from tasks.search.study import Study, StudyTrial, after_text, budget_text
from tasks.tracking.plots import COLORS, FONT, WIDTH, plain_log, png

_BLUE, _RED, _AMBER = COLORS
_GREY = "#8b989f"
_SHADES = LinearSegmentedColormap.from_list("budgets", ["#b9d6df", _BLUE, "#0c2f3c"])
"""From small budgets to large ones."""
_GOOD_SHARE, _MOST_GOOD = 0.1, 30
"""Share, and maximum number, of the trials that are drawn as the good ones."""
_OUTLIER = 3.0
"""Higher losses than so many times the 95 % quantile are drawn at the upper end of the axis."""
_LOG_FROM = 5.0
"""Ratio of the highest and the lowest loss from which an axis is logarithmic."""
_LINES = 600
"""Maximum number of trials that are drawn as lines: the best, and others spread evenly."""
_PER_ROW = 6
"""Fields side by side in parallel coordinates."""
_UNSEARCHED, _FAILED = -0.13, 1.13
"""Heights, relative to an axis, of fields that a trial does not have, and of trials without a result."""
_LABEL = 14
"""Letters of a line of a choice's text: as many as there is room for between two axes."""
_TICKS = 12
"""Most choices that are labelled on an axis."""
_GOLDEN = 0.618034


class StudyPlot(NamedTuple):
    """A plot of a search, or why there is none."""

    name: str
    """Its file's, without suffix."""
    title: str
    """What it shows."""
    caption: str
    """How to read it; without an image, why there is none."""
    image: bytes
    """PNG; empty if there is none."""


def study_plots(study: Study) -> Iterator[StudyPlot]:
    """All plots of a study, one after another; those of budgets only if trials train.

    Args:
        study: The study, with its trials as they are now.
    """
    drawn: dict[tuple[str, str], Callable[[Study], tuple[Figure | None, str]]] = {
        ("history", "Best so far"): _history,
        ("importance", "Importance of the fields"): _importance,
        ("parallel", "Values and losses"): _parallel,
    }
    if study.trains:
        drawn |= {("budgets", "Loss against budget"): _budgets, ("rungs", "Rungs"): _rungs}
    for (name, title), draw in drawn.items():
        with matplotlib.rc_context({"font.size": FONT}):
            figure, caption = draw(study)
            yield StudyPlot(name, title, caption, b"" if figure is None else png(figure))


def _figure(height: float, left: float, right: float, bottom: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels below each other; all sizes are in inches."""
    figure = Figure(figsize=(WIDTH, height * rows))
    top = 0.25
    axes = figure.subplots(
        rows,
        1,
        squeeze=False,
        gridspec_kw={
            "left": left / WIDTH,
            "right": 1 - right / WIDTH,
            "bottom": bottom / (height * rows),
            "top": 1 - top / (height * rows),
            "hspace": (bottom + top) / (height - bottom - top),
        },
    )
    return figure, [panel for (panel,) in axes]


class _LossScale:
    """How losses are drawn: logarithmic if they differ much, and outliers at the end."""

    def __init__(self, losses: Sequence[float], minimized: str) -> None:
        array = np.asarray(losses, dtype=np.float64)
        self.most = _OUTLIER * float(np.quantile(array, 0.95, method="lower"))
        self.clipped = bool(0 < self.most < array.max())
        shown = self(array)
        self.low, self.high = float(shown.min()), float(shown.max())
        self.log = self.low > 0 and self.high / self.low > _LOG_FROM
        self.label = f"validation {'WER' if minimized == 'wer' else minimized}"
        if self.clipped:
            self.label += "\n(higher ones at the end)"

    def __call__(self, losses: Any) -> NDArray[np.float64]:
        """Losses as they are drawn."""
        array = np.asarray(losses, dtype=np.float64)
        return np.minimum(array, self.most) if self.clipped else array

    def set_up(self, axes: Axes, which: str) -> None:
        """Give an axis this scale.

        Args:
            axes: The panel.
            which: `x` or `y`.
        """
        axes.set(**{f"{which}label": self.label})
        if self.log:
            axes.set(**{f"{which}scale": "log"})
            plain_log(getattr(axes, f"{which}axis"))

    def heights(self, losses: Any) -> NDArray[np.float64]:
        """Losses from 0 for the lowest to 1 for the highest."""
        shown, low, high = self(losses), self.low, self.high
        if self.log:
            shown, low, high = np.log(shown), float(np.log(low)), float(np.log(high))
        heights: NDArray[np.float64] = (shown - low) / (high - low) if high > low else np.full(len(shown), 0.5)
        return heights


def _no_result(study: Study) -> str:
    return "No trial has a result yet." if study.trials else "No trial has begun yet."


def _same_budget(study: Study) -> str:
    return f" after the same number of {study.unit}" if study.trains else ""


def _shades(budgets: Sequence[int]) -> dict[int, Any]:
    last = max(1, len(budgets) - 1)
    return {budget: _SHADES(0.5 if len(budgets) == 1 else number / last) for number, budget in enumerate(budgets)}


def _legend(axes: Axes, handles: Sequence[Any], below: float = -0.2, columns: int = 4) -> None:
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, below), "ncols": columns, "columnspacing": 1.2}
    axes.legend(handles=handles, fontsize=FONT - 2, frameon=False, **place)


def _dot(color: Any, label: str, **more: Any) -> Line2D:
    return Line2D([], [], color=color, marker="o", linestyle="", markersize=6, label=label, **more)


def _line(color: Any, label: str, width: float = 1.5) -> Line2D:
    return Line2D([], [], color=color, linewidth=width, label=label)


def _history(study: Study) -> tuple[Figure | None, str]:
    steps = course(study.trials, bool(study.about.get("restarts")))
    if not steps:
        return None, _no_result(study)
    scale = _LossScale([step.loss for step in steps], study.minimized)
    budgets = sorted({step.budget for step in steps})
    shades = _shades(budgets)
    figure, [axes] = _figure(4.4, 1.1, 0.25, 1.35)
    for budget in budgets:
        own = [step for step in steps if step.budget == budget]
        at, losses = [step.work for step in own], scale([step.loss for step in own])
        size = float(np.clip(3000 / len(steps), 3, 26))
        axes.scatter(at, losses, s=size, color=shades[budget], linewidths=0, alpha=0.7)
        width = 2.2 if budget == budgets[-1] else 1.0
        lowest = np.minimum.accumulate(losses)
        axes.step([*at, steps[-1].work], [*lowest, lowest[-1]], where="post", color=shades[budget], linewidth=width)
    best = min((step for step in steps if step.budget == budgets[-1]), key=lambda step: (step.loss, step.work))
    axes.plot(best.work, scale(best.loss), "o", markersize=11, fillstyle="none", color=_RED, markeredgewidth=2)
    scale.set_up(axes, "y")
    axes.set_xlabel(f"{study.unit} of all trials" if study.trains else "trials")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    handles = [_dot(shades[budget], after_text(budget, study.unit).strip() or "trial") for budget in budgets[-7:]]
    handles += [_line(_GREY, "best so far"), _dot(_RED, f"trial {best.trial.number}, the best", fillstyle="none")]
    equal = ""
    if (seeds := seed_spread(study)) and seeds.spread and seeds.budget == best.budget:
        axes.axhspan(*scale([best.loss, best.loss + seeds.spread]), color=_AMBER, alpha=0.25, linewidth=0)
        handles.append(_line(_AMBER, "equal to it by seeds", 8))
        after = after_text(seeds.budget, study.unit)
        equal = f" Results{after} within the band are equal to it within the spread of seeds."
    _legend(axes, handles, -0.24)
    return figure, (
        f"Results in the order in which they came, and the lowest so far{_same_budget(study)}. The best is trial "
        f"{best.trial.number} with {best.loss:.4f}.{equal}"
    )


def _importance(study: Study) -> tuple[Figure | None, str]:
    found = importances(study_space(study), study.trials)
    if found is None:
        most = max(
            (sum(b in t.losses for t in study.trials) for b in {b for t in study.trials for b in t.losses}), default=0
        )
        return None, f"It is estimated from {ENOUGH} results{_same_budget(study)}; there are {most} so far."
    fields = found.fields[::-1]
    figure, [axes] = _figure(0.42 * len(fields) + 1.2, 3.4, 0.4, 0.8)
    places = np.arange(len(fields))
    axes.barh(places, [100 * field.share for field in fields], 0.6, color=_BLUE)
    axes.scatter([100 * field.chance for field in fields], places, marker="|", s=260, color=_RED, linewidths=2.2)
    axes.set_yticks(places, [_short(field.field, 34) for field in fields])
    axes.set_ylim(-0.6, len(fields) - 0.4)
    axes.set(xlabel="% of the importance of all fields", xlim=(0, None))
    axes.grid(axis="x", alpha=0.25)
    mark = Line2D([], [], color=_RED, marker="|", linestyle="", markersize=13, markeredgewidth=2.2, label="by chance")
    axes.legend(handles=[mark], fontsize=FONT - 2, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.0))
    return figure, (
        f"How much a field decides which trials are among the best tenth (at least five), of {found.results:,} "
        f"results{after_text(found.budget, study.unit)} (PED-ANOVA). A bar that ends before its mark is not more than "
        "chance."
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _some(best_first: list[StudyTrial], most: int) -> list[StudyTrial]:
    """The best ones, and of the others some that are spread evenly."""
    if len(best_first) <= most:
        return best_first
    rest = best_first[most // 2 :]
    return best_first[: most // 2] + [rest[int(place)] for place in np.linspace(0, len(rest) - 1, most - most // 2)]


def _count_good(best_first: Sequence[StudyTrial]) -> int:
    return min(max(1, round(_GOOD_SHARE * len(best_first))), _MOST_GOOD)


def _lines(axes: Axes, lines: list[NDArray[np.float64]], good: int) -> None:
    """Draw lines, the best first: the best one in red, the good ones dark, and the others faint."""
    faint = float(np.clip(60 / max(1, len(lines)), 0.06, 0.5))
    axes.add_collection(LineCollection(lines[good:], colors=_GREY, linewidths=0.8, alpha=faint))
    axes.add_collection(LineCollection(lines[1:good], colors=_BLUE, linewidths=1.3, alpha=0.8))
    axes.add_collection(LineCollection(lines[:1], colors=_RED, linewidths=2.2, zorder=4))


def _line_handles(best: StudyTrial, good: int, others: int) -> list[Line2D]:
    handles = [_line(_RED, f"trial {best.number}, the best", 2.2)]
    handles += [_line(_BLUE, f"others of the best {good}")] if good > 1 else []
    return handles + ([_line(_GREY, "others")] if others else [])


def _parallel(study: Study) -> tuple[Figure | None, str]:
    best_first = [trial for trial in ranked(study.trials) if trial.losses]
    failed = [trial for trial in study.trials if trial.state == "failed" and not trial.losses]
    if not best_first:
        return None, _no_result(study)
    space, names = study_space(study), list(study_space(study).parameters)
    scale = _LossScale([trial.losses[max(trial.losses)] for trial in best_first], study.minimized)
    shown, broken = _some(best_first, _LINES), _some(failed, _LINES // 10)
    good = _count_good(best_first)
    heights = scale.heights([trial.losses[max(trial.losses)] for trial in shown])
    places = {trial.number: _heights(space, trial) for trial in (*shown, *broken)}
    each = -(-len(names) // -(-len(names) // _PER_ROW))  # rows of about the same length
    groups = [names[start : start + each] for start in range(0, len(names), each)]
    figure, panels = _figure(4.4, 0.9, 1.0, 1.35, len(groups))
    for axes, group in zip(panels, groups, strict=True):
        at = np.arange(len(group) + 1, dtype=np.float64)
        ends = [*zip(shown, heights, strict=True), *((trial, _FAILED) for trial in broken)]
        lines = [np.column_stack([at, [*(places[t.number][name] for name in group), end]]) for t, end in ends]
        _lines(axes, lines[: len(shown)], good)
        axes.add_collection(LineCollection(lines[len(shown) :], colors=_AMBER, linewidths=1.0, alpha=0.6))
        _coordinates(axes, space, group, scale, bool(broken))
    handles = _line_handles(best_first[0], good, len(best_first) - good)
    _legend(panels[-1], [*handles, *([_line(_AMBER, "failed")] if failed else [])], -0.31)
    some = (
        f" {len(shown):,} of {len(best_first):,} trials are drawn, the best half of them whole."
        if len(shown) < len(best_first)
        else ""
    )
    end = "loss at its end. Trials that trained longer count as better" if study.trains else "error rate"
    return figure, (
        f"Each line is a trial: its values, and its {end}. Where a field's conditions do not hold, the line passes "
        f"below its axis.{some}"
    )


def _heights(space: Space, trial: StudyTrial) -> Mapping[str, float]:
    """Where a trial crosses each field's axis; choices are spread a little, so that lines do not hide each other."""
    heights = {}
    for name, parameter in space.parameters.items():
        if name not in trial.values:
            heights[name] = _UNSEARCHED
            continue
        spread = (trial.number * _GOLDEN % 1.0 - 0.5) * 0.6 / len(parameter.choices) if parameter.choices else 0.0
        heights[name] = parameter.position(trial.values[name]) + min(max(spread, -0.06), 0.06)
    return heights


def _coordinates(axes: Axes, space: Space, names: Sequence[str], scale: _LossScale, failed: bool) -> None:
    """Draw the axes of fields and of the loss with their labels."""
    conditional = any(space.parameters[name].when for name in names)
    axes.set(
        xlim=(-0.05, len(names) + 0.05), ylim=(_UNSEARCHED - 0.05 if conditional else -0.05, 1.2 if failed else 1.05)
    )
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    for place in range(len(names) + 1):
        axes.plot([place, place], [0, 1], color="#1d2b33", linewidth=1.2, zorder=3)
    for place, name in enumerate(names):
        for height, text in _ticks(space.parameters[name]):
            _tick(axes, place, height, text)
        if space.parameters[name].when:
            _tick(axes, place, _UNSEARCHED, "none")
    low, high = (float(value) for value in (scale.low, scale.high))
    values = np.geomspace(low, high, 4) if scale.log else np.linspace(low, high, 4)
    for height, value in zip(scale.heights(values), values, strict=True):
        _tick(axes, len(names), float(height), f"{value:.3g}")
        if low == high:
            break
    if failed:
        _tick(axes, len(names), _FAILED, "failed")
    labels = [name.replace(".", ".\n") for name in names]
    axes.set_xticks(range(len(names) + 1), [*labels, scale.label.replace(" (", "\n(")])
    axes.tick_params(axis="x", length=0, pad=6)


def _tick(axes: Axes, place: float, height: float, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    axes.text(place + 0.04, height, text, va="center", fontsize=FONT - 2, bbox=box, zorder=5, clip_on=False)


def _ticks(parameter: ParameterConfig) -> list[tuple[float, str]]:
    """Heights and texts of a field's labels."""
    if parameter.choices:
        every = -(-len(parameter.choices) // _TICKS)
        return [(parameter.position(choice), choice_text(choice)) for choice in parameter.choices[::every]]
    assert parameter.low is not None
    assert parameter.high is not None
    low, high = parameter.low, parameter.high
    if parameter.log:
        locator: Any = LogLocator(subs=(1.0,) if high / low >= 100 else (1.0, 2.0, 5.0))
    else:
        locator = MaxNLocator(4, integer=parameter.integer)
    round_ones = [float(value) for value in locator.tick_values(low, high) if low < value < high]
    ends = [
        end
        for end in (low, high)
        if all(abs(parameter.position(v) - parameter.position(end)) > 0.08 for v in round_ones)
    ]
    return [(parameter.position(value), f"{value:.4g}") for value in (*round_ones, *ends)]


def choice_text(choice: Any) -> str:
    """A choice in one or two short lines: of a section, its kind, and its other fields as far as there is room."""
    if isinstance(choice, Mapping):
        rest = ", ".join(f"{name}={value}" for name, value in choice.items() if name != "kind")
        lines = [line for line in (str(choice.get("kind", "")), rest) if line] or ["{}"]
    else:
        lines = ["none" if choice is None else str(choice)]
    return "\n".join(line if len(line) <= _LABEL else f"{line[: _LABEL - 1]}…" for line in lines)


def _budgets(study: Study) -> tuple[Figure | None, str]:
    best_first = [trial for trial in ranked(study.trials) if trial.losses]
    budgets = sorted({budget for trial in best_first for budget in trial.losses})
    if len(budgets) < 2:
        if not budgets:
            return None, _no_result(study)
        return None, f"All results are after {budget_text(budgets[0], study.unit)}."
    shown = _some(best_first, _LINES)
    good = _count_good(best_first)
    scale = _LossScale([loss for trial in shown for loss in trial.losses.values()], study.minimized)
    figure, [axes] = _figure(4.3, 1.1, 0.25, 1.15)
    curves = [np.column_stack([sorted(t.losses), scale([t.losses[b] for b in sorted(t.losses)])]) for t in shown]
    _lines(axes, curves, good)
    size = float(np.clip(3000 / len(shown), 2, 16))
    ends = np.concatenate([curve[-1:] for curve in curves[good:]]) if shown[good:] else np.empty((0, 2))
    axes.scatter(ends[:, 0], ends[:, 1], s=size, color=_GREY, linewidths=0, alpha=0.6)
    points = np.concatenate(curves[:good])
    axes.scatter(points[:, 0], points[:, 1], s=14, color=_BLUE, zorder=3)
    axes.scatter(curves[0][:, 0], curves[0][:, 1], s=30, color=_RED, zorder=5)
    axes.set(xscale="log", xlabel=f"{study.unit} of the trial")
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.xaxis.set_minor_locator(NullLocator())
    scale.set_up(axes, "y")
    axes.grid(alpha=0.25)
    _legend(axes, _line_handles(best_first[0], good, len(best_first) - good), -0.22)
    return figure, "Each line is a trial; it ends, with a dot, where the trial did not go on."


def _rungs(study: Study) -> tuple[Figure | None, str]:
    rungs = study_rungs(study.trials)
    if len({rung.budget for rung in rungs}) < 2:
        return None, "Every trial is trained to the end at once: there are no rungs." if rungs else _no_result(study)
    losses = [trial.losses[rung.budget] for rung in rungs for trial in (*rung.went_on, *rung.stayed)]
    if not losses:
        return None, _no_result(study)
    scale = _LossScale(losses, study.minimized)
    figure, [axes] = _figure(0.5 * len(rungs) + 1.5, 1.9, 2.3, 1.15)
    last = max(rung.budget for rung in rungs)
    for row, rung in enumerate(rungs):
        _rung(axes, -row, rung, scale, rung.budget == last)
        if row and rung.first != rungs[row - 1].first:
            axes.axhline(0.5 - row, color="#8b989f", linewidth=1.0, linestyle=":")
    axes.set_yticks([-row for row in range(len(rungs))], [budget_text(rung.budget, study.unit) for rung in rungs])
    axes.set_ylim(-len(rungs) + 0.45, 0.55)
    scale.set_up(axes, "x")
    axes.grid(axis="x", alpha=0.25)
    height = 0.5 * len(rungs)
    handles = [_dot(_BLUE, "went on, or trained to the end"), _dot(_GREY, "did not go on", fillstyle="none")]
    _legend(axes, handles, -0.75 / max(height, 0.5), 2)
    return figure, (
        "Each dot is a trial's loss after the budget at the left. Trials between two dotted lines began with the "
        "same budget, and were compared with each other."
    )


def _rung(axes: Axes, height: float, rung: StudyRung, scale: _LossScale, last: bool) -> None:
    """Draw one row: the losses of those that went on and of those that did not, and how many they are."""
    count = len(rung.went_on) + len(rung.stayed)
    size = float(np.clip(2000 / max(1, count), 3, 22))
    for trials, color, filled in ((rung.stayed, _BLUE if last else _GREY, last), (rung.went_on, _BLUE, True)):
        at = scale([trial.losses[rung.budget] for trial in trials])
        spread = [height + (trial.number * _GOLDEN % 1.0 - 0.5) * 0.6 for trial in trials]
        face = color if filled else "none"
        axes.scatter(at, spread, s=size, facecolors=face, edgecolors=color, linewidths=0 if filled else 0.8, alpha=0.8)
    words = counted(count, "trial") if last else f"{len(rung.went_on):,} of {count:,} went on"
    words += f", {len(rung.failed):,} failed" if rung.failed else ""
    axes.text(1.02, height, words, transform=axes.get_yaxis_transform(), va="center", fontsize=FONT - 1)
