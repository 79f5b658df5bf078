"""Promotion: a version is judged against the champion, the decision is written down, and then the champion moves.

A process that is killed in between leaves the old champion or the new one: the move is one transaction of MLflow, all
that it stands on comes before it, and a version whose comparison did not end is compared again.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks import STAGES
from tasks.config import ConfigError, PipelineConfig, parse_config
from tasks.credentials import export_credentials
from tasks.events import PROMOTED, emit
from tasks.home import objects_url
from tasks.judging import Decision, Wish, judge, tests_tag
from tasks.provenance import provenance
from tasks.registry import (
    CHALLENGER,
    JUDGED_TAG,
    REPLACED_TAG,
    TESTS_TAG,
    RegistryError,
    champion_version,
    crown,
    frozen_tests,
    get_version,
    judged_on,
    name_previous,
    now,
    registry_lock,
    version_of,
    who,
)
from tasks.stage import Run, StageResult
from tasks.tracking import DECISION_TAG, client, set_tags

STAGES_FILE = "stages.json"
"""Artifact of a registration's MLflow run: the configuration and where every stage's output is."""
PROMOTION_FILE = "promotion.json"
"""Artifact of the same run: the last decision, with its numbers."""
_ATTEMPTS = 3


def save_stages(run: Run, folder: Path) -> None:
    """Note where a run's outputs are, so that its model can be judged later."""
    config = run.config.model_dump(mode="json", by_alias=True)
    keys = {name: result.key for name, result in run.results.items() if name in STAGES[: STAGES.index("register")]}
    note = {"config": config, "objects": run.store.url, "stages": keys}
    (folder / STAGES_FILE).write_text(json.dumps(note, indent=2), encoding="utf-8")


def load_run(version: Any) -> Run:
    """The run that registered a version, with its results as they were published; nothing is computed again.

    Raises:
        RegistryError: If what it stands on is gone.
    """
    label = f"version {version.version} of {version.name}"
    remedy = "run its configuration again (`starling run`), which registers a version that can be judged"
    try:
        note = mlflow.artifacts.load_dict(f"runs:/{version.run_id}/{STAGES_FILE}")
        config = parse_config(note["config"], f"the configuration of {label}")
    except (MlflowException, OSError, KeyError, TypeError, ConfigError) as error:
        raise RegistryError(f"{label} does not say what it was made from ({error}): {remedy}") from error
    store = _store_of(config, note["objects"], note["stages"])
    if store is None:
        raise RegistryError(f"the outputs that {label} was made from are not in {note['objects']}: {remedy}")
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"url": store.url})})
    run = Run(config, str(version.tags.get("starling.run", "")))
    for name, key in note["stages"].items():
        output = StageOutput(store, name, key)
        record = output.record()
        if record is None:
            raise RegistryError(f"{label}: its output {name}/{key} is not in {store.url} any more: {remedy}")
        run.results[name] = StageResult(name, key, output.store.url, 0.0, True, record.get("counts", {}), record)
    return run


def _store_of(config: PipelineConfig, noted: str, keys: dict[str, str]) -> ObjectStore | None:
    """The store that has the outputs: where they were, or where the configuration says, seen from here."""
    export_credentials(config.storage)
    for url in dict.fromkeys((noted, objects_url(config.storage.url))):
        store = ObjectStore(url)
        if StageOutput(store, "train", keys["train"]).record() is not None:
            return store
    return None


def settle(api: mlflow.MlflowClient, run: Run, name: str, version: str, wish: Wish | None = None) -> Decision:
    """Judge a version and move the champion if it wins; one process of this machine at a time.

    Who is champion may change meanwhile by somebody elsewhere: then the version is judged again.

    Args:
        api: A client.
        run: The run that registered it.
        name: Registered model.
        version: The version.
        wish: What is wanted beyond the rule.

    Raises:
        RegistryError: If the champion keeps changing.
    """
    wish, tests = wish or Wish(), tests_tag(run)
    with registry_lock(name, run.run_id, run.flow_run_url):
        for _ in range(_ATTEMPTS):
            champion, about = champion_version(api, name), get_version(api, name, version)
            decision = judge(api, run, about, champion, wish)
            note_decision(api, about, decision, champion, tests, wish, run.flow_run_url)
            before = getattr(champion, "version", None)
            if getattr(champion_version(api, name), "version", None) == before:
                break
        else:
            raise RegistryError(f"the champion of {name} changed {_ATTEMPTS} times while version {version} was judged")
        moved = decision.promoted and str(before or "") != str(version)
        if moved:
            crown(api, name, version, champion, tests)
        elif not frozen_tests(api, name) and decision.p_value is not None:
            api.set_registered_model_tag(name, TESTS_TAG, tests)
        if str(before or "") != str(version):
            # last: until then the version waits, and the next comparison judges it again
            api.set_model_version_tag(name, version, JUDGED_TAG, judged_on(champion, tests))
        elif champion is not None:  # the process that promoted it may have been killed before saying so
            name_previous(api, name, champion.tags.get(REPLACED_TAG, ""))
    if moved:
        emit(PROMOTED, name, {"version": version, "from": decision.champion, "reason": decision.reason})
    return decision


def note_decision(
    api: mlflow.MlflowClient,
    version: Any,
    decision: Decision,
    champion: Any | None,
    tests: str,
    wish: Wish,
    link: str = "",
) -> None:
    """Write a decision onto its version and into its MLflow run, before anything is done about it.

    Args:
        api: A client.
        version: The version.
        decision: What is to become of it.
        champion: Who reigns.
        tests: Digests of the test sets, as tags say it.
        wish: What was asked for.
        link: The flow run that decides.
    """
    if champion is not None and str(champion.version) == str(version.version):
        return  # it was decided when it became champion
    note = asdict(decision) | {
        "model": version.name,
        "version": str(version.version),
        "tests": json.loads(tests),
        "test": "matched pairs of utterances (Gillick and Cox 1989) and paired bootstrap",
        "asked": asdict(wish),
        "at": now(),
        "by": who(),
        "flow_run": link,
        "code": provenance()["commit"],
    }
    api.log_text(version.run_id, json.dumps(note, indent=2), PROMOTION_FILE)
    set_tags(api, version.run_id, {DECISION_TAG: decision.reason, **decision.numbers()})
    tags = {TESTS_TAG: tests, **decision.numbers(), DECISION_TAG: decision.reason}
    if link:
        tags["promotion.flow_run"] = link
    for name, value in tags.items():
        api.set_model_version_tag(version.name, version.version, name, value)


def promote_version(name: str, version: str = "", wish: Wish | None = None, link: str = "") -> dict[str, Any]:
    """Judge a registered version, the waiting challenger by default, and make it champion if it wins.

    Args:
        name: Registered model.
        version: Its version; empty is the challenger.
        wish: What is wanted beyond the rule.
        link: The flow run that asks.

    Returns:
        `model`, `version`, `promoted`, `reason`, `mlflow_run` and the whole `decision`.

    Raises:
        RegistryError: If there is no such version, or nothing to judge it by.
    """
    wish = wish or Wish()
    if wish.force and not wish.reason.strip():
        raise RegistryError("a forced promotion needs a reason: say why with --reason TEXT")
    api = client()
    found = get_version(api, name, version) if version else version_of(api, name, CHALLENGER)
    if found is None:
        raise RegistryError(
            f"{name} has no challenger in this registry: run its pipeline first, or name a version with --version N"
        )
    try:
        run = load_run(found)
        run.flow_run_url = link
        decision = settle(api, run, name, str(found.version), replace(wish, named=bool(version)))
    except RegistryError as error:
        if not wish.force:
            raise
        decision = _crown_unjudged(api, found, wish, str(error), link)
    return {
        "model": name,
        "version": str(found.version),
        "promoted": decision.promoted,
        "reason": decision.reason,
        "mlflow_run": found.run_id,
        "decision": asdict(decision),
    }


def _crown_unjudged(api: mlflow.MlflowClient, version: Any, wish: Wish, trouble: str, link: str) -> Decision:
    """Make a version champion that cannot be judged any more, because somebody says so."""
    name, number = version.name, str(version.version)
    tests = version.tags.get(TESTS_TAG, "{}")
    with registry_lock(name, link=link):
        champion = champion_version(api, name)
        decision = Decision(
            True,
            f"forced: {wish.reason} ({trouble})",
            champion=str(champion.version) if champion is not None else "",
            forced=True,
        )
        note_decision(api, version, decision, champion, tests, wish, link)
        crown(api, name, number, champion)
    emit(PROMOTED, name, {"version": number, "from": decision.champion, "reason": decision.reason})
    return decision
