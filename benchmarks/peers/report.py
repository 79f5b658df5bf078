"""Converts figures of pairs to rows, and rows to tables."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.base import find
from benchmarks.peers.pair import STOPPED, Figures, Measured
from benchmarks.peers.side import Scenario

Row = dict[str, Any]
BUSY = 0.9
"""CPU load above which the cores may be the limit rather than a system."""
_MORE_IS_BETTER: dict[str, bool] = {
    "steps_per_s": True,
    "cpu_ms": False,
    "mb": False,
    "distance": False,
    "kept": True,
    "pause_s": False,
    "joined_s": False,
    "pace_joined": True,
}
_ABOUT_EQUAL = 0.02
"""Ratios that differ from 1 by less than this are noise."""


def to_row(scenario: Scenario, name: str, results: Sequence[Measured]) -> Row:
    """Make a row: both systems' figures, and for each figure Starling's advantage as a ratio.

    Args:
        scenario: The scenario.
        name: The other system.
        results: Results of the pair's repetitions, at least one.
    """
    ours, theirs = [result.ours for result in results], [result.theirs for result in results]
    row: Row = {
        "condition": scenario.name,
        "peer": name,
        "learners": scenario.learners,
        "params": scenario.params,
        "step_s": scenario.step_s,
        "starling": _figures(ours),
        "theirs": _figures(theirs),
        "cpu_share": round(statistics.median(result.cpu_share for result in results), 3),
    }
    row["ahead"] = {key: ahead(row["starling"][key], row["theirs"][key], more) for key, more in _MORE_IS_BETTER.items()}
    # windows of both systems are concurrent, so their ratios are more precise than the ratio of the medians
    pairs = [
        mine / their
        for result in results
        for mine, their in zip(result.ours.steps_per_s, result.theirs.steps_per_s, strict=True)
        if mine and their
    ]
    if pairs:
        row["ahead"]["steps_per_s"] = round(statistics.median(pairs), 3)
    row["note"] = _note(scenario, name, theirs, row["cpu_share"])
    return row


def _figures(runs: Sequence[Figures]) -> Row:
    row: Row = {}
    for key in ("steps_per_s", "cpu_ms", "mb"):
        row[key] = _median([value for run in runs for value in getattr(run, key)])
    for key in ("distance", "kept", "pause_s", "joined_s", "pace_joined"):
        row[key] = _median([value for run in runs if (value := getattr(run, key)) is not None])
    return row


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def ahead(mine: float | None, theirs: float | None, more_is_better: bool) -> float | None:
    """Ratio by which Starling's figure is better; None if a figure is missing or 0."""
    if not mine or not theirs:
        return None
    return round(mine / theirs if more_is_better else theirs / mine, 3)


def _note(scenario: Scenario, name: str, theirs: Sequence[Figures], cpu_share: float) -> str:
    notes = ["the cores were busy"] if cpu_share > BUSY else []
    if scenario.kills:
        ended = sum(figures.ended for figures in theirs)
        stopped = [figures for figures in theirs if (figures.kept or 0.0) <= STOPPED]
        if ended:
            notes.append("its survivors ended")
        elif stopped:
            notes.append("its survivors stopped, and none of them ended")
        notes += [] if find(name).joins else ["learners cannot join"]
    return "; ".join(notes)


def behind(rows: Sequence[Row]) -> list[str]:
    """Descriptions of the figures in which Starling is behind."""
    figures = []
    for row in rows:
        for key, value in row["ahead"].items():
            if value is not None and value < 1 - _ABOUT_EQUAL:
                figures.append(f"{row['condition']}, {find(row['peer']).title}: {_TITLES[key]} x {value:.2f}")
            elif value is None and key == "distance" and row["starling"]["distance"] and not row["theirs"]["distance"]:
                figures.append(f"{row['condition']}, {find(row['peer']).title}: its replicas are equal after each step")
    return figures


# --- showing

_TITLES = {
    "steps_per_s": "steps/s",
    "cpu_ms": "CPU ms/step",
    "mb": "MB/step",
    "distance": "distance",
    "kept": "pace after a kill",
    "pause_s": "longest pause s",
    "joined_s": "join s",
    "pace_joined": "pace with newcomer",
}
_TRAINING = ("steps_per_s", "cpu_ms", "mb", "distance")
_FAILURES = ("kept", "pause_s", "joined_s", "pace_joined")
_FORMS: dict[str, Callable[[float], str]] = {"cpu_ms": "{:.1f}".format, "distance": "{:.2f}".format}


def table(rows: Sequence[Row]) -> str:
    """Markdown tables of training and of failures; cells contain both figures and the ratio."""
    tables = []
    for kills, keys in ((False, _TRAINING), (True, _FAILURES)):
        chosen = [row for row in rows if (row["starling"]["kept"] is not None) == kills]
        if chosen:
            head = _line(["condition", "beside", *(_TITLES[key] for key in keys), "CPU", ""])
            rule = "|---" * (len(keys) + 4) + "|"
            tables.append("\n".join([head, rule, *(_line(_cells(row, keys)) for row in chosen)]))
    return "\n\n".join(tables)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row, keys: Sequence[str]) -> list[str]:
    cells = [row["condition"], find(row["peer"]).title]
    for key in keys:
        mine, theirs, ratio = row["starling"][key], row["theirs"][key], row["ahead"][key]
        text = f"{_form(key, mine)} / {_form(key, theirs)}"
        cells.append(text if ratio is None else f"{text} (x {ratio:.2f})")
    return [*cells, f"{row['cpu_share']:.2f}", row["note"]]


def _form(key: str, value: float | None) -> str:
    return "–" if value is None else _FORMS.get(key, "{:.2f}".format)(value)
