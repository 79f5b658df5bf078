"""A search in texts: its state in lines, its trials as a table, its HTML page, and what Prefect's UI shows."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from configurable.wording import counted
from tasks.figures import clock
from tasks.pages import keep_page, page_templates
from tasks.search.analysis import ranked
from tasks.search.driver import WorkLeft
from tasks.search.study import Study, StudyTrial
from tasks.stages.base import Artifact
from tasks.tracking.runs import REPORT_FILE

if TYPE_CHECKING:
    from tasks.tracking.search_plots import StudyPlot

_LISTED = 1000
"""Trials on the page."""
_SHOWN = 50
"""Trials in the table of Prefect's UI."""


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """The state of a study in lines for people.

    Args:
        result: As `flows.search.search_result` gives it.
    """
    counts = ", ".join(f"{count:,} {state}" for state, count in result["trials"].items() if count)
    begun, left = sum(result["trials"].values()), result["left"] and WorkLeft(**result["left"])
    of = f" of {result['epochs'] + left.epochs:,}" if left else ""
    lines = [
        f"{result['study']}: {result['method']}, {begun:,} of {result['planned']:,} trials ({counts or 'none'})",
        f"epochs trained: {result['epochs']:,}{of}, in {clock(result['seconds'])}{left or ''}",
    ]
    if best := result["best"]:
        last = max(best["losses"], key=int)  # JSON makes texts of numbers
        loss = f"{result['minimize']} {best['losses'][last]:.4f}"
        lines.append(f"best: trial {best['number']}, {loss} after {counted(int(last), 'epoch')}")
        lines += [f"  {name}={value_text(value)}" for name, value in best["values"].items()]
    return lines


def value_text(value: Any) -> str:
    """A value as `--set` takes it."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _shown(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value) if type(value) is int else value_text(value)


def trial_columns(study: Study, trials: Sequence[StudyTrial]) -> dict[str, list[str]]:
    """A table of trials: by the name of each column, its texts."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))

    def last(trial: StudyTrial) -> str:
        return f"{trial.losses[max(trial.losses)]:.4f}" if trial.losses else ""

    return {
        "trial": [str(trial.number) for trial in trials],
        "state": [trial.state for trial in trials],
        "epochs": [str(trial.trained) for trial in trials],
        str(study.about.get("minimize", "loss")): [last(trial) for trial in trials],
        **{name: [_shown(t.values[name]) if name in t.values else "" for t in trials] for name in names},
        "error": [trial.error.splitlines()[0] if trial.error else "" for trial in trials],
    }


def study_page(study: Study, result: Mapping[str, Any], plots: "Sequence[StudyPlot]") -> str:
    """The HTML page of a search.

    Args:
        study: The study.
        result: Its state, as `flows.search.search_result` gives it.
        plots: Its plots.
    """
    listed, best = ranked(study.trials), study.best
    columns = trial_columns(study, listed[:_LISTED])
    if not any(columns["error"]):
        del columns["error"]
    first, second, *_ = result_lines(result)
    facts = {"search": first.partition(": ")[2], "work": second.partition(": ")[2]}
    return (
        page_templates(base64=lambda data: base64.b64encode(data).decode())
        .get_template("study.html")
        .render(
            name=study.name,
            headline=best and f"{best.losses[max(best.losses)]:.4f}",
            minimized=f"{study.about.get('minimize', 'loss')} after {counted(max(best.losses), 'epoch')}"
            if best
            else "",
            best=best,
            facts=facts,
            values=[(name, value_text(value)) for name, value in best.values.items()] if best else [],
            plots=plots,
            columns=list(columns),
            rows=list(zip(*columns.values(), strict=True)),
            figures=(0, 2, 3),
            left_out=max(0, len(listed) - _LISTED),
            content=json.dumps(study.content, indent=2),
        )
    )


class StudyReport(NamedTuple):
    """What is to see of a search."""

    result: Mapping[str, Any]
    """Its state, as `flows.search.search_result` gives it."""
    plots: "Sequence[StudyPlot]"
    """Its plots."""
    path: Path
    """The page, in the data folder."""

    def files(self) -> dict[str, bytes]:
        """The page and the images, by file name."""
        images = {f"{plot.name}.png": plot.image for plot in self.plots if plot.image}
        return {REPORT_FILE: self.path.read_bytes(), **images}


def write_report(study: Study, result: Mapping[str, Any]) -> StudyReport:
    """Draw the plots of a search, and write its page to the data folder.

    Args:
        study: The study.
        result: Its state, as `flows.search.search_result` gives it.
    """
    from tasks.tracking.search_plots import study_plots  # matplotlib takes a second, and the lines above need none

    plots = list(study_plots(study))
    path = keep_page(f"search-{quote(study.name, safe='')}", study_page(study, result, plots).encode())
    return StudyReport(result, plots, path)


def study_artifacts(study: Study, report: StudyReport, link: str) -> Iterator[Artifact]:
    """What Prefect's UI shows of a search.

    Args:
        study: The study.
        report: Its report.
        link: Where its page is, as Markdown.
    """
    head, *rest = result_lines(report.result)
    text = "\n".join(
        [f"**{head}**", "", *(f"- `{line.strip()}`" if "=" in line else f"- {line}" for line in rest), "", link]
    )
    yield Artifact(text, "Search", "search")
    columns = trial_columns(study, ranked(study.trials)[:_SHOWN])
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    yield Artifact(rows, f"Trials, the best first (at most {_SHOWN})", "search-trials")
    for plot in report.plots:
        if plot.image:
            yield Artifact(plot.image, f"{plot.title}: {plot.caption}", f"search-{plot.name}")
