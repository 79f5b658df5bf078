"""Stage register: completes the training's MLflow run and registers a version of the model.

The new version becomes `@challenger`, and is compared with the champion at once unless `register.promote` is `manual`:
see `tasks.tracking.promotion`.
"""

import base64
import io
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
import yaml
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types.schema import AnyType, ColSpec, ParamSchema, ParamSpec, Schema

import configurable
import devices
import recognition
import speech
import storage
from configurable.addresses import address_content
from recognition.bundle import BundleSpec, load_spec
from speech.audio import encode_flac
from speech.decoding import DECODERS
from speech.vad import SileroConfig
from storage.stages import StageOutput
from tasks import pyfunc_path
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageRecord, StageResult, get_stage
from tasks.stages.bundles import complete_bundle
from tasks.stages.decode import DECODE
from tasks.stages.decoder_files import with_digests
from tasks.stages.initial import initial_tags
from tasks.stages.run_sets import scored_sets
from tasks.stages.score import SCORE
from tasks.stages.trained_model import trained_model
from tasks.tracking.datasets import set_inputs
from tasks.tracking.metrics import ERRORS
from tasks.tracking.model_card import STATED, card, card_tags, contents, model_text, scores_table
from tasks.tracking.promotion import save_stages, settle
from tasks.tracking.provenance import provenance, version_tags
from tasks.tracking.registry import CHALLENGER, TESTS_TAG, find_version, record_links, waiting_challenger
from tasks.tracking.runs import (
    DECISION_TAG,
    KEY_TAG,
    NOTE_TAG,
    TrainingRun,
    client,
    end_abandoned,
    end_run,
    experiment_id,
    find_training_run,
    flatten,
    log_inputs,
    log_params,
    set_tags,
    show_rates,
    status_after,
    ui_links,
)
from tasks.tracking.significance import Decision, tests_tag

_REQUIREMENTS = (
    *("torch", "torchaudio", "numpy", "soundfile", "safetensors", "pydantic", "pandas", "mlflow", "fsspec", "pyarrow"),
    *SileroConfig.packages,
)
"""Packages that every registered model needs."""
_ROOMS = (recognition, speech, storage, devices, configurable)
"""What is stored with a registered model: all that `recognition` may import."""
_PIECES = "sentencepiece"
_SEARCHES = tuple(dict.fromkeys(name for decoder in DECODERS.values() for name in decoder.packages))
_NOTED = (*_REQUIREMENTS, _PIECES, *_SEARCHES, "rapidfuzz", "prefect")


def _late_metrics(run: Run, at_ms: int) -> list[Metric]:
    """Figures of the stages, such as scores of the test sets and tuned parameters, at the training's last step."""
    metrics = {k: v for name, result in run.results.items() for k, v in get_stage(name).figures(result.record).items()}
    # again in the folder that MLflow shows first: metrics without a folder come last
    metrics |= {f"{ERRORS}{name}_wer": metrics[f"{name}.wer"] for name in scored_sets(run) if f"{name}.wer" in metrics}
    return [Metric(name, value, at_ms, _last_step(run)) for name, value in metrics.items()]


def _last_step(run: Run) -> int:
    return trained_model(run).figures()["step"]


def _tags(run: Run, output: StageOutput, about: dict[str, Any]) -> dict[str, str]:
    return {
        KEY_TAG: output.key,
        "starling.model_digest": trained_model(run).digest,
        TESTS_TAG: tests_tag(run),
        **version_tags(run),
        **initial_tags(run),
        **card_tags(about),
    }


def _training(api: mlflow.MlflowClient, run: Run, output: StageOutput) -> TrainingRun:
    """The training's MLflow run; a new one if another registration has completed it."""
    model = trained_model(run)
    about = model.training_run(model.training)
    tracked = find_training_run(api, about) if about.training else None
    tags = tracked.data.tags if tracked else {}
    if about.training and DECISION_TAG not in tags and tags.get(KEY_TAG, output.key) == output.key:
        return about
    return replace(about, training=f"{about.training or output.key}/{run.run_id}")


def _log_run(api: mlflow.MlflowClient, run: Run, run_id: str, folder: Path) -> None:
    """Log parameters, test results and artifacts to the MLflow run; the folder has the figures of the training."""
    model = trained_model(run)
    config = run.config.model_dump(mode="json", by_alias=True)
    known = api.get_run(run_id)
    log_params(api, known, flatten(config))
    log_inputs(api, known, set_inputs(run, dict.fromkeys([*model.sets, *scored_sets(run)])))
    elapsed_ms = int(1000 * model.figures()["elapsed"])
    api.log_batch(run_id, metrics=_late_metrics(run, known.info.start_time + elapsed_ms))
    (folder / "learning_curves.png").write_bytes(model.curves())
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    versions = {name: metadata.version(name) for name in _NOTED}
    save_stages(run, folder)
    (folder / "environment.json").write_text(json.dumps(versions | provenance(), indent=2), encoding="utf-8")
    if tuning := DECODE.record(run).get("tuning"):
        (folder / "tuning.json").write_text(json.dumps(tuning, indent=2), encoding="utf-8")
    for name in scored_sets(run):
        text = run.result("score").output.read(f"{name}.alignments.txt")
        (folder / f"{name}.alignments.txt").write_bytes(text)
    for file in sorted(folder.iterdir()):
        api.log_artifact(run_id, str(file))


def _signature() -> ModelSignature:
    outputs = [ColSpec("string", "text"), ColSpec("double", "seconds"), ColSpec("double", "confidence")]
    return ModelSignature(
        # with a single unnamed column, MLflow accepts a bare path, bytes or array as well as a table
        inputs=Schema([ColSpec(AnyType())]),
        outputs=Schema([*outputs, ColSpec("string", "error")]),
        # declared for models without languages, too: MLflow would drop the parameter, and the caller not notice
        params=ParamSchema([ParamSpec("sample_rate", "integer", 0), ParamSpec("language", "string", "")]),
    )


def _example(rate: int) -> pd.DataFrame:
    """Half a second of silence in the form of a request to a server: an encoded file in base64."""
    return pd.DataFrame({"audio": [base64.b64encode(encode_flac(torch.zeros(rate // 2), rate)).decode()]})


def requirements(spec: BundleSpec) -> list[str]:
    """Packages that a registered model needs besides this project's code, which is stored with the model.

    Args:
        spec: Specification of the model; only BPE tokens need sentencepiece, only searches flashlight-text,
            and only pretrained encoders transformers.
    """
    needed = [*_REQUIREMENTS]
    needed += [_PIECES] if spec.tokenizer and spec.tokenizer.get("kind") == "bpe" else []
    needed += ["tokenizers"] if spec.tokenizer and spec.tokenizer.get("kind") == "whisper" else []
    needed += (*spec.decode.packages, *(spec.model.packages if spec.model else ()))
    return [f"{name}=={metadata.version(name)}" for name in needed]


def _log_model(run: Run, run_id: str, bundle: Path, tags: dict[str, str], about: dict[str, Any]) -> str:
    """Log the model to the run at the last step of its training, and register it; returns the version.

    MLflow copies the run's metrics of that step to the model.
    """
    with _without_chatter(), mlflow.start_run(run_id=run_id):
        info = mlflow.pyfunc.log_model(
            name="model",
            python_model=str(pyfunc_path()),
            artifacts={"bundle": str(bundle)},
            code_paths=[str(Path(str(room.__file__)).parent) for room in _ROOMS],
            signature=_signature(),
            input_example=_example(run.config.data.sample_rate),
            step=_last_step(run),
            pip_requirements=requirements(load_spec(bundle)),
            metadata={"starling": about},
        )
        version = mlflow.register_model(info.model_uri, run.config.model_name, await_registration_for=60, tags=tags)
    return str(version.version)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Suppress MLflow's notices (type hints, "created version") in a run's output; errors still raise."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _inputs(run: Run) -> Inputs:
    config = {
        # the promotion policy does not affect the version
        "register": address_content(run.config.register_as, without=("promote", "accept_untrained", "first_max_wer")),
        "name": run.config.name,
        "model": run.config.model_name,
        "decode": address_content(with_digests(run.config.decoder)),
    }
    if stated := {name: value for name in STATED if (value := getattr(run.config.model, name, ""))}:
        config["pretrained"] = stated
    model = trained_model(run)
    return config, {model.result.name: model.digest, "score": run.result("score").key}


def _make_version(
    api: mlflow.MlflowClient, run: Run, output: StageOutput, contained: dict[str, Any]
) -> tuple[str, str]:
    """Complete the training's MLflow run and register a version; returns their ids.

    After a failure the run is marked as failed; the next attempt continues it.
    """
    about, model = _training(api, run, output), trained_model(run)
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / model.history
        history.write_bytes(model.result.output.read(model.history))
        run_id = model.send(history, about)
        try:
            end_abandoned(api, experiment_id(api, run.config.name), run_id, output.key)
            api.update_run(run_id, name=run.run_id)
            set_tags(api, run_id, tags := _tags(run, output, contained))
            _log_run(api, run, run_id, Path(folder))
            with tempfile.TemporaryDirectory() as bundle:
                tags |= _scores(run)
                version = _log_model(run, run_id, complete_bundle(run, Path(bundle)), tags, contained)
        except BaseException as error:
            end_run(api, run_id, *status_after(type(error)))
            raise
    return run_id, version


def _scores(run: Run) -> dict[str, str]:
    """The tags of a version that tell its scores."""
    return flatten(SCORE.record(run)["sets"])


def _describe(api: mlflow.MlflowClient, run: Run, run_id: str, version: str, contained: dict[str, Any]) -> None:
    """Write the version's scores and model card, and link the run to them; idempotent."""
    name = run.config.model_name
    known = api.get_model_version(name, version).tags  # a new version has them all, and each tag is a request
    for figure, value in _scores(run).items():
        if known.get(figure) != value:
            api.set_model_version_tag(name, version, figure, value)
    links = ui_links(api.get_run(run_id), name, version)
    if contained["flow_run"]:
        links["flow run"] = contained["flow_run"]
    api.update_model_version(name, version, description=card(contained, links))
    if not api.get_registered_model(name).description:
        api.update_registered_model(name, model_text(contained))
    about = " · ".join(f"[{text}]({address})" for text, address in links.items())
    parts = [scores_table(contained), f"Version {version} of {name}.", *([about] if about else [])]
    set_tags(api, run_id, {NOTE_TAG: "\n\n".join(parts)})
    show_rates(api, api.get_run(run_id).info.experiment_id, contained["scores"])


class RegisterRecord(StageRecord):
    """The registered version."""

    model: str
    """Name in the registry."""
    version: str
    """Its number."""
    model_uri: str
    """`models:/NAME/VERSION`."""
    mlflow_run: str
    """Id of the MLflow run that the version belongs to."""
    decision: dict[str, Any]
    """Whether it became champion, and why (`Decision`)."""


def _work(run: Run, output: StageOutput) -> RegisterRecord:
    api, name, contained = client(), run.config.model_name, contents(run)
    registered = find_version(api, name, output.key)
    if registered is None or run.forced("register"):
        run_id, version = _make_version(api, run, output, contained)
    else:  # a run was killed after the registration: complete it
        run_id, version = str(registered.run_id), str(registered.version)
    _describe(api, run, run_id, version, contained)
    api.set_registered_model_alias(name, CHALLENGER, version)
    decision = _decide(api, run, run_id, version)
    api.set_terminated(run_id, "FINISHED")
    return {
        "counts": {"version": int(version), "promoted": int(decision.promoted)},
        "model": name,
        "version": version,
        "model_uri": f"models:/{name}/{version}",
        "mlflow_run": run_id,
        "decision": asdict(decision),
    }


def _decide(api: mlflow.MlflowClient, run: Run, run_id: str, version: str) -> Decision:
    """Compare the version with the champion, unless `register.promote` is `manual`."""
    name = run.config.model_name
    if run.config.register_as.promote == "auto":
        return settle(api, run, name, version)
    decision = Decision(False, f"waits for `starling promote {name}`")
    set_tags(api, run_id, {DECISION_TAG: decision.reason})
    api.set_model_version_tag(name, version, DECISION_TAG, decision.reason)
    return decision


def _still_there(run: Run, record: dict[str, Any]) -> bool:
    """Whether the recorded version exists, and its promotion is decided."""
    api = client()
    try:
        version = api.get_model_version(record["model"], record["version"])
    except MlflowException:
        return False
    # another registry may contain a different model with this name and version
    if version.tags.get(KEY_TAG) != record["key"]:
        return False
    waiting = waiting_challenger(api, record["model"]) if run.config.register_as.promote == "auto" else None
    return waiting is None or str(waiting.version) != str(record["version"])


def registered_text(result: StageResult) -> str:
    """The registered version, the reason for its promotion or against it, and links to MLflow, as Markdown."""
    links = record_links(result.record)
    lines = [f"**{result.record['model_uri']}**", result.record["decision"]["reason"]]
    return "\n\n".join([*lines, *(f"[{name}]({url})" for name, url in links.items())])


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    yield Artifact(registered_text(result), "Registered model")


REGISTER = Stage(
    "register",
    4,
    _inputs,
    _work,
    _still_there,
    artifacts=_artifacts,
    reads="model, scores",
    writes="MLflow run, registered version, aliases",
)
