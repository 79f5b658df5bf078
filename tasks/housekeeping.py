"""Keeping an object store in order, with what only the pipeline knows: running stages and registered models."""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from storage.audit import Problem, Repair, repair
from storage.garbage import Garbage, GarbagePlan, collect, plan_garbage
from storage.locks import file_lock, is_locked
from storage.objects import ObjectStore
from tasks.home import shown_mlflow_uri
from tasks.stage import StageError, lock_path


def registered_outputs() -> dict[str, str]:
    """Outputs `register/<key>` that MLflow has a registered model of, with the model's name and version.

    Raises:
        StageError: MLflow does not answer, so it is not known what is registered.
    """
    from tasks.tracking import KEY_TAG, client

    found: dict[str, str] = {}
    token: str | None = None
    try:
        api = client()
        while True:
            page: Any = api.search_model_versions("", max_results=1000, page_token=token)
            for version in page:
                if KEY_TAG in version.tags:
                    found[f"register/{version.tags[KEY_TAG]}"] = f"{version.name}/{version.version}"
            token = page.token
            if not token:
                return found
    except Exception as error:  # any error of MLflow: without it nothing may be called unregistered
        raise StageError(
            f"MLflow at {shown_mlflow_uri()} cannot be asked for registered models ({type(error).__name__}: {error}): "
            "start it, or correct MLFLOW_TRACKING_URI"
        ) from error


def _in_use(stage: str, key: str) -> bool:
    return is_locked(lock_path(stage, key))


def _lock(stage: str, key: str) -> AbstractContextManager[int]:
    return file_lock(lock_path(stage, key), wait_s=0.0)


def repair_problems(store: ObjectStore, problems: Iterable[Problem]) -> Repair:
    """Take away what is damaged, except where a stage of this machine is at work; see `storage.audit.repair`."""
    return repair(store, problems, _lock)


def find_garbage(store: ObjectStore, min_age_s: float, unregistered: bool = False) -> GarbagePlan:
    """What may be deleted from a store of stage outputs.

    Args:
        store: the store.
        min_age_s: what has been changed or used since is left alone.
        unregistered: whether finished outputs that no registered model comes from may go, too.
    """
    registered = registered_outputs() if unregistered else None
    return plan_garbage(store, now=time.time(), min_age_s=min_age_s, in_use=_in_use, registered=registered)


def delete_garbage(store: ObjectStore, garbage: Iterable[Garbage]) -> list[Garbage]:
    """Delete it, except what a stage has taken up since; what was deleted."""
    return collect(store, garbage, _lock)
