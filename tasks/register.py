"""Stage 7, register: an MLflow run with everything that led to the model, and a version in the model registry.

The new version becomes `@challenger`. It becomes `@champion` if there is none, or if it beats the present champion on
this run's test sets: both recognize the same utterances, and a paired test must find the difference significant.
"""

import io
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import yaml
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types.schema import AnyType, ColSpec, ParamSchema, ParamSpec, Schema

from speech.bundle import load_spec
from speech.scoring import compare_systems
from storage.reading import ShardError
from storage.stages import StageOutput, digest_json
from tasks import pyfunc_path
from tasks.decode import decode_with, fetch_bundle, scored_sets
from tasks.features import set_digest
from tasks.forward import send_rest
from tasks.plots import learning_curves
from tasks.prepare import read_table
from tasks.provenance import provenance
from tasks.score import figures, score_rows
from tasks.stage import Inputs, Run, Stage
from tasks.tracking import (
    DECISION_TAG,
    KEY_TAG,
    TrainingRun,
    client,
    experiment_id,
    find_training_run,
    flatten,
    log_params,
    set_tags,
)
from tasks.train import forward_note, training_run
from training.journal import read_journal

_REQUIREMENTS = (
    *("torch", "torchaudio", "numpy", "soundfile", "safetensors", "pydantic"),
    *("sentencepiece", "flashlight-text", "rapidfuzz", "pandas", "mlflow"),
)


@dataclass(frozen=True)
class Decision:
    """Whether a challenger became champion, and why."""

    promoted: bool
    reason: str
    champion: str = ""
    """Version of the champion that it was compared with."""
    champion_wer: float | None = None
    challenger_wer: float | None = None
    p_value: float | None = None


def find_version(api: mlflow.MlflowClient, name: str, key: str) -> Any | None:
    """The registered version that a stage output made, if it is there."""
    try:
        found = api.search_model_versions(f"name = '{name}' and tags.`{KEY_TAG}` = '{key}'")
    except MlflowException:
        return None
    return found[0] if found else None


def champion_version(api: mlflow.MlflowClient, name: str) -> Any | None:
    """The present champion, or None if there is none; a server in trouble is no reason to crown anyone."""
    try:
        return api.get_model_version_by_alias(name, "champion")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _test_metrics(run: Run, at_ms: int) -> list[Metric]:
    """The test sets' figures at the training's last step."""
    step = int(run.result("train").record["result"]["step"])
    return [Metric(name, value, at_ms, step) for name, value in figures(run.result("score").record).items()]


def _tags(run: Run, output: StageOutput) -> dict[str, str]:
    tags = {
        KEY_TAG: output.key,
        "starling.run": run.run_id,
        "starling.model_digest": run.result("train").record["digest"],
        "starling.objects": run.store.url,
        "starling.tests": tests_digest(run),
        **{f"starling.{name}": str(value) for name, value in provenance().items()},
    }
    tags |= {f"dataset.{name}": set_digest(run, name) for name in run.result("shard").record["sets"]}
    if run.flow_run_url:
        tags["prefect.flow_run"] = run.flow_run_url
    return tags


def tests_digest(run: Run) -> str:
    """Digest of the frozen test sets that a model is judged on."""
    return digest_json({name: set_digest(run, name) for name in scored_sets(run)})


def _training(api: mlflow.MlflowClient, run: Run, output: StageOutput) -> TrainingRun:
    """The training as MLflow knows it; under a name of its own if its run has been given to another registration."""
    tracking = run.result("train").record.get("tracking", {})
    about = training_run(run, tracking.get("training", ""))
    found = find_training_run(api, about) if about.training else None
    tags = found.data.tags if found else {}
    if about.training and DECISION_TAG not in tags and tags.get(KEY_TAG, output.key) == output.key:
        return about
    return replace(about, training=f"{about.training or output.key}/{run.run_id}")


def _log_run(api: mlflow.MlflowClient, run: Run, run_id: str, folder: Path) -> None:
    """Parameters, test results and artifacts of the MLflow run; the folder holds the journal."""
    config = run.config.model_dump(mode="json", by_alias=True)
    known = api.get_run(run_id)
    log_params(api, known, flatten(config))
    elapsed_ms = int(1000 * float(run.result("train").record["result"].get("elapsed", 0.0)))
    api.log_batch(run_id, metrics=_test_metrics(run, known.info.start_time + elapsed_ms))
    learning_curves(read_journal(folder / "journal.jsonl"), folder / "learning_curves.png")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    versions = {name: metadata.version(name) for name in (*_REQUIREMENTS, "prefect", "fsspec", "pyarrow")}
    (folder / "environment.json").write_text(json.dumps(versions | provenance(), indent=2), encoding="utf-8")
    for name in scored_sets(run):
        text = run.result("score").store.read(f"{name}.alignments.txt")
        (folder / f"{name}.alignments.txt").write_bytes(text)
    for file in sorted(folder.iterdir()):
        api.log_artifact(run_id, str(file))


def _signature() -> ModelSignature:
    outputs = [ColSpec("string", "text"), ColSpec("double", "seconds"), ColSpec("double", "confidence")]
    return ModelSignature(
        # one column without a name: MLflow then accepts a bare path, bytes or array as well as a table
        inputs=Schema([ColSpec(AnyType())]),
        outputs=Schema([*outputs, ColSpec("string", "error")]),
        params=ParamSchema([ParamSpec("sample_rate", "integer", 0)]),
    )


def _log_model(run: Run, run_id: str, bundle: Path, tags: dict[str, str]) -> str:
    """Log the model to the run and register it; returns the version."""
    rate = run.config.data.sample_rate
    with _without_chatter(), mlflow.start_run(run_id=run_id):
        info = mlflow.pyfunc.log_model(
            name="model",
            python_model=str(pyfunc_path()),
            artifacts={"bundle": str(bundle)},
            signature=_signature(),
            input_example=pd.DataFrame([[np.zeros(rate // 2).tolist()]]),
            pip_requirements=[f"{name}=={metadata.version(name)}" for name in _REQUIREMENTS],
        )
        version = mlflow.register_model(info.model_uri, run.config.model_name, await_registration_for=60, tags=tags)
    return str(version.version)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep MLflow's notices (hints about type hints, "created version") out of a run's output; errors still raise."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _complete_bundle(run: Run, folder: Path) -> Path:
    """The trained bundle with this run's decoding parameters."""
    fetch_bundle(run.result("train").store, folder)
    spec = load_spec(folder).model_copy(update={"decode": run.config.decode})
    text = json.dumps(spec.model_dump(mode="json"), indent=2, sort_keys=True)
    (folder / "bundle.json").write_text(text + "\n", encoding="utf-8")
    return folder


def _errors(run: Run, champion: Path | None) -> tuple[list[int], list[int]]:
    """Word errors and reference words of each test utterance, by the champion or by this run's model."""
    errors: list[int] = []
    words: list[int] = []
    for name in scored_sets(run):
        if champion is None:
            rows = read_table(run.result("decode").store, f"{name}.parquet")
        else:
            rows = _champion_rows(run, champion, name)
        report = score_rows(sorted(rows, key=lambda row: str(row["id"])))
        errors += report.errors().tolist()
        words += report.words().tolist()
    return errors, words


def _champion_rows(run: Run, champion: Path, name: str) -> list[dict[str, Any]]:
    """A set as the champion recognizes it, without what this run's model could not read: both are judged alike."""
    decode = load_spec(champion).decode
    found = decode_with(run, champion, name, decode, own=False, on_damage=_known_damage(run))
    rows = [asdict(entry) for entry in found]
    if any(
        run.results[stage].record.get("quarantined_shards") for stage in {"features", "decode"} & run.results.keys()
    ):
        wanted = {row["id"] for row in read_table(run.result("decode").store, f"{name}.parquet")}
        rows = [row for row in rows if row["id"] in wanted]
    return rows


def _known_damage(run: Run) -> Callable[[ShardError], None]:
    """Passes over shards that this run's model could not read either."""

    def check(error: ShardError) -> None:
        known = {entry["shard"] for entry in run.result("decode").record.get("quarantined_shards", ())}
        if error.shard is None or error.shard.name not in known:
            raise error

    return check


def decide(run: Run, champion: Any | None) -> Decision:
    """Compare this run's model with the champion on this run's test sets."""
    if champion is None:
        return Decision(True, "there was no champion")
    challenger, words = _errors(run, None)
    with tempfile.TemporaryDirectory() as folder:
        source = f"models:/{champion.name}/{champion.version}"
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=folder))
        reigning, _ = _errors(run, next(local.rglob("bundle.json")).parent)
    level = 1.0 - run.config.register_as.significance
    found = compare_systems(reigning, challenger, words, level=level, seed=run.config.seed)
    total = max(1, sum(words))
    wer_a, wer_b = sum(reigning) / total, sum(challenger) / total
    verdict = {"b": "beats", "a": "is beaten by", None: "does not differ significantly from"}[found.better]
    return Decision(
        promoted=found.better == "b",
        reason=f"WER {wer_b:.2%} {verdict} version {champion.version}'s {wer_a:.2%} (p = {found.p_value:.3g})",
        champion=str(champion.version),
        champion_wer=wer_a,
        challenger_wer=wer_b,
        p_value=found.p_value,
    )


def _inputs(run: Run) -> Inputs:
    config = {
        "register": run.config.register_as.model_dump(mode="json"),
        "name": run.config.name,
        "model": run.config.model_name,
        "decode": run.config.decode.model_dump(mode="json"),
    }
    return config, {"train": run.result("train").record["digest"], "score": run.result("score").key}


def _make_version(api: mlflow.MlflowClient, run: Run, output: StageOutput) -> tuple[str, str]:
    """The training's MLflow run, completed, and a registered version; returns their ids.

    A failure leaves the run marked as failed; the next attempt takes it up again.
    """
    about = _training(api, run, output)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        journal.write_bytes(run.result("train").store.read("journal.jsonl"))
        run_id = send_rest(journal, forward_note(run.result("train").key, about.training), about)
        try:
            _end_stale(api, run, output, run_id)
            api.update_run(run_id, name=run.run_id)
            set_tags(api, run_id, tags := _tags(run, output))
            _log_run(api, run, run_id, Path(folder))
            with tempfile.TemporaryDirectory() as bundle:
                version = _log_model(run, run_id, _complete_bundle(run, Path(bundle)), tags)
        except BaseException:
            api.set_terminated(run_id, "FAILED")
            raise
    return run_id, version


def _end_stale(api: mlflow.MlflowClient, run: Run, output: StageOutput, run_id: str) -> None:
    """Mark what killed processes left: they could not say so themselves."""
    experiment = experiment_id(api, run.config.name)
    for stale in api.search_runs([experiment], f"tags.`{KEY_TAG}` = '{output.key}' and attributes.status = 'RUNNING'"):
        if stale.info.run_id != run_id:
            api.set_terminated(stale.info.run_id, "KILLED")


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    api, name = client(), run.config.model_name
    found = find_version(api, name, output.key)
    if found is None or run.forced("register"):
        run_id, version = _make_version(api, run, output)
    else:  # a run that was killed after registering: finish what it began
        run_id, version = str(found.run_id), str(found.version)
    for figure, value in flatten(run.result("score").record["sets"]).items():
        api.set_model_version_tag(name, version, figure, value)
    api.set_registered_model_alias(name, "challenger", version)
    champion = champion_version(api, name)
    if champion is not None and str(champion.version) == version:
        decision = Decision(True, "it is the champion already")
    else:
        decision = decide(run, champion)
    set_tags(api, run_id, {DECISION_TAG: decision.reason})
    api.set_model_version_tag(name, version, DECISION_TAG, decision.reason)
    if decision.promoted:
        api.set_registered_model_alias(name, "champion", version)
    api.set_terminated(run_id, "FINISHED")
    return {
        "counts": {"version": int(version), "promoted": int(decision.promoted)},
        "model": name,
        "version": version,
        "model_uri": f"models:/{name}/{version}",
        "mlflow_run": run_id,
        "decision": asdict(decision),
    }


def current_aliases(record: dict[str, Any]) -> list[str]:
    """Aliases that the registered version has now."""
    try:
        return sorted(client().get_model_version(record["model"], record["version"]).aliases)
    except MlflowException:
        return []


def _still_there(run: Run, record: dict[str, Any]) -> bool:
    try:
        version = client().get_model_version(record["model"], record["version"])
    except MlflowException:
        return False
    # another registry may have another model under this name and number
    return bool(version.tags.get(KEY_TAG) == record["key"])


REGISTER = Stage("register", 1, _inputs, _work, _still_there)
