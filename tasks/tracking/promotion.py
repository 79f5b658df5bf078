"""Promotion: compares a version with the champion, stores the decision, and then moves the alias `@champion`.

If the process is killed, either the old or the new version is champion: the alias moves in one transaction of MLflow,
everything it depends on is written before, and a version whose comparison was not completed is compared again.
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
from tasks.config.credentials import export_credentials
from tasks.config.home import objects_url
from tasks.config.pipeline import ConfigError, PipelineConfig, parse_config
from tasks.orchestration.events import PROMOTED, emit
from tasks.stages.base import Run, StageResult
from tasks.tracking.known_models import versions_of, versions_text
from tasks.tracking.provenance import provenance
from tasks.tracking.registry import (
    CHALLENGER,
    COMPARED_TAG,
    REPLACED_TAG,
    TESTS_TAG,
    RegistryError,
    champion_version,
    comparison_key,
    existing_model,
    frozen_tests,
    get_version,
    make_champion,
    name_previous,
    now,
    registry_lock,
    version_of,
    who,
)
from tasks.tracking.runs import DECISION_TAG, client, set_tags
from tasks.tracking.significance import Decision, PromotionOptions, promotion_decision, tests_tag

STAGES_FILE = "stages.json"
"""Artifact of a registration's MLflow run: the configuration and the location of every stage's output."""
PROMOTION_FILE = "promotion.json"
"""Artifact of the same run: the last decision, with its figures."""
_ATTEMPTS = 3


def save_stages(run: Run, folder: Path) -> None:
    """Write the locations of a run's outputs, so that its model can be compared later."""
    config = run.config.model_dump(mode="json", by_alias=True)
    keys = {name: result.key for name, result in run.results.items() if name in STAGES[: STAGES.index("register")]}
    note = {"config": config, "objects": run.store.url, "stages": keys}
    (folder / STAGES_FILE).write_text(json.dumps(note, indent=2), encoding="utf-8")


def load_run(version: Any) -> Run:
    """Load the run that registered a version, with its published results; computes nothing.

    Raises:
        RegistryError: If its configuration or an output no longer exists.
    """
    label = f"version {version.version} of {version.name}"
    remedy = "run its configuration again (`starling run`), which registers a version that can be compared"
    try:
        note = mlflow.artifacts.load_dict(f"runs:/{version.run_id}/{STAGES_FILE}")
        config = parse_config(note["config"], f"the configuration of {label}")
    except (MlflowException, OSError, KeyError, TypeError, ConfigError) as error:
        raise RegistryError(f"the configuration of {label} cannot be read ({error}): {remedy}") from error
    store = _store_of(config, note["objects"], note["stages"])
    if store is None:
        raise RegistryError(f"the outputs that {label} was made from are not in {note['objects']}: {remedy}")
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"url": store.url})})
    run = Run(config, str(version.tags.get("starling.run", "")))
    for name, key in note["stages"].items():
        output = StageOutput(store, name, key)
        record = output.record()
        if record is None:
            raise RegistryError(f"{label}: its output {name}/{key} is no longer in {store.url}: {remedy}")
        run.results[name] = StageResult(name, key, output.store.url, 0.0, True, record.get("counts", {}), record)
    return run


def _store_of(config: PipelineConfig, noted: str, keys: dict[str, str]) -> ObjectStore | None:
    """The store that contains the outputs: the noted one, or the configured one as seen from this machine."""
    export_credentials(config.storage)
    for url in dict.fromkeys((noted, objects_url(config.storage.url))):
        store = ObjectStore(url)
        if StageOutput(store, "score", keys["score"]).record() is not None:
            return store
    return None


def settle(
    api: mlflow.MlflowClient, run: Run, name: str, version: str, options: PromotionOptions | None = None
) -> Decision:
    """Compare a version with the champion, and make it champion if it wins; holds the registry's lock.

    If another machine changes the champion in the meantime, the comparison is repeated.

    Args:
        api: MLflow client.
        run: The run that registered the version.
        name: Registered model.
        version: The version.
        options: Options of the promotion.

    Raises:
        RegistryError: If the champion keeps changing.
    """
    options, tests = options or PromotionOptions(), tests_tag(run)
    with registry_lock(name, run.run_id, run.flow_run_url):
        for _ in range(_ATTEMPTS):
            champion, about = champion_version(api, name), get_version(api, name, version)
            decision = promotion_decision(api, run, about, champion, options)
            note_decision(api, about, decision, champion, tests, options, run.flow_run_url)
            before = getattr(champion, "version", None)
            if getattr(champion_version(api, name), "version", None) == before:
                break
        else:
            raise RegistryError(
                f"the champion of {name} changed {_ATTEMPTS} times while version {version} was compared with it: try "
                f"again with `starling promote {name} --version {version}`"
            )
        moved = decision.promoted and str(before or "") != str(version)
        if moved:
            make_champion(api, name, version, champion, tests)
        elif not frozen_tests(api, name) and decision.p_value is not None:
            api.set_registered_model_tag(name, TESTS_TAG, tests)
        if str(before or "") != str(version):
            # last: until this tag is set, the version counts as waiting and is compared again
            api.set_model_version_tag(name, version, COMPARED_TAG, comparison_key(champion, tests))
        elif champion is not None:  # the process that promoted it may have been killed before this
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
    options: PromotionOptions,
    link: str = "",
) -> None:
    """Store a decision in the version's tags and in its MLflow run, before it is carried out.

    Args:
        api: MLflow client.
        version: The version.
        decision: The decision about it.
        champion: The current champion.
        tests: Digests of the test sets, in the format of tags.
        options: Options of the promotion.
        link: URL of the flow run that decides.
    """
    if champion is not None and str(champion.version) == str(version.version):
        return  # it was decided when it became champion
    note = asdict(decision) | {
        "model": version.name,
        "version": str(version.version),
        "tests": json.loads(tests),
        "test": "matched pairs of utterances (Gillick and Cox 1989) and paired bootstrap",
        "asked": asdict(options),
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


def promote_version(
    name: str, version: str = "", options: PromotionOptions | None = None, link: str = ""
) -> dict[str, Any]:
    """Compare a registered version with the champion, and make it champion if it wins.

    Args:
        name: Registered model.
        version: Its version; by default the waiting challenger.
        options: Options of the promotion.
        link: URL of the flow run that promotes.

    Returns:
        `model`, `version`, `promoted`, `reason`, `mlflow_run` and the complete `decision`.

    Raises:
        RegistryError: If there is no such version, or it cannot be compared and the promotion is not forced.
    """
    options = options or PromotionOptions()
    if options.force and not options.reason.strip():
        raise RegistryError("a forced promotion needs a reason: give one with --reason TEXT")
    api = client()
    registered = get_version(api, name, version) if version else version_of(api, name, CHALLENGER)
    if registered is None:
        known = versions_text(versions_of(api, existing_model(api, name)))
        raise RegistryError(
            f"{name} has no challenger in this registry: run its pipeline first, or name a version with --version N; "
            f"it has: {known}"
        )
    try:
        run = load_run(registered)
        run.flow_run_url = link
        decision = settle(api, run, name, str(registered.version), replace(options, named=bool(version)))
    except RegistryError as error:
        if not options.force:
            raise
        decision = _promote_uncompared(api, registered, options, str(error), link)
    return {
        "model": name,
        "version": str(registered.version),
        "promoted": decision.promoted,
        "reason": decision.reason,
        "mlflow_run": registered.run_id,
        "decision": asdict(decision),
    }


def _promote_uncompared(
    api: mlflow.MlflowClient, version: Any, options: PromotionOptions, trouble: str, link: str
) -> Decision:
    """Make a version champion that cannot be compared any more, on request of a user."""
    name, number = version.name, str(version.version)
    tests = version.tags.get(TESTS_TAG, "{}")
    with registry_lock(name, link=link):
        champion = champion_version(api, name)
        decision = Decision(
            True,
            f"forced: {options.reason} ({trouble})",
            champion=str(champion.version) if champion is not None else "",
            forced=True,
        )
        note_decision(api, version, decision, champion, tests, options, link)
        make_champion(api, name, number, champion)
    emit(PROMOTED, name, {"version": number, "from": decision.champion, "reason": decision.reason})
    return decision
