"""Prefect artifacts of a run: tables, Markdown, an image, progress. A failure to write them does not affect the run."""

import base64
import re
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from tasks.dataset.duplicates import data_warnings
from tasks.dataset.speakers import set_rows
from tasks.figures import percent
from tasks.stages import lm, progress
from tasks.stages.base import Run, StageResult, counts_text
from tasks.stages.score import GROUPS, RATES
from tasks.tracking.metrics import is_number
from tasks.tracking.plots import curves_png, stored_journal
from tasks.tracking.registry import record_links, report_text

_EPOCHS = 50
"""Maximum number of epochs in a table."""
_UPDATE_S = 5.0  # an update costs the server some 30 ms


def artifact_key(*parts: str) -> str:
    """A key in Prefect's format: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _quietly(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # the stage's work is done and published, whatever the server's error
        get_run_logger().warning("an artifact could not be written: %s", error)
        return None


def publish(run: Run, result: StageResult) -> None:
    """Write the artifacts of a finished stage."""
    key = artifact_key(run.config.name, result.name)
    text = f"**{result.name}**: {counts_text(result.counts)}\n\n`{result.url}`" + (" (cached)" if result.cached else "")
    if result.name == "score":
        _quietly(lambda: create_table_artifact(_score_table(result), key=key, description="Word error rates"))
    elif result.name == "prepare":
        text = "\n\n".join([text, *data_warnings(result.record, run.config.data)])
        _quietly(lambda: create_table_artifact(set_rows(result.record), key=key, description=text))
    elif result.name in ("lm", "rescoring"):
        _quietly(lambda: create_table_artifact(_lm_table(result), key=key, description=text))
    elif result.name == "decode" and "tuning" in result.record:
        table = result.record["tuning"]["table"]
        _quietly(lambda: create_table_artifact(table, key=key, description=f"{text}\n\n{_tuned(result)}"))
    elif result.name == "register":
        _quietly(lambda: create_markdown_artifact(_registered(result), key=key, description="Registered model"))
    elif result.name == "train":
        _quietly(lambda: _publish_training(run, result, key, text))
    elif result.name == "report":
        _quietly(lambda: create_markdown_artifact(_report(run), key=key, description="HTML report"))
    else:
        _quietly(lambda: create_markdown_artifact(text, key=key))


def _publish_training(run: Run, result: StageResult, key: str, text: str) -> None:
    """A table of the training's validations, and its curves."""
    journal = stored_journal(result.output)
    create_markdown_artifact(f"{text}\n\n{validation_table(journal)}", key=key, description="Training by epoch")
    picture = base64.b64encode(curves_png(journal)).decode()
    about = "Curves of the training"
    key = artifact_key(run.config.name, "curves")
    create_image_artifact(f"data:image/png;base64,{picture}", key=key, description=about)


def validation_table(journal: list[dict[str, Any]]) -> str:
    """Losses and rates of a training's last epochs, as Markdown.

    Args:
        journal: Valid entries, in order.
    """
    columns = {"valid_wer": "WER", "valid_frame_accuracy": "frame accuracy"}
    rows = [entry for entry in journal if entry["kind"] == "valid"]
    shown = {name: label for name, label in columns.items() if any(row.get(name) is not None for row in rows)}
    heads = ["epoch", "training loss", "validation loss", *shown.values()]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for row in rows[-_EPOCHS:]:
        losses = (_loss(row.get(name)) for name in ("train_loss", "valid_loss"))
        cells = [str(row["epoch"]), *losses, *(percent(row.get(name)) for name in shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else "–"


def _report(run: Run) -> str:
    return report_text(run.result("register").record, run.result("report").record["report"])


def _registered(result: StageResult) -> str:
    """The registered version, the reason for its promotion or against it, and links to MLflow."""
    links = record_links(result.record)
    lines = [f"**{result.record['model_uri']}**", result.record["decision"]["reason"]]
    return "\n\n".join([*lines, *(f"[{name}]({url})" for name, url in links.items())])


def publish_summary(run: Run) -> None:
    """Write a summary on the flow run itself: stages, error rates, the model; other artifacts are on nested runs."""
    lines = [f"## {run.run_id}", "", "| stage | time | counts |", "|---|---:|---|"]
    for result in run.results.values():
        took = "cached" if result.cached else f"{result.seconds:.1f} s"
        lines.append(f"| {result.name} | {took} | {counts_text(result.counts)} |")
    if "score" in run.results:
        lines += ["", "| set | WER | words |", "|---|---:|---:|"]
        sets = run.result("score").record["sets"]
        lines += [f"| {name} | {percent(scores['wer'])} | {scores['words']:,} |" for name, scores in sets.items()]
    if "register" in run.results:
        lines += ["", _registered(run.result("register"))]
    if "report" in run.results:
        lines += ["", _report(run)]
    key = artifact_key(run.config.name, "summary")
    _quietly(lambda: create_markdown_artifact("\n".join(lines), key=key, description="Summary of the run"))


def _score_table(result: StageResult) -> list[dict[str, Any]]:
    """Sets, and below them their corpora and domains where they have several."""
    rows = [
        {"set": name, **{k: percent(v) if k in RATES else v for k, v in scores.items()}}
        for name, scores in result.record["sets"].items()
    ]
    for name, kinds in result.record.get("groups", {}).items():
        for kind, members in kinds.items():
            for member, counts in members.items():
                place = f"{name}, {GROUPS[kind]} {member or '–'}"
                rows.append({"set": place, "wer": percent(counts["wer"]), "words": counts["ref_words"]})
    return rows


def _tuned(result: StageResult) -> str:
    """The chosen values, and what they were chosen on."""
    tuning = result.record["tuning"]
    chosen = ", ".join(f"{name} {value:g}" for name, value in tuning["chosen"].items())
    return f"chosen on {tuning['utterances']} utterances of {tuning['set']}: {chosen}, WER {percent(tuning['wer'])}"


def _lm_table(result: StageResult) -> list[dict[str, Any]]:
    """Figures of the language model, and the lines of its text by what became of them."""
    lines = {f"text: {name}": value for name, value in result.record["lm"]["text"].items()}
    figures = lm.figures(result.record, result.name) | lines
    return [{"figure": name, "value": _number(value)} for name, value in figures.items()]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"


class ProgressArtifact:
    """A progress artifact updated by a stage's reports."""

    def __init__(self, run: Run, stage: str) -> None:
        self.key = artifact_key(run.config.name, stage, "progress")
        self.stage = stage
        self._id: UUID | None = None
        self._last = -_UPDATE_S

    def __call__(self, stage: str, done: float, total: float, note: str) -> None:
        """Receive a report (`tasks.stages.progress`). The description is the note, with the stage's links."""
        now = time.monotonic()
        if stage != self.stage or total <= 0 or now - self._last < _UPDATE_S:
            return
        self._last = now
        links = "".join(f", [{text}]({url})" for text, url in progress.links(stage).items())
        self._set(100.0 * min(1.0, done / total), note + links)

    def _set(self, share: float, note: str) -> None:
        known = self._id
        if known is None:
            self._id = _quietly(lambda: create_progress_artifact(share, key=self.key, description=note))
        else:
            _quietly(lambda: update_progress_artifact(known, progress=share, description=note))

    def finish(self) -> None:
        """Show 100 %, if anything was shown."""
        progress.forget_links(self.stage)
        if self._id is not None:
            self._set(100.0, "done")
