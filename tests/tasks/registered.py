"""A registry with versions that are promoted and rolled back, for tests."""

import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from support import give_mlflow, tiny_bundle

from tasks.tracking import promotion
from tasks.tracking.promotion import settle
from tasks.tracking.registry import (
    TESTS_TAG,
    champion_version,
)
from tasks.tracking.runs import client, experiment_id
from tasks.tracking.significance import Decision

TESTS = json.dumps({"test": "aaaa"})
RUN = SimpleNamespace(run_id="a-run", flow_run_url="", config=SimpleNamespace(lm=None, rescoring=None, decoder=None))


@pytest.fixture
def api(home, monkeypatch):
    """A registry; all runs have the same test sets, and the challenger wins unless a test sets another result."""
    give_mlflow(home)
    monkeypatch.setattr(promotion, "tests_tag", lambda run: TESTS)
    monkeypatch.setattr("tasks.tracking.significance.tests_tag", lambda run: TESTS)
    comparison_gives(monkeypatch, True)
    return client()


def comparison_gives(monkeypatch, promoted, **fields):
    def decide(run, champion, added):
        if champion is None:
            return Decision(True, "became champion: there was none before")
        decision = Decision(promoted, "beats" if promoted else "loses", str(champion.version), 0.2, 0.1, 0.01)
        return replace(decision, **fields)

    monkeypatch.setattr("tasks.tracking.significance.decide", decide)


def add(api, name="m", count=1):
    """Versions with a run each, the last one the challenger; their numbers."""
    made = []
    for _ in range(count):
        run = api.create_run(experiment_id(api, "e"))
        with suppress(MlflowException):
            api.create_registered_model(name)
        version = api.create_model_version(name, source=run.info.artifact_uri, run_id=run.info.run_id)
        api.set_model_version_tag(name, version.version, TESTS_TAG, TESTS)
        api.set_registered_model_alias(name, "challenger", version.version)
        made.append(str(version.version))
    return made


def add_bundle(api, folder, damaged=False, name="m"):
    """A version with a bundle of a few weights, as the stage register leaves it; its number."""
    run = api.create_run(experiment_id(api, "e"))
    bundle = folder / run.info.run_id / "bundle"
    tiny_bundle(bundle)
    if damaged:
        (bundle / "model.safetensors").write_bytes(b"damaged")
    api.log_artifacts(run.info.run_id, str(bundle.parent), "model")
    with suppress(MlflowException):
        api.create_registered_model(name)
    version = api.create_model_version(name, source=f"{run.info.artifact_uri}/model", run_id=run.info.run_id)
    return str(version.version)


def champion(api, name="m"):
    version = champion_version(api, name)
    return str(version.version) if version else None


def former_champions(api, count, name="m"):
    """So many versions, each of which has been champion."""
    versions = []
    for _ in range(count):
        versions += add(api, name)
        settle(api, RUN, name, versions[-1])
    return versions
