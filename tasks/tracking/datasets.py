"""A run's sets of utterances as MLflow data sets: name, digest, where they are, and how large."""

import json
from collections.abc import Iterable

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from tasks.dataset.sets import VALID, is_trained
from tasks.dataset.splits import TRAIN
from tasks.stages.base import Run
from tasks.stages.folds import train_folder

_DIGEST_LENGTH = 36
"""MLflow's limit."""
_NAME_LENGTH = 500
"""Also MLflow's limit."""


def set_inputs(run: Run, names: Iterable[str]) -> list[DatasetInput]:
    """Sets of a run's corpora as inputs of its MLflow run.

    Args:
        run: The run, after the stage `shard`.
        names: The sets.

    Returns:
        For each set its corpora and name, the digest of its index, the URL of its shards, and the context `training`,
        `validation` or `test`.
    """
    shard = run.result("shard")
    sizes = shard.record["sets"] | shard.record.get("unions", {})
    inputs = []
    for name in names:
        folder = train_folder(run.config.data) if name == TRAIN else name
        url, size = shard.store.child(folder).url, sizes[folder]
        profile = {"num_rows": size["utterances"]} | ({"seconds": round(size["seconds"])} if "seconds" in size else {})
        protocol = url.partition("://")[0] if "://" in url else "local"
        data = Dataset(
            name=f"{run.config.corpora}: {name}"[:_NAME_LENGTH],
            digest=size["digest"][:_DIGEST_LENGTH],
            source_type="local" if protocol == "file" else protocol,
            source=json.dumps({"uri": url, "corpora": [source.path for source in run.config.data.sources]}),
            profile=json.dumps(profile),
        )
        context = "training" if is_trained(name) else "validation" if name == VALID else "test"
        inputs.append(DatasetInput(data, [InputTag(MLFLOW_DATASET_CONTEXT, context)]))
    return inputs
