"""`starling evaluate digits digits` said that the folder `digits` is not a bundle: `starling init` had named the model
after the folder of the recordings, and a folder came first."""

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.models import model_uri


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_without_a_bundle_does_not_hide_a_registered_model(here):
    assert model_uri("digits") == "models:/digits@champion"
    assert model_uri("./digits") == "./digits"
    (here / "digits" / "bundle.json").write_text("{}")
    assert model_uri("digits") == "digits"


def test_transcribe_takes_the_same_names_as_evaluate(finished, here):
    (here / "a.wav").write_bytes(b"no audio")
    shown = CliRunner().invoke(app, ["transcribe", "a.wav", "--model", "tini"]).stderr
    assert "models:/tini@champion is not in the registry" in shown
    shown = CliRunner().invoke(app, ["transcribe", "a.wav", "--model", "tiny"]).stderr
    assert "a.wav: " in shown
    assert "registry" not in shown
