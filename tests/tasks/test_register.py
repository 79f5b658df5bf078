import dataclasses
import json

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from support import copy_finished, finished, give_mlflow, tiny_document

from recognition.bundle import load_spec
from recognition.inference import Decoded
from speech.decoding import BeamConfig
from storage.stages import StageOutput
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table, write_table
from tasks.stages import register
from tasks.stages.base import Run, StageResult
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import _SCHEMA
from tasks.stages.register import REGISTER
from tasks.stages.score import SCORE
from tasks.stages.train import model_digest
from tasks.tracking import significance
from tasks.tracking.promotion import settle
from tasks.tracking.registry import champion_version, current_aliases, find_version
from tasks.tracking.runs import DECISION_TAG, KEY_TAG, client, flatten
from tasks.tracking.significance import PromotionOptions, SetErrors, decide


class Killed(BaseException):
    """Simulates kill -9: nothing in the stage may catch it and clean up."""


@pytest.fixture
def home(home):
    """A data folder with an empty database of MLflow."""
    give_mlflow(home)
    return home


def published(run, name, key, record):
    output = StageOutput(run.store, name, key)
    record = output.publish(record)
    run.results[name] = StageResult(name, key, output.store.url, 0.0, False, record.get("counts", {}), record)
    return run.results[name]


def hypotheses(wrong):
    """The finished run's test utterances, the first so many of them recognized wrongly."""
    rows = read_table(finished()[1].result("decode").store, "test.parquet")
    return [row | {"hyp": "wrong wrong" if n < wrong else row["ref"]} for n, row in enumerate(rows)]


def run_with_errors(wrong, tmp_path, **fields):
    """A run that is ready to register a model which recognizes `wrong` test utterances wrongly."""
    run = Run(parse_config(tiny_document("judged", **fields)), f"wrong-{wrong}")
    original = finished()[1]
    run.results |= {name: original.results[name] for name in ("prepare", "shard", "features")}
    bundle = fetch_bundle(original.result("train").store, tmp_path / f"bundle-{wrong}")
    spec = json.loads((bundle / "bundle.json").read_text())
    spec |= {"provenance": {"wrong": wrong}, "checksum": ""}
    (bundle / "bundle.json").write_text(json.dumps(spec))
    store = StageOutput(run.store, "train", f"wrong{wrong}").store
    for name in ("model.safetensors", "bundle.json"):
        store.write_file(f"model/{name}", bundle / name)
    store.write("journal.jsonl", original.result("train").store.read("journal.jsonl"))
    record = {"result": original.result("train").record["result"], "digest": model_digest(store)}
    published(run, "train", f"wrong{wrong}", record)
    decoded = StageOutput(run.store, "decode", f"wrong{wrong}").store
    write_table(decoded, "test.parquet", hypotheses(wrong), _SCHEMA)
    published(run, "decode", f"wrong{wrong}", {"sets": ["test"]})
    SCORE.execute(run)
    return run


@pytest.fixture
def decode_by_quality(monkeypatch):
    """A champion recognizes as wrongly as its bundle says."""

    def decode_with(run, bundle, name, decode, own=True, on_progress=None, on_damage=None):
        rows = hypotheses(load_spec(bundle).provenance["wrong"])
        return [Decoded(**{field.name: row[field.name] for field in dataclasses.fields(Decoded)}) for row in rows]

    monkeypatch.setattr(significance, "decode_with", decode_with)


def aliases(name="judged"):
    """Every alias of every version."""
    return {
        v.version: sorted(client().get_model_version(name, v.version).aliases)
        for v in client().search_model_versions(f"name='{name}'")
    }


def test_challenger_is_promoted_only_if_better_leaving_one_champion(home, tmp_path, decode_by_quality, monkeypatch):
    first = REGISTER.execute(run_with_errors(6, tmp_path))
    assert first.record["decision"]["reason"] == "became champion: there was none before"
    assert first.record["model_uri"] == "models:/judged/1"
    assert aliases() == {1: ["challenger", "champion"]}

    worse = REGISTER.execute(run_with_errors(12, tmp_path))
    assert not worse.record["decision"]["promoted"]
    assert "is beaten by version 1" in worse.record["decision"]["reason"]
    assert worse.counts == {"version": 2, "promoted": 0}
    assert aliases() == {1: ["champion"], 2: ["challenger"]}

    better = run_with_errors(0, tmp_path)

    def killed(self, name, alias, version):
        if alias == "champion":
            raise Killed
        return moved(self, name, alias, version)

    moved = mlflow.MlflowClient.set_registered_model_alias
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "set_registered_model_alias", killed)
        with pytest.raises(Killed):
            REGISTER.execute(better)
    assert REGISTER.output(better).record() is None
    assert aliases() == {1: ["champion"], 2: [], 3: ["challenger"]}

    finish = REGISTER.execute(better)
    assert finish.record["version"] == "3"  # the version that the killed run had made
    assert finish.record["decision"]["promoted"]
    assert "WER 0.00 % beats version 1's" in finish.record["decision"]["reason"]
    assert finish.record["decision"]["p_value"] < 0.05
    assert aliases() == {1: ["previous"], 2: [], 3: ["challenger", "champion"]}
    assert current_aliases(finish.record) == ["challenger", "champion"]
    assert REGISTER.execute(better).cached

    with monkeypatch.context() as patch:  # killed after the alias, before the record: nothing is compared again
        REGISTER.output(better).store.delete("done.json")
        patch.setattr(significance, "decide", None)
        again = REGISTER.execute(better)
    assert (again.record["version"], again.record["decision"]["promoted"]) == ("3", True)

    trouble = run_with_errors(12, tmp_path)
    REGISTER.output(trouble).store.delete("done.json")

    def down(*_):
        raise MlflowException("the server is having a moment")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "get_model_version_by_alias", down)
        with pytest.raises(MlflowException, match="having a moment"):
            REGISTER.execute(trouble)
    assert aliases()[3] == ["champion"]


def test_model_that_has_learned_nothing_stays_challenger_unless_forced(home, tmp_path):
    run = run_with_errors(12, tmp_path, register={})
    untrained = REGISTER.execute(run)
    reason = untrained.record["decision"]["reason"]
    assert reason.startswith("stays challenger, although there is no champion: no word of the test sets was recognized")
    assert "Train longer (train.epochs)" in reason
    assert "`starling promote judged --force --reason TEXT`" in reason
    assert client().get_model_version("judged", "1").tags[DECISION_TAG] == reason
    assert client().get_run(untrained.record["mlflow_run"]).data.tags[DECISION_TAG] == reason
    assert aliases() == {1: ["challenger"]}
    assert REGISTER.execute(run).cached  # it does not wait for a decision

    learned = REGISTER.execute(run_with_errors(6, tmp_path, register={}))
    assert learned.record["decision"]["reason"] == "became champion: there was none before"
    client().delete_registered_model_alias("judged", "champion")
    assert not settle(client(), run, "judged", "1").promoted
    assert settle(client(), run, "judged", "1", PromotionOptions(force=True, reason="a demonstration")).promoted
    assert aliases() == {1: ["champion"], 2: ["challenger"]}


def test_the_first_champion_is_as_good_as_the_configuration_asks_for(home, tmp_path):
    run = run_with_errors(6, tmp_path, register={"first_max_wer": 0.01})
    wer = run.result("score").record["sets"]["test"]["wer"]
    reason = REGISTER.execute(run).record["decision"]["reason"]
    assert reason.startswith(f"stays challenger, although there is no champion: WER {100 * wer:.2f} % is above")
    assert "register.first_max_wer, 1.00 %" in reason
    assert aliases() == {1: ["challenger"]}
    settled = settle(client(), run_with_errors(6, tmp_path, register={"first_max_wer": wer}), "judged", "1")
    assert settled.promoted


def test_equal_models_do_not_differ_significantly(home, monkeypatch, decode_by_quality, tmp_path):
    run = run_with_errors(6, tmp_path)
    monkeypatch.setattr(
        significance, "count_errors", lambda run, champion: {"test": SetErrors([1, 0, 2] * 9, [4, 3, 5] * 9)}
    )
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", lambda artifact_uri, dst_path: str(tmp_path))
    champion = type("Version", (), {"name": "judged", "version": "7"})
    decision = decide(run, champion)
    assert not decision.promoted
    assert "does not differ significantly from version 7's" in decision.reason
    assert decision.champion_wer == decision.challenger_wer == pytest.approx(27 / 108)


def test_mlflow_run_has_parameters_metrics_and_artifacts(finished):
    record = finished.result("register").record
    api = client()
    run = api.get_run(record["mlflow_run"])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.params["data.sources"].startswith("[{")
    tags = run.data.tags
    for name, entry in finished.result("shard").record["sets"].items():
        assert tags[f"dataset.{name}"] == entry["digest"]
    assert tags[KEY_TAG] == finished.result("register").key
    assert tags["starling.model_digest"] == finished.result("train").record["digest"]
    assert tags["starling.decision"] == "became champion: there was none before"
    assert tags["starling.commit"]
    loss = api.get_metric_history(record["mlflow_run"], "training/loss")
    assert [metric.step for metric in loss] == [1, 2, 3, 4, 5, 6]
    assert run.data.metrics["WER/test_wer"] == run.data.metrics["test.wer"]
    assert {"training/lr", "training/valid_loss", "WER/valid_wer", "test.wer", "test.wer_low", "test.cer"} <= set(
        run.data.metrics
    )
    assert run.data.metrics["test.wer"] == finished.result("score").record["sets"]["test"]["wer"]
    names = {file.path for file in api.list_artifacts(record["mlflow_run"])}
    wanted = {"config.yaml", "environment.json", "journal.jsonl", "learning_curves.png", "test.alignments.txt"}
    assert wanted <= names


def test_the_registered_version_has_signature_example_and_no_pickle(finished):
    from pathlib import Path

    record = finished.result("register").record
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=record["model_uri"]))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert any(name.endswith("model.safetensors") for name in names)
    assert not [name for name in names if Path(name).suffix in {".pkl", ".pickle", ".pth", ".pt", ".bin"}]
    info = mlflow.models.get_model_info(record["model_uri"])
    assert [column.name for column in info.signature.outputs] == ["text", "seconds", "confidence", "error"]
    assert [param.name for param in info.signature.params.params] == ["sample_rate", "language"]
    assert "input_example.json" in names
    version = client().get_model_version(record["model"], record["version"])
    assert version.tags["test.wer"] == str(finished.result("score").record["sets"]["test"]["wer"])
    assert sorted(version.aliases) == ["challenger", "champion"]


def test_model_requires_only_the_packages_it_uses(finished, tmp_path):
    spec = load_spec(fetch_bundle(finished.result("train").store, tmp_path))

    def names(spec):
        return {line.partition("==")[0] for line in register.requirements(spec)}

    pieces = spec.model_copy(update={"tokenizer": {"kind": "bpe"}})
    beam = spec.model_copy(update={"decode": BeamConfig()})
    common = {"torch", "torchaudio", "numpy", "soundfile", "safetensors", "pydantic", "pandas", "mlflow"}
    common |= {"silero-vad", "fsspec", "pyarrow"}
    assert names(spec) == common
    assert names(pieces) == {*common, "sentencepiece"}
    assert names(beam) == {*common, "flashlight-text"}


def test_deleted_or_foreign_version_is_registered_again(finished):
    record = finished.result("register").record
    assert REGISTER.still_valid(finished, record)
    assert not REGISTER.still_valid(finished, record | {"version": "99"})
    assert not REGISTER.still_valid(finished, record | {"model": "nobody"})
    assert not REGISTER.still_valid(finished, record | {"key": "another output"})


def test_versions_are_found_by_their_stage_outputs(finished):
    api, record = client(), finished.result("register").record
    assert find_version(api, record["model"], finished.result("register").key).version == int(record["version"])
    assert find_version(api, record["model"], "another") is None
    assert find_version(api, "nobody", "another") is None
    assert champion_version(api, "nobody") is None
    assert str(champion_version(api, record["model"]).version) == record["version"]


def test_failed_registration_marks_the_run_and_leaves_no_version(home, tmp_path, monkeypatch):
    run = run_with_errors(3, tmp_path)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(register, "_log_model", fail)
    with pytest.raises(OSError, match="no space"):
        REGISTER.execute(run)
    api = client()
    runs = api.search_runs([register.experiment_id(api, "judged")])
    assert [r.info.status for r in runs] == ["FAILED"]
    assert aliases() == {}


def test_champion_with_other_features_is_evaluated_on_audio(finished, tmp_path, monkeypatch):
    """The run's features are stored, and not those that the champion was trained on."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))
    document = tiny_document(features={"num_mels": 24, "stored": True, "cmvn": "speaker"})
    run = Run(parse_config(document), "r")
    from tasks.stages.features import FEATURES
    from tasks.stages.prepare import PREPARE
    from tasks.stages.shard import SHARD

    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    bundle = fetch_bundle(finished.result("train").store, tmp_path / "bundle")
    errors, words, _ = significance.count_errors(run, bundle)["test"]
    assert len(errors) == len(words) == 12


def test_parameters_are_flat_and_text():
    flat = flatten({"a": {"b": 1, "c": {"d": [1, {"e": None}]}}, "f": None, "g": True})
    assert flat == {"a.b": "1", "a.c.d": '[1, {"e": null}]', "f": "None", "g": "True"}
