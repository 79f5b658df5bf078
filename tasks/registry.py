"""The registry's rules: who is champion, who waits to be judged, how `@champion` moves and moves back.

MLflow moves an alias in one transaction: a model has one champion at every moment, also when a process is killed. So
what a move stands on is written before it, onto the version that becomes champion; what only records it comes after,
and is completed by the next move.
"""

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from tasks.events import ROLLED_BACK, emit
from tasks.holder import Holder
from tasks.home import home
from tasks.policies import SlotsConfig
from tasks.slots import lock_name, machine_lock, shared_lock
from tasks.tracking import DECISION_TAG, KEY_TAG, client, ui_links

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
TESTS_TAG = "starling.tests"
"""Digests of test sets: on a version those that it was scored on, on the model those that champions are judged on."""
JUDGED_TAG = "starling.judged"
"""On a version: the champion and the test sets of its last judgement."""
REPLACED_TAG = "starling.replaced"
"""On a version that was made champion: the champion before it."""
SINCE_TAG = "starling.champion_since"
ROLLED_BACK_TAG = "starling.rolled_back"
"""On a version that was taken down: why. Nothing but a command with its number makes it champion again."""
_PATIENCE = SlotsConfig(collision="wait", wait_hours=1)
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class RegistryError(ValueError):
    """What was asked of the registry cannot be done; the message says what to do instead."""


@dataclass(frozen=True)
class Move:
    """A champion that was moved."""

    name: str
    """Registered model."""
    champion: str
    """Version that is champion now."""
    replaced: str
    """Version that was."""
    reason: str
    """Why."""


def find_version(api: mlflow.MlflowClient, name: str, key: str) -> Any | None:
    """The registered version that a stage output made, if it is there."""
    try:
        found = api.search_model_versions(f"name = '{name}' and tags.`{KEY_TAG}` = '{key}'")
    except MlflowException:
        return None
    return found[0] if found else None


def version_of(api: mlflow.MlflowClient, name: str, alias: str) -> Any | None:
    """The version that has an alias, or None; a server in trouble raises, since it is no reason to crown anyone."""
    try:
        return api.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return None
        raise


def champion_version(api: mlflow.MlflowClient, name: str) -> Any | None:
    """The present champion, or None if there is none."""
    return version_of(api, name, CHAMPION)


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
                f"{name} has no version {version} in this registry: `starling rollback {name} --list` names those that "
                "it has"
            ) from error
        raise


def judged_on(champion: Any | None, tests: str) -> str:
    """What a judgement was based on, as its tag says it."""
    return f"{champion.version if champion is not None else 'none'} {tests}"


def waiting_challenger(api: mlflow.MlflowClient, name: str) -> Any | None:
    """The challenger that has not been judged against the present champion, or None.

    A version that was rolled back does not wait: a judgement by itself would undo what somebody decided.

    Args:
        api: A client.
        name: Registered model.
    """
    challenger = version_of(api, name, CHALLENGER)
    if challenger is None or ROLLED_BACK_TAG in challenger.tags:
        return None
    champion = champion_version(api, name)
    if champion is not None and str(champion.version) == str(challenger.version):
        return None
    if challenger.tags.get(JUDGED_TAG) == judged_on(champion, challenger.tags.get(TESTS_TAG, "")):
        return None
    return challenger


def current_aliases(record: dict[str, Any]) -> list[str]:
    """Aliases that a register stage's version has now."""
    try:
        return sorted(client().get_model_version(record["model"], record["version"]).aliases)
    except MlflowException:
        return []


def record_links(record: dict[str, Any]) -> dict[str, str]:
    """Addresses of a registration's MLflow run and version, from its record; none where MLflow is no server.

    Args:
        record: Has `mlflow_run`, `model` and `version`.
    """
    try:
        return ui_links(client().get_run(record["mlflow_run"]), record["model"], record["version"])
    except MlflowException:
        return {}


@contextmanager
def registry_lock(name: str, run: str = "", link: str = "") -> Iterator[None]:
    """Let one at a time judge and move the champion of a model; in a flow, one of all machines.

    Args:
        name: Registered model.
        run: Name of the run that wants to, for others who wait.
        link: Where that run is seen.

    Raises:
        SlotTakenError: If others hold it for too long; the message names them.
    """
    what, holder = f"the champion of {name}", Holder.here(run or who(), link)
    path = home() / "locks" / f"registry-{name}.lock"
    with (
        machine_lock([path], what, _PATIENCE, holder),
        shared_lock([lock_name("registry", name)], what, _PATIENCE, holder),
    ):
        yield


def frozen_tests(api: mlflow.MlflowClient, name: str) -> str:
    """The test sets that the model's champions are judged on, as tags say it; empty before the first."""
    try:
        return str(api.get_registered_model(name).tags.get(TESTS_TAG, ""))
    except MlflowException as error:
        if error.error_code in _ABSENT:
            return ""
        raise


def crown(api: mlflow.MlflowClient, name: str, version: str, champion: Any | None, tests: str = "") -> None:
    """Make a version champion.

    Args:
        api: A client.
        name: Registered model.
        version: The version.
        champion: Who reigns now.
        tests: The test sets on which it was judged, as tags say it: they are the frozen ones from now on.
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
    """Point `@previous` where a rollback would go; it only tells, the champion's own tag decides.

    Args:
        api: A client.
        name: Registered model.
        version: The champion before; empty if there was none.
    """
    known = version_of(api, name, PREVIOUS)
    if version == (str(known.version) if known is not None else ""):
        return
    try:
        if version:
            api.set_registered_model_alias(name, PREVIOUS, version)
            return
    except MlflowException as error:  # a version that was deleted is no way back
        if error.error_code not in _ABSENT:
            raise
    if known is not None:
        api.delete_registered_model_alias(name, PREVIOUS)


def rollback(name: str, to: str = "", reason: str = "", link: str = "") -> Move:
    """Give the title back to the champion before the present one, or to a former champion.

    Args:
        name: Registered model.
        to: Version of the former champion; empty is the one that the present champion replaced.
        reason: Why; kept with the version that loses the title.
        link: The flow run that asks.

    Raises:
        RegistryError: If there is no champion, or none that it could be rolled back to.
    """
    api = client()
    with registry_lock(name, link=link):
        champion = champion_version(api, name)
        if champion is None:
            raise RegistryError(f"{name} has no champion in this registry: `starling promote {name}` makes one")
        present, target = str(champion.version), to or champion.tags.get(REPLACED_TAG, "")
        if not target:
            raise RegistryError(f"version {present} of {name} replaced no champion: name a former one with --to")
        former = get_version(api, name, target)
        if target == present:
            raise RegistryError(f"version {present} of {name} is the champion already")
        if SINCE_TAG not in former.tags:
            raise RegistryError(
                f"version {target} of {name} has never been champion: `starling promote {name} --version {target}` "
                "judges it first"
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
    """Every version of a model, newest first: aliases, when it became champion, what was decided."""
    versions = sorted(api.search_model_versions(f"name = '{name}'"), key=lambda v: -int(v.version))
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
    """The time, as tags say it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def who() -> str:
    """Who moves the champion: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
