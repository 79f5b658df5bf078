"""A search in MLflow: a parent run with the best so far, and the trials' trainings, if it has any, as its children."""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.tracking.runs import (
    REPORT_FILE,
    artifact_link,
    client,
    continue_run,
    end_run,
    experiment_id,
    impatient,
    owner_tags,
    set_tags,
)

PARENT_TAG = "mlflow.parentRunId"
_SEARCH_TAG = "starling.search"
_PATIENCE_S = 20
_log = logging.getLogger(__name__)


class SearchRun:
    """The parent run of a search; no error of MLflow stops the search.

    Args:
        experiment: Name of the experiment.
        identity: Of the study: the same one has the same run.
        name: Name of the run.

    Attributes:
        run_id: Id of the run; empty if MLflow does not answer.
    """

    def __init__(self, experiment: str, identity: str, name: str) -> None:
        self.run_id = ""
        self._try(lambda api: self._open(api, experiment, identity, name))

    @property
    def tags(self) -> dict[str, str]:
        """Tags that make a run a child of this one."""
        return {PARENT_TAG: self.run_id} if self.run_id else {}

    def _open(self, api: Any, experiment: str, identity: str, name: str) -> None:
        place = experiment_id(api, experiment)
        found = api.search_runs([place], f"tags.`{_SEARCH_TAG}` = '{identity}'", max_results=1)
        if found:
            self.run_id = str(found[0].info.run_id)
            set_tags(api, self.run_id, owner_tags(name))  # first: a running one without its process counts as killed
            continue_run(api, found[0])
        else:
            tags = {_SEARCH_TAG: identity, **owner_tags(name)}
            self.run_id = str(api.create_run(place, run_name=name, tags=tags).info.run_id)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures after some training of all trials.

        Args:
            figures: By name.
            step: What they have trained, in what budgets count; of a search that trains nothing, the trials.
        """

        def send(api: Any) -> None:
            for name, value in figures.items():
                api.log_metric(self.run_id, name, value, step=step)

        if self.run_id:
            self._try(send)

    def attach(self, files: Mapping[str, bytes]) -> None:
        """Attach files, in place of former ones of these names.

        Args:
            files: Contents by name.
        """

        def send(api: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    path = Path(folder) / name
                    path.write_bytes(content)
                    api.log_artifact(self.run_id, str(path))

        if self.run_id:
            self._try(send)

    def report_text(self, path: Path) -> str:
        """Markdown that leads to the attached report; without a server, to the local file.

        Args:
            path: The local file.
        """
        links: list[str] = []
        if self.run_id:
            self._try(lambda api: links.append(artifact_link(api.get_run(self.run_id), REPORT_FILE)))
        return f"[Report]({links[0]})" if any(links) else f"Report: `{path}`"

    def end(self, result: Mapping[str, Any], status: str, reason: str = "") -> None:
        """Log the result of the search, and end the run.

        Args:
            result: As JSON.
            status: FINISHED, FAILED or KILLED.
            reason: Why the search was stopped, if it was.
        """

        def send(api: Any) -> None:
            api.log_dict(self.run_id, dict(result), "search.json")
            end_run(api, self.run_id, status, reason)

        if self.run_id:
            self._try(send)

    def _try(self, action: Any) -> None:
        try:
            with impatient(_PATIENCE_S):
                action(client())
        except Exception as error:  # the study has everything
            _log.warning("MLflow has not got all of the search: %s: %s", type(error).__name__, error)
