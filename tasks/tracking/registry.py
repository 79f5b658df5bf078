"""Rules of the model registry: the champion, the waiting challenger, promotion and rollback.

MLflow moves an alias in one transaction, so a model has one champion at any time, even if a process is killed. Tags
that a move depends on are written before it, to the version that becomes champion; what only records the move is
written afterwards, and completed by the next move if the process is killed.
"""

import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from tasks.config.home import home
from tasks.dataset.policies import SlotsConfig
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import lock_name, machine_lock, shared_lock
from tasks.orchestration.events import ROLLED_BACK, emit
from tasks.tracking.known_models import model_names, unknown_model, versions_named, versions_of, versions_text
from tasks.tracking.runs import DECISION_TAG, KEY_TAG, REPORT_FILE, artifact_link, client, ui_links

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
TESTS_TAG = "starling.tests"
"""Digests of test sets: of a version, those it was scored on; of a model, the frozen ones."""
COMPARED_TAG = "starling.judged"
"""Tag of a version: champion and test sets of its last comparison."""
REPLACED_TAG = "starling.replaced"
"""Tag of a version that became champion: the champion that it replaced."""
SINCE_TAG = "starling.champion_since"
ROLLED_BACK_TAG = "starling.rolled_back"
"""Tag of a version that was rolled back: the reason. Only a command with its number makes it champion again."""
_PATIENCE = SlotsConfig(collision="wait", wait_hours=1)
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class RegistryError(ValueError):
    """A request to the registry cannot be carried out; the message names a remedy."""


@dataclass(frozen=True)
class Move:
    """A change of the champion."""

    name: str
    """Registered model."""
    champion: str
    """Version of the new champion."""
    replaced: str
    """Version of the previous champion."""
    reason: str
    """Reason of the change."""


def find_version(api: mlflow.MlflowClient, name: str, key: str) -> Any | None:
    """The version that was registered for a stage output, or None."""
    try:
        versions = api.search_model_versions(f"name = '{name}' and tags.`{KEY_TAG}` = '{key}'")
    except MlflowException:
        return None
    return versions[0] if versions else None


def version_of(api: mlflow.MlflowClient, name: str, alias: str) -> Any | None:
    """The version with an alias, or None; other errors raise, since an outage must not lead to a promotion."""
    try:
        return api.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return None
        raise


def champion_version(api: mlflow.MlflowClient, name: str) -> Any | None:
    """The current champion, or None if there is none."""
    return version_of(api, name, CHAMPION)


def existing_model(api: mlflow.MlflowClient, name: str) -> str:
    """The name of a model, if there is one of this name.

    Raises:
        RegistryError: If there is none; the message names those that there are.
    """
    known = model_names(api)
    if name not in known:
        raise RegistryError(unknown_model(name, known))
    return name


def get_version(api: mlflow.MlflowClient, name: str, version: str) -> Any:
    """A version by its number.

    Raises:
        RegistryError: If the registry has no such version.
    """
    try:
        return api.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code in _ABSENT:
            raise RegistryError(
                f"{name} has no version {version} in this registry; it has: "
                f"{versions_text(versions_of(api, existing_model(api, name)))}"
            ) from error
        raise


def comparison_key(champion: Any | None, tests: str) -> str:
    """Champion and test sets of a comparison, in the format of `COMPARED_TAG`."""
    return f"{champion.version if champion is not None else 'none'} {tests}"


def waiting_challenger(api: mlflow.MlflowClient, name: str) -> Any | None:
    """The challenger that has not been compared with the current champion, or None.

    A version that was rolled back does not wait: an automatic comparison could undo the rollback.

    Args:
        api: MLflow client.
        name: Registered model.
    """
    challenger = version_of(api, name, CHALLENGER)
    if challenger is None or ROLLED_BACK_TAG in challenger.tags:
        return None
    champion = champion_version(api, name)
    if champion is not None and str(champion.version) == str(challenger.version):
        return None
    if challenger.tags.get(COMPARED_TAG) == comparison_key(champion, challenger.tags.get(TESTS_TAG, "")):
        return None
    return challenger


def current_aliases(record: Mapping[str, Any]) -> list[str]:
    """Current aliases of a register stage's version."""
    try:
        return sorted(client().get_model_version(record["model"], record["version"]).aliases)
    except MlflowException:
        return []


def record_links(record: Mapping[str, Any]) -> dict[str, str]:
    """URLs of a registration's MLflow run and version, from its record; empty if MLflow is not a server.

    Args:
        record: Record with `mlflow_run`, `model` and `version`.
    """
    try:
        return ui_links(client().get_run(record["mlflow_run"]), record["model"], record["version"])
    except MlflowException:
        return {}


def report_text(record: Mapping[str, Any], path: str) -> str:
    """Markdown that leads to a run's report: a link that a browser can open; without a server, the local file.

    Args:
        record: Record of the registration.
        path: Local file of the report.
    """
    try:
        link = artifact_link(client().get_run(record["mlflow_run"]), REPORT_FILE)
    except MlflowException:
        link = ""
    return f"[Report]({link})" if link else f"Report: `{path}`"


@contextmanager
def registry_lock(name: str, run: str = "", link: str = "") -> Iterator[None]:
    """Hold the lock for comparisons and changes of a model's champion; in a flow, across all machines.

    Args:
        name: Registered model.
        run: Name of the run, for the messages of others that wait.
        link: URL of the run.

    Raises:
        SlotTakenError: If another run holds the lock for too long; the message names it.
    """
    from tasks.stages.base import said_as  # commands that only read the registry do without the stages

    what, holder = f"the champion of {name}", LockOwner.here(run or who(), link)
    path, say = home() / "locks" / f"registry-{name}.lock", said_as("register")
    with (
        machine_lock([path], what, _PATIENCE, holder, say),
        shared_lock([lock_name("registry", name)], what, _PATIENCE, holder, say),
    ):
        yield


def frozen_tests(api: mlflow.MlflowClient, name: str) -> str:
    """Digests of the model's frozen test sets, in the format of tags; empty before the first comparison."""
    try:
        return str(api.get_registered_model(name).tags.get(TESTS_TAG, ""))
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return ""
        raise


def make_champion(api: mlflow.MlflowClient, name: str, version: str, champion: Any | None, tests: str = "") -> None:
    """Make a version champion.

    Args:
        api: MLflow client.
        name: Registered model.
        version: The version.
        champion: The current champion.
        tests: Digests of the test sets of the comparison, in the format of tags; they become the frozen ones.
    """
    replaced = str(champion.version) if champion is not None else ""
    if replaced == str(version):
        return
    api.set_model_version_tag(name, version, REPLACED_TAG, replaced)
    api.set_model_version_tag(name, version, SINCE_TAG, now())
    if ROLLED_BACK_TAG in api.get_model_version(name, version).tags:
        api.delete_model_version_tag(name, version, ROLLED_BACK_TAG)
    if tests:
        api.set_registered_model_tag(name, TESTS_TAG, tests)
    api.set_registered_model_alias(name, CHAMPION, version)
    name_previous(api, name, replaced)


def name_previous(api: mlflow.MlflowClient, name: str, version: str) -> None:
    """Set `@previous` to the target of a rollback; for information only, since a rollback uses the champion's tag.

    Args:
        api: MLflow client.
        name: Registered model.
        version: The previous champion; empty if there was none.
    """
    known = version_of(api, name, PREVIOUS)
    if version == (str(known.version) if known is not None else ""):
        return
    try:
        if version:
            api.set_registered_model_alias(name, PREVIOUS, version)
            return
    except MlflowException as error:  # the version may have been deleted
        if error.error_code not in _ABSENT:
            raise
    if known is not None:
        api.delete_registered_model_alias(name, PREVIOUS)


def rollback(name: str, to: str = "", reason: str = "", link: str = "") -> Move:
    """Make the previous champion, or another former one, champion again.

    Args:
        name: Registered model.
        to: Version of the former champion; if empty, the one that the current champion replaced.
        reason: Why; stored with the version that is replaced.
        link: URL of the flow run that rolls back.

    Raises:
        RegistryError: If there is no champion, or no valid former champion to roll back to.
    """
    api = client()
    with registry_lock(name, link=link):
        champion = champion_version(api, name)
        if champion is None:
            existing_model(api, name)
            raise RegistryError(f"{name} has no champion in this registry: `starling promote {name}` makes one")
        present, target = str(champion.version), to or champion.tags.get(REPLACED_TAG, "")
        if not target:
            others = [v for v in versions_named(api, name) if SINCE_TAG in v.tags and str(v.version) != present]
            if not others:
                raise RegistryError(f"version {present} of {name} is its first champion: there is none to return to")
            numbers = ", ".join(str(v.version) for v in others)
            raise RegistryError(
                f"version {present} of {name} replaced no champion: name a former one with --to: {numbers}"
            )
        former = get_version(api, name, target)
        if target == present:
            raise RegistryError(f"version {present} of {name} is already the champion: name another one with --to")
        if SINCE_TAG not in former.tags:
            raise RegistryError(
                f"version {target} of {name} has never been champion: compare it first with `starling promote {name} "
                f"--version {target}`"
            )
        why = f"rolled back from version {present}" + (f": {reason}" if reason else "")
        api.set_model_version_tag(name, present, ROLLED_BACK_TAG, f"{now()} by {who()}: {reason or 'no reason given'}")
        api.set_model_version_tag(name, target, DECISION_TAG, why)
        if ROLLED_BACK_TAG in former.tags:
            api.delete_model_version_tag(name, target, ROLLED_BACK_TAG)
        api.set_registered_model_alias(name, CHAMPION, target)
        name_previous(api, name, former.tags.get(REPLACED_TAG, ""))
    emit(ROLLED_BACK, name, {"version": target, "from": present, "reason": reason})
    return Move(name, target, present, why)


def history(api: mlflow.MlflowClient, name: str) -> list[dict[str, Any]]:
    """All versions of a model, newest first: aliases, time of promotion, decision.

    Raises:
        RegistryError: If there is no such model.
    """
    existing_model(api, name)
    versions = versions_named(api, name)
    return [
        {
            "version": str(v.version),
            "aliases": sorted(api.get_model_version(name, v.version).aliases),
            "champion_since": v.tags.get(SINCE_TAG),
            "replaced": v.tags.get(REPLACED_TAG) or None,
            "rolled_back": v.tags.get(ROLLED_BACK_TAG),
            "decision": v.tags.get(DECISION_TAG),
        }
        for v in versions
    ]


def now() -> str:
    """The current time, in the format of tags."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def who() -> str:
    """The current user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
