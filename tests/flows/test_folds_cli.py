"""`starling run --folds` on the command line, with and without Prefect."""

import io
import json

import mlflow
import pytest
from prefect.utilities.callables import parameter_schema
from rich.console import Console
from support import starling, tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from flows.deploy.deployments import FOLDS, plan
from flows.folds import crossvalidate, print_folds
from tasks.config.pipeline import parse_config
from tasks.stages.folds import combine


def folds_document():
    """Four voices in two folds, one more voice for validation, one epoch."""
    voices = {"train_voices": ["f1", "f2", "m1", "m2"], "valid_voices": ["f5"]}
    synthesis = {"train": 24, "valid": 4, "test": 0, **voices}
    document = tiny_document("folds")
    document["data"] |= {"sources": [{"kind": "synthetic", "synthesis": synthesis}]}
    document["train"] |= {"epochs": 1}
    return document


def json_of(done):
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


@pytest.mark.slow
def test_cross_validation_command_and_its_cached_repetition(tmp_path):
    home = tmp_path / "home"
    config = write_config(tmp_path / "folds.yaml", folds_document())
    done = starling("run", config, "--folds", "2", "--json", home=home)
    first = json_of(done)
    assert [set(run["sets"]) for run in first["runs"]] == [{"fold-1"}, {"fold-2"}]
    assert sum(fold["utterances"] for fold in first["folds"]) == 24
    assert {"mean", "std", "min", "max"} == first["wer"].keys()
    for word in ("fold-1", "fold-2", "mean", "std", "pooled", first["mlflow_run"]):
        assert word in done.stderr
    assert "Traceback" not in done.stderr

    again = json_of(starling("run", config, "--folds", "2", "--no-prefect", "--json", home=home))
    assert all(stage["cached"] for run in again["runs"] for stage in run["stages"])
    assert (again["wer"], again["mlflow_run"]) == (first["wer"], first["mlflow_run"])
    api = mlflow.MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    parent = api.get_run(first["mlflow_run"])
    assert parent.data.metrics["wer_mean"] == pytest.approx(first["wer"]["mean"])
    assert parent.data.metrics["fold-2.wer"] == pytest.approx(first["folds"][1]["wer"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    assert len(api.search_runs([parent.info.experiment_id], query)) == 2
    assert len(api.search_runs([parent.info.experiment_id])) == 3


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--folds", "1"], 1, "2 folds or more"),
        (["--folds", "101"], 1, "at most 100"),
        (["--folds", "2", "--until", "train"], 2, "exclude each other"),
        (["--folds", "4", "--no-prefect"], 1, "too few for 4 folds and a validation set"),
    ],
)
def test_impossible_cross_validation_is_refused(tmp_path, home, words, code, message):
    document = folds_document()
    document["data"]["sources"][0]["synthesis"] |= {"valid": 0}
    config = write_config(tmp_path / "folds.yaml", document)
    result = CliRunner().invoke(app, ["run", str(config), *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.stderr
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_deployment_of_the_flow_takes_its_parameters():
    def parameters(config):
        (entry,) = [entry for entry in plan(config) if entry["entrypoint"] == "flows/folds.py:crossvalidate"]
        return entry["parameters"]

    config = parse_config(folds_document())
    sent = json.loads(json.dumps(parameters(config)))
    assert crossvalidate.validate_parameters(sent)["config"] == config
    assert sent["folds"] == FOLDS
    document = folds_document()
    document["data"] |= {"folds": 3}
    assert parameters(parse_config(document))["folds"] == 3
    schema = parameter_schema(crossvalidate).model_dump_for_openapi()
    assert schema["properties"]["folds"]["description"] == "Number of folds."


TABLE = """\
r
┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━┓
┃ fold   ┃               WER ┃     CER ┃ words ┃ utterances ┃
┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━┩
│ fold-1 │           10.00 % │ 10.00 % │ 1,234 │         10 │
│ fold-2 │           20.00 % │ 10.00 % │ 1,234 │         10 │
├────────┼───────────────────┼─────────┼───────┼────────────┤
│ mean   │           15.00 % │ 10.00 % │       │            │
│ std    │            7.07 % │  0.00 % │       │            │
│ pooled │            0.08 % │         │       │            │
│ eval   │ 60.00 % ± 14.14 % │         │       │            │
└────────┴───────────────────┴─────────┴───────┴────────────┘
MLflow  m
"""


def test_final_table_shows_means_and_spread():
    def score(wer):
        return {"wer": wer, "cer": 0.1, "sub": 1, "ins": 0, "del": 0, "words": 1234, "utterances": 10}

    result = combine([{"fold-1": score(0.1), "eval": score(0.5)}, {"fold-2": score(0.2), "eval": score(0.7)}])
    text = io.StringIO()
    print_folds({"run_id": "r", "mlflow_run": "m", **result}, Console(file=text, width=100))
    assert "\n".join(line.rstrip() for line in text.getvalue().splitlines()) == TABLE.rstrip()
