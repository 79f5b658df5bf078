"""`starling config`: show, check and reference."""

import json

import pytest
import yaml
from command_line import invoke
from support import ROOT, tiny_document, write_config

pytestmark = pytest.mark.usefixtures("wide", "home")


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "c.yaml", tiny_document())


def test_configuration_is_shown_with_its_origins(config, home):
    shown = invoke("config", "show", config, "--set", "seed=7").stdout
    assert yaml.safe_load(shown)["seed"] == 7
    assert "  # --set\n" in shown
    assert "  # c.yaml:1\n" in shown
    assert f"# data folder: {home}\n" in shown
    document = json.loads(invoke("config", "show", config, "--json").stdout)
    assert document["config"]["train"]["epochs"] == 2
    assert (document["origins"]["train.epochs"], document["origins"]["train.average"]) == ("c.yaml:1", "default")
    assert document["places"]["object store"] == str(home / "objects")


def test_shown_configuration_can_be_run(config, tmp_path):
    (tmp_path / "all.yaml").write_text(invoke("config", "show", config).stdout)
    assert "no mistake found" in invoke("config", "check", tmp_path / "all.yaml").stdout


def test_credentials_in_an_address_are_not_shown(config, monkeypatch):
    monkeypatch.setenv("STARLING_OBJECTS", "s3://key:secret@bucket/x")
    assert "secret" not in invoke("config", "show", config).stdout


def test_check_names_every_problem_and_fails(tmp_path):
    sources = [{"kind": "table", "path": "nowhere.csv"}, {"kind": "kaldi", "path": "also-nowhere"}]
    path = write_config(tmp_path / "c.yaml", tiny_document(data={"sources": sources}))
    shown = invoke("config", "check", path, code=1).stderr
    assert [line.partition("/")[0] for line in shown.splitlines()[1:]] == ["  data.sources.0: ", "  data.sources.1: "]
    assert "nowhere.csv" in shown
    report = json.loads(invoke("config", "check", path, "--json", code=1).stdout)
    assert (report["name"], len(report["problems"])) == ("tiny", 2)


def test_check_and_run_report_a_missing_corpus_in_the_same_words(tmp_path):
    source = {"kind": "table", "path": "nowhere.csv"}
    path = write_config(tmp_path / "c.yaml", tiny_document(data={"sources": [source]}))
    told = f"error: {path} has 1 wrong field:\n  data.sources.0: {tmp_path / 'nowhere.csv'} does not exist: check"
    checked = invoke("config", "check", path, code=1).stderr
    assert checked.startswith(told)
    assert invoke("run", path, code=1).stderr == checked
    assert invoke("run", path, "--folds", 2, code=1).stderr == checked


def test_check_names_the_stages(config):
    assert "stages: prepare, shard, features, train, decode, score, register, report" in invoke(
        "config", "check", config
    ).stdout.replace("\n", " ")


def test_reference_command_prints_the_docs_page():
    assert invoke("config", "reference").stdout == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
