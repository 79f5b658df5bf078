"""Prefect artifacts of a run: tables, Markdown, images, progress. A failure to write them does not affect the run."""

import base64
import re
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from tasks.figures import percent
from tasks.stages import progress
from tasks.stages.base import Artifact, Run, StageResult, counts_text, get_stage
from tasks.stages.register import registered_text
from tasks.stages.report import report_link
from tasks.stages.score import SCORE

_UPDATE_S = 5.0  # an update costs the server some 30 ms


def artifact_key(*parts: str) -> str:
    """A key in Prefect's format: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def quietly(action: Callable[[], Any]) -> Any:
    """The result of an action that only shows something; None, and a warning, if it fails."""
    try:
        return action()
    except Exception as error:  # the stage's work is done and published, whatever the server's error
        get_run_logger().warning("an artifact could not be written: %s", error)
        return None


def publish(run: Run, result: StageResult) -> None:
    """Write the artifacts of a finished stage."""
    quietly(lambda: publish_artifacts(run.config.name, result.name, get_stage(result.name).artifacts(run, result)))


def publish_artifacts(name: str, part: str, artifacts: Iterable[Artifact]) -> None:
    """Write artifacts.

    Args:
        name: The configuration's, with which all keys begin.
        part: End of the keys of artifacts that have no name.
        artifacts: What to write.
    """
    for artifact in artifacts:
        key = artifact_key(name, artifact.name or part)
        content, about = artifact.content, artifact.description
        if isinstance(content, bytes):
            # Prefect's page of an image artifact shows the whole URL, too, across everything beside it
            content = f"![{key}](data:image/png;base64,{base64.b64encode(content).decode()})"
            create_markdown_artifact(content, key=key, description=about)
        elif isinstance(content, str):
            create_markdown_artifact(content, key=key, description=about)
        else:
            create_table_artifact(content, key=key, description=about)


def publish_summary(run: Run) -> None:
    """Write a summary on the flow run itself: stages, error rates, the model; other artifacts are on nested runs."""
    lines = [f"## {run.run_id}", "", "| stage | time | counts |", "|---|---:|---|"]
    for result in run.results.values():
        took = "cached" if result.cached else f"{result.seconds:.1f} s"
        lines.append(f"| {result.name} | {took} | {counts_text(result.counts)} |")
    if "score" in run.results:
        lines += ["", "| set | WER | words |", "|---|---:|---:|"]
        sets = SCORE.record(run)["sets"]
        lines += [f"| {name} | {percent(scores['wer'])} | {scores['words']:,} |" for name, scores in sets.items()]
    if "register" in run.results:
        lines += ["", registered_text(run.result("register"))]
    if "report" in run.results:
        lines += ["", report_link(run)]
    key = artifact_key(run.config.name, "summary")
    quietly(lambda: create_markdown_artifact("\n".join(lines), key=key, description="Summary of the run"))


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
            self._id = quietly(lambda: create_progress_artifact(share, key=self.key, description=note))
        else:
            quietly(lambda: update_progress_artifact(known, progress=share, description=note))

    def finish(self) -> None:
        """Show 100 %, if anything was shown."""
        progress.forget_links(self.stage)
        if self._id is not None:
            self._set(100.0, "done")
