"""Repair and garbage collection of an object store, respecting running stages and registered models."""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

from storage.audit import Repair, StorageProblem, repair
from storage.garbage import Garbage, GarbagePlan, collect, plan_garbage
from storage.locks import file_lock, is_locked
from storage.objects import ObjectStore
from tasks.config.home import shown_mlflow_uri
from tasks.stages.base import StageError, lock_path


def registered_outputs() -> dict[str, str]:
    """Outputs `register/<key>` that have a registered model in MLflow, with the model's name and version.

    Raises:
        StageError: If MLflow does not answer, so that registered models are unknown.
    """
    from tasks.tracking.known_models import all_pages
    from tasks.tracking.runs import KEY_TAG, client

    try:
        versions = all_pages(partial(client().search_model_versions, "", max_results=1000))
        return {
            f"register/{version.tags[KEY_TAG]}": f"{version.name}/{version.version}"
            for version in versions
            if KEY_TAG in version.tags
        }
    except Exception as error:  # after any error of MLflow, no output may be treated as unregistered
        raise StageError(
            f"MLflow at {shown_mlflow_uri()} cannot be asked for registered models ({type(error).__name__}: {error}): "
            "start it, or correct MLFLOW_TRACKING_URI"
        ) from error


def _in_use(stage: str, key: str) -> bool:
    return is_locked(lock_path(stage, key))


def _lock(stage: str, key: str) -> AbstractContextManager[int]:
    return file_lock(lock_path(stage, key), wait_s=0.0)


def repair_problems(store: ObjectStore, problems: Iterable[StorageProblem]) -> Repair:
    """Delete damaged objects, except of outputs that a stage of this machine is making; see `storage.audit.repair`."""
    return repair(store, problems, _lock)


def find_garbage(store: ObjectStore, min_age_s: float, unregistered: bool = False) -> GarbagePlan:
    """Find what may be deleted from a store of stage outputs.

    Args:
        store: The store.
        min_age_s: Whatever was changed or used within this time is kept.
        unregistered: Whether to include finished outputs that no registered model was made from.
    """
    registered = registered_outputs() if unregistered else None
    return plan_garbage(store, now=time.time(), min_age_s=min_age_s, in_use=_in_use, registered=registered)


def delete_garbage(store: ObjectStore, garbage: Iterable[Garbage]) -> list[Garbage]:
    """Delete garbage, except what a stage has started to use since; returns what was deleted."""
    return collect(store, garbage, _lock)
