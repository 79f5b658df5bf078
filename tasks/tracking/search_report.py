"""A search in texts: its state as JSON and in lines, a table of trials, its HTML page, and what Prefect's UI shows."""

import base64
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from tasks.figures import clock, percent
from tasks.pages import keep_page, page_templates
from tasks.search.analysis import ranked
from tasks.search.driver import WorkLeft, spent_budget, work_left
from tasks.search.seeds import seed_spread
from tasks.search.study import Study, StudyError, StudyTrial, after_text, budget_text
from tasks.stages.base import Artifact
from tasks.tracking.runs import REPORT_FILE

if TYPE_CHECKING:
    from tasks.tracking.search_plots import StudyPlot

_LISTED = 1000
"""Trials on the page."""
_SHOWN = 50
"""Trials in the table of Prefect's UI."""


def search_result(study: Study) -> dict[str, Any]:
    """The state of a study as JSON: trials by state, what is done and left, the best trial, the seeds."""
    states = [trial.state for trial in study.trials]
    best, work, seeds = study.best, work_left(study), seed_spread(study)
    return {
        "study": study.name,
        **{name: study.about.get(name) for name in ("method", "minimize", "total_budget", "largest")},
        "planned": study.about.get("trials"),
        "trials": {state: states.count(state) for state in ("finished", "paused", "running", "failed")},
        "unit": study.unit,
        "spent": spent_budget(study.trials, bool(study.about.get("restarts"))),
        "seconds": study.seconds,
        "work": work and work._asdict(),
        "best": best and {name: getattr(best, name) for name in ("number", "values", "trained", "losses", "figures")},
        "seeds": seeds and seeds.to_dict(study.trials),
    }


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """The state of a study in lines for people.

    Args:
        result: As `search_result` gives it.
    """
    lines = _state_lines(result)
    if best := result["best"]:
        last = max(best["losses"], key=int)  # JSON makes texts of numbers
        loss = f"{result['minimize']} {best['losses'][last]:.4f}{after_text(int(last), result['unit'])}"
        lines.append(f"best: trial {best['number']}, {loss}")
        lines += [f"  {name}={value_text(value)}" for name, value in best["values"].items()]
        lines += _seed_lines(result)
    return lines


def _state_lines(result: Mapping[str, Any]) -> list[str]:
    """How far a search is, and how long it has taken."""
    counts = ", ".join(f"{count:,} {state}" for state, count in result["trials"].items() if count)
    begun, work = sum(result["trials"].values()), result["work"] and WorkLeft(**result["work"])
    trained = f"{work.done:,} of {work.done + work.left:,}" if work else f"{result['spent']:,}"
    what = "searched for" if result["largest"] == 0 else f"{result['unit']} trained: {trained}, in"
    return [
        f"{result['study']}: {result['method']}, {begun:,} of {result['planned']:,} trials ({counts or 'none'})",
        f"{what} {clock(result['seconds'])}{work or ''}",
    ]


def _seed_lines(result: Mapping[str, Any]) -> list[str]:
    """What is known of the best trial's configuration with other seeds."""
    seeds, minimized = result["seeds"], result["minimize"]
    if result["largest"] == 0:
        return []
    if seeds is None:
        return ["other seeds: none (search.seeds), so it is not known which differences are chance"]
    trained, failed = len(seeds["losses"]), len(seeds["errors"])
    line = f"other seeds: {trained} of {seeds['planned']} trained, {budget_text(seeds['budget'], result['unit'])} each"
    line += f", {failed} failed" if failed else ""
    if seeds["mean"] is not None:
        line += f": {minimized} {seeds['mean']:.4f}"
    lines = [line]
    if seeds["std"] is not None:
        equal = ", ".join(f"trial {number}" for number in seeds["equal"]) or "no other trial"
        lines[0] += f" ± {seeds['std']:.4f} (mean and standard deviation); the lowest with seed {seeds['best_seed']}"
        lines += [f"equal to the best within the spread of seeds, {seeds['spread']:.4f}: {equal}"]
    if evaluation := seeds["evaluation"]:
        rates = ", ".join(f"{name} {percent(figures['wer'])}" for name, figures in evaluation["sets"].items())
        lines += [f"evaluated: {evaluation['model_uri']}, WER {rates}; {evaluation['decision']}"]
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


def equal_trials(result: Mapping[str, Any]) -> list[int]:
    """Numbers of the trials that are equal to the best within the spread of seeds.

    Args:
        result: As `search_result` gives it.
    """
    return list(result["seeds"]["equal"]) if result["seeds"] else []


def equal_text(result: Mapping[str, Any]) -> str:
    """What the marks of `trial_columns` mean; empty if there are none.

    Args:
        result: As `search_result` gives it.
    """
    if not equal_trials(result):
        return ""
    spread = result["seeds"]["spread"]
    return f"= differs from the best trial by less than trainings with other seeds do, {spread:.4f}"


def trial_columns(study: Study, trials: Sequence[StudyTrial], equal: Collection[int] = ()) -> dict[str, list[str]]:
    """A table of trials: by the name of each column, its texts.

    Args:
        study: Their study.
        trials: The trials.
        equal: Numbers of those that are marked by `=`.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))

    def last(trial: StudyTrial) -> str:
        return f"{trial.losses[max(trial.losses)]:.4f}" if trial.losses else ""

    return {
        "trial": [f"{trial.number} =" if trial.number in equal else str(trial.number) for trial in trials],
        "state": [trial.state for trial in trials],
        **({study.unit: [str(trial.trained) for trial in trials]} if study.trains else {}),
        study.minimized: [last(trial) for trial in trials],
        **{name: [_shown(t.values[name]) if name in t.values else "" for t in trials] for name in names},
        "error": [trial.error.splitlines()[0] if trial.error else "" for trial in trials],
    }


def study_page(study: Study, result: Mapping[str, Any], plots: "Sequence[StudyPlot]") -> str:
    """The HTML page of a search.

    Args:
        study: The study.
        result: Its state, as `search_result` gives it.
        plots: Its plots.
    """
    listed, best = ranked(study.trials), study.best
    columns = trial_columns(study, listed[:_LISTED], equal_trials(result))
    if not any(columns["error"]):
        del columns["error"]
    last = max(best.losses) if best else 0
    search, work = _state_lines(result)
    seeds = _seed_lines(result) if best else []
    return (
        page_templates(base64=lambda data: base64.b64encode(data).decode())
        .get_template("study.html")
        .render(
            name=study.name,
            headline=best and f"{best.losses[last]:.4f}",
            minimized=f"{study.minimized}{after_text(last, study.unit)}",
            best=best,
            facts=[("search", search.partition(": ")[2]), ("work", work), *(line.split(": ", 1) for line in seeds)],
            values=[(name, value_text(value)) for name, value in best.values.items()] if best else [],
            seeds=_seed_rows(result),
            seed_columns=("seed", study.minimized, "error"),
            plots=plots,
            columns=list(columns),
            rows=list(zip(*columns.values(), strict=True)),
            figures=[place for place, name in enumerate(columns) if name in (study.unit, study.minimized)],
            equal=equal_text(result),
            left_out=max(0, len(listed) - _LISTED),
            content=json.dumps(study.content, indent=2),
        )
    )


def _seed_rows(result: Mapping[str, Any]) -> list[tuple[Any, str, str]]:
    """Of each seed, and of their mean and standard deviation: what is minimized; or an error."""
    seeds = result["seeds"]
    if not seeds:
        return []
    rows = [(seed, f"{loss:.4f}", "") for seed, loss in seeds["losses"].items()]
    rows += [(seed, "", error.partition("\n")[0]) for seed, error in seeds["errors"].items()]
    figures = {"mean": seeds["mean"], "standard deviation": seeds["std"]}
    return sorted(rows) + [(name, f"{value:.4f}", "") for name, value in figures.items() if value is not None]


class StudyReport(NamedTuple):
    """What is to see of a search."""

    result: Mapping[str, Any]
    """Its state, as `search_result` gives it."""
    plots: "Sequence[StudyPlot]"
    """Its plots."""
    path: Path
    """The page, in the data folder."""

    def files(self) -> dict[str, bytes]:
        """The page and the images, by file name."""
        images = {f"{plot.name}.png": plot.image for plot in self.plots if plot.image}
        return {REPORT_FILE: self.path.read_bytes(), **images}


def write_report(study: Study) -> StudyReport:
    """Draw the plots of a search, and write its page to the data folder.

    Args:
        study: The study.

    Raises:
        StudyError: It is no search's.
    """
    if "space" not in study.content:
        raise StudyError(f"{study.name} has no space: trainings with other seeds are in the report of their search")
    from tasks.tracking.search_plots import study_plots  # matplotlib takes a second, and the lines above need none

    result, plots = search_result(study), list(study_plots(study))
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
        [f"**{head}**", "", *(f"  - `{line.strip()}`" if line[0] == " " else f"- {line}" for line in rest), "", link]
    )
    yield Artifact(text, "Search", "search")
    columns = trial_columns(study, ranked(study.trials)[:_SHOWN], equal_trials(report.result))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    marks = equal_text(report.result)
    yield Artifact(rows, f"Trials, the best first (at most {_SHOWN}){marks and f'; {marks}'}", "search-trials")
    for plot in report.plots:
        if plot.image:
            yield Artifact(plot.image, f"{plot.title}: {plot.caption}", f"search-{plot.name}")
