"""Summary of a run: a JSON object, and tables for the terminal."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configurable.wording import counted
from flows.score_tables import print_scores
from tasks.config.home import shown_mlflow_uri
from tasks.dataset.duplicates import data_warnings
from tasks.dataset.sets import is_trained
from tasks.dataset.speakers import set_rows
from tasks.figures import LEARN_MORE, percent, speakers_text
from tasks.scores import GROUPS, interval
from tasks.stages.base import Run, counts_text
from tasks.stages.evaluation import write_evaluation
from tasks.stages.register import REGISTER
from tasks.stages.report import local_report
from tasks.stages.score import SCORE, nothing_correct
from tasks.stages.train import TRAIN
from tasks.tracking.registry import current_aliases

_LONG = 0.1
"""Share of a run's time from which a stage is named."""
_MINUTES_FROM = 90.0
"""Seconds from which times are given in minutes."""


def summarize(run: Run) -> dict[str, Any]:
    """Summary of a run: stages, utterances, scores, model and report, for the stages that have run."""
    results = run.results
    summary: dict[str, Any] = {
        "run_id": run.run_id,
        "stages": [
            {"name": r.name, "seconds": round(r.seconds, 3), "cached": r.cached, "counts": r.counts, "url": r.url}
            for r in results.values()
        ],
        "utterances": {"read": 0, "written": 0, "quarantined": 0},
        "data": {"sets": [], "warnings": []},
        "training": None,
        "sets": {},
        "groups": {},
        "model_uri": None,
        "model_aliases": [],
        "decision": None,
        "untrained": False,
        "registry": None,
        "report": None,
    }
    if "prepare" in results:
        summary["utterances"] = _utterances(run)
        record = results["prepare"].record
        summary["data"] = {"sets": set_rows(record), "warnings": data_warnings(record, run.config.data)}
    if "train" in results:
        summary["training"] = _training(run)
    if "score" in results:
        summary["sets"] = SCORE.record(run)["sets"]
        summary["groups"] = SCORE.record(run)["groups"]
    if "register" in results:
        registered = REGISTER.record(run)
        summary["model_uri"], summary["model_aliases"] = registered["model_uri"], current_aliases(registered)
        summary["decision"], summary["registry"] = registered["decision"]["reason"], shown_mlflow_uri()
        summary["untrained"] = registered["decision"].get("untrained", False)
    if "report" in results:
        result = results["report"]
        summary["report"] = str(local_report(result.store, run.config.name, result.key))
    return summary


def summarize_evaluation(run: Run, model: str) -> dict[str, Any]:
    """Summary of an evaluation of an existing model; writes its report."""
    return summarize(run) | {"model": model, "report": str(write_evaluation(run, model))}


def _training(run: Run) -> dict[str, Any]:
    """The training's strategy and learners, and utterances repeated because a node was lost."""
    cfg, record = run.config.train, TRAIN.record(run)
    result = record["result"]
    return {
        "strategy": cfg.strategy.kind,
        "nodes": cfg.nodes,
        "learners_per_node": cfg.learners_per_node,
        "utterances": result["utterances"],
        "repeated": result.get("repeated", 0),
        "identity": record.get("tracking", {}).get("training", ""),
    }


def _utterances(run: Run) -> dict[str, int]:
    """Counts over both stages that quarantine utterances: read = written + quarantined, + unused with shares."""
    counts = dict(run.result("prepare").counts)
    if "shard" in run.results:
        late = run.result("shard").counts["quarantined"]
        counts["written"] -= late
        counts["quarantined"] += late
    return {name: counts[name] for name in ("read", "written", "quarantined", "unused") if name in counts}


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print the tables at the end of a run."""
    stages = Table(title=summary["run_id"], title_justify="left", header_style="bold")
    stages.add_column("stage")
    stages.add_column("time", justify="right")
    stages.add_column("counts")
    for stage in summary["stages"]:
        time = "cached" if stage["cached"] else f"{stage['seconds']:.1f} s"
        stages.add_row(stage["name"], time, counts_text(stage["counts"]))
    console.print(stages)
    if summary.get("data", {}).get("sets"):
        console.print(set_table(summary["data"]["sets"]))
        for warning in summary["data"]["warnings"]:
            console.print(f"[bold yellow]warning[/bold yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    training = summary.get("training")
    if training and training["nodes"] * training["learners_per_node"] > 1:
        console.print(_training_table(training))
    if summary["sets"]:
        print_scores(summary["sets"], console)
    if summary.get("groups"):
        console.print(group_table(summary["groups"]))
    _print_model(summary, console)


def print_outcome(summary: dict[str, Any], console: Console) -> None:
    """Print what a run has come to, in a few lines; `print_summary` has the tables, which are in the run's log."""
    for warning in summary["data"]["warnings"]:
        console.print(f"[bold yellow]warning[/bold yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    console.print()
    if summary["sets"]:
        console.print(outcome_table(summary["sets"]))
        console.print()
    console.print(f"time    {time_text(summary['stages'])}", highlight=False, soft_wrap=True)
    _print_model(summary, console)
    console.print(f"log     {summary['log']}", highlight=False, soft_wrap=True)


def time_text(stages: list[dict[str, Any]]) -> str:
    """Where the time of a run went: the stages that took most of it, and those that were not run again."""
    ran = sorted((s for s in stages if not s["cached"]), key=lambda s: -s["seconds"])
    total = sum(s["seconds"] for s in ran)
    long = [s for s in ran if s["seconds"] >= _LONG * total]
    parts = [f"{s['name']} {_seconds(s['seconds'])}" for s in long]
    if len(ran) > len(long):
        parts.append(
            f"{counted(len(ran) - len(long), 'other')} {_seconds(sum(s['seconds'] for s in ran[len(long) :]))}"
        )
    cached = ", ".join(s["name"] for s in stages if s["cached"])
    spent = f"{_seconds(total)}: {', '.join(parts)}" if parts else "nothing to do"
    return f"{spent}; cached: {cached}" if cached else spent


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _MINUTES_FROM else f"{seconds / 60:.1f} min"


def _print_model(summary: dict[str, Any], console: Console) -> None:
    """Print warnings about the model, where it and its report are, and how to use it."""
    if summary.get("training") and not summary["untrained"]:  # else the decision says so
        for warning in useless_warnings(summary["sets"]):
            console.print(f"[bold yellow]warning[/bold yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    if summary["model_uri"]:
        aliases = " ".join(f"@{alias}" for alias in summary["model_aliases"])
        console.print(f"model   [bold]{summary['model_uri']}[/bold]  {aliases}", highlight=False)
        console.print(f"        {escape(summary['decision'])}", highlight=False, soft_wrap=True)
        console.print(f"        in the registry at {summary['registry']}", highlight=False, soft_wrap=True)
    if summary["report"]:
        console.print(f"report  {summary['report']}", highlight=False, soft_wrap=True)
    if summary["model_uri"]:
        # the alias if the model is champion, else its version
        name = summary["model_uri"].rsplit("/", 1)[0]
        uri = f"{name}@champion" if "champion" in summary["model_aliases"] else summary["model_uri"]
        console.print(f"try     starling transcribe --model {uri} FILE.wav", highlight=False, soft_wrap=True)


def useless_warnings(sets: dict[str, Any]) -> list[str]:
    """A line for each set in which a model that was just trained recognized no word, with what helps."""
    return [
        f"no word of {name!r} was recognized correctly: this model has learned nothing yet. {LEARN_MORE}"
        for name, scores in sets.items()
        if nothing_correct(scores)
    ]


def set_table(rows: list[dict[str, Any]]) -> Table:
    """Table of the sets: size, speakers, and how many speakers are in the training set, if there is one."""
    table = Table(header_style="bold")
    table.add_column("set")
    trained = any(is_trained(row["set"]) for row in rows)
    unheard = any(is_trained(row["set"]) and row.get("unnamed") for row in rows)
    heard = any(row.get("contaminated") for row in rows)
    more = [*(["speakers also in training"] if trained else []), *(["utterances also in training"] if heard else [])]
    for head in ("utterances", "hours", "speakers", *more):
        table.add_column(head, justify="right")
    for row in rows:
        unnamed = row.get("unnamed", 0)
        bound = " or more" if unnamed or unheard else ""
        also = "unknown" if row["trained_on"] is None else f"{row['trained_on']:,}{bound}"
        shared = [] if not trained else [""] if is_trained(row["set"]) else [also]
        speakers = speakers_text(row["speakers"], unnamed)
        shared += ([""] if is_trained(row["set"]) else [f"{row.get('contaminated', 0):,}"]) if heard else []
        table.add_row(row["set"], f"{row['utterances']:,}", f"{row['hours']:.2f}", speakers, *shared)
    return table


def _training_table(training: dict[str, Any]) -> Table:
    table = Table(header_style="bold")
    table.add_column("strategy")
    for head in ("nodes", "learners per node", "utterances trained", "repeated"):
        table.add_column(head, justify="right")
    fields = ("nodes", "learners_per_node", "utterances", "repeated")
    table.add_row(training["strategy"], *(f"{training[name]:,}" for name in fields))
    return table


def outcome_table(sets: dict[str, Any]) -> Table:
    """Word error rates by set, with their intervals: over speakers if there are several, else over utterances."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("set", overflow="ellipsis", no_wrap=True, max_width=20)
    normalized = any("wer_normalized" in s for s in sets.values())  # of transcripts with capitals or punctuation
    for head in ("WER", "95 % interval", "over", "words", *(["normalized WER"] if normalized else [])):
        table.add_column(head, justify="right", no_wrap=True)
    for name, s in sets.items():
        several = s.get("wer_speaker_low") is not None
        over = counted(s["speakers"], "speaker") if several else counted(s["utterances"], "utterance")
        bounds = interval(s, "wer_speaker" if several else "wer")
        more = [percent(s.get("wer_normalized"))] if normalized else []
        table.add_row(name, percent(s["wer"]), bounds, over, f"{s['words']:,}", *more)
    return table


def group_table(groups: dict[str, Any]) -> Table:
    """Error rates by corpus and by domain, where a set has several."""
    table = Table(header_style="bold")
    for head in ("set", "by", ""):
        table.add_column(head)
    for head in ("WER", "words"):
        table.add_column(head, justify="right")
    for name, kinds in groups.items():
        for kind, members in kinds.items():
            for member, counts in members.items():
                table.add_row(name, GROUPS[kind], member or "–", percent(counts["wer"]), f"{counts['ref_words']:,}")
    return table
