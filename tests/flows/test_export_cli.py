"""`starling export`: which model, where to, in which layout, and what is printed."""

import json

import pytest
from command_line import invoke
from support import load_beside, tiny_bundle

from speech.models import TdnnConfig
from tasks.tracking.model_card import exported_card

pytestmark = pytest.mark.usefixtures("wide")
pytest.importorskip("onnxruntime", reason="the extra export is not installed: make setup")
registered = load_beside(__file__, "../tasks/registered.py")
api = registered.api


def test_bundle_is_exported_and_told_as_text_and_as_json(tmp_path):
    tiny_bundle(tmp_path / "mine")
    shown = invoke("export", tmp_path / "mine", "--to", tmp_path / "out", "--no-int8").stdout
    assert "ctc model for sherpa-onnx" in shown
    assert "model.onnx" in shown
    assert f"python {tmp_path / 'out' / 'recognize.py'}" in shown
    words = ["export", tmp_path / "mine", "--to", tmp_path / "plain", "--layout", "plain", "--json"]
    told = json.loads(invoke(*words).stdout)
    assert told["folder"] == str(tmp_path / "plain")
    assert told["name"] == "mine"
    assert told["layout"] == "plain"
    assert set(told["files"]) == {"model.onnx", "model.int8.onnx", "features.onnx"}
    assert "no model card" in (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")


def test_model_is_exported_for_streams_with_chunks_of_a_size(tmp_path):
    tiny_bundle(tmp_path / "mine", model=TdnnConfig(**TdnnConfig.tiny))
    words = ["export", tmp_path / "mine", "--to", tmp_path / "out", "--stream", "--chunk-ms", "150", "--no-int8"]
    assert "ctc model for sherpa-onnx, in chunks of 160 ms" in invoke(*words).stdout
    stream = json.loads((tmp_path / "out" / "model.json").read_text(encoding="utf-8"))["stream"]
    assert (stream["chunk_ms"], stream["shift"], stream["window"]) == (160, 16, 20)


def test_model_that_does_not_stream_is_refused_with_a_remedy(tmp_path):
    tiny_bundle(tmp_path / "mine")
    shown = invoke("export", tmp_path / "mine", "--to", tmp_path / "out", "--stream", code=1).stderr
    assert "train one with model.chunk={}, or export it without --stream" in shown


def test_full_folder_is_refused_before_the_model_is_fetched(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    monkeypatch.setattr("flows.models.fetch_model", lambda *_: pytest.fail("it was fetched"))
    shown = invoke("export", "some-model", "--to", tmp_path / "out", code=1).stderr
    assert "is not an empty folder: name another one with --to" in shown


def test_other_formats_are_refused(tmp_path):
    assert "'onnx'" in invoke("export", "m", "--to", tmp_path / "out", "--format", "tflite", code=2).stderr


def test_registered_version_takes_its_card_and_licences_along(api):
    (version,) = registered.add(api)
    api.update_model_version("m", version, description="# The card")
    api.set_model_version_tag("m", version, "starling.licences", "mine: CC0")
    for uri in ("models:/m@challenger", f"models:/m/{version}"):
        about, card = exported_card(uri)
        assert card == "# The card"
        assert about["registered"] == f"models:/m/{version}"
        assert (about["name"], about["licences"]) == ("m", "mine: CC0")


def test_version_without_a_card_has_an_empty_one(api):
    registered.add(api)
    about, card = exported_card("models:/m@challenger")
    assert card == ""
    assert "licences" not in about
