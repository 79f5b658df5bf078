"""MLflow dropped `params={"language": "de"}` with a warning: the registered model always found the language itself."""

import sys

import mlflow
import pytest
from support import bundle_with_languages, tiny_bundle, write_tone

from recognition.transcriber import Transcriber
from speech.decoding import DecodeError
from tasks import pyfunc_path
from tasks.stages.register import _signature
from tasks.tracking import pyfunc_model


def loaded(folder, make):
    """A model as MLflow loads it, with the signature of registered models."""
    make(folder / "bundle")
    mlflow.pyfunc.save_model(
        folder / "model",
        python_model=str(pyfunc_path()),
        artifacts={"bundle": str(folder / "bundle")},
        signature=_signature(),
        pip_requirements=["mlflow"],
    )
    return mlflow.pyfunc.load_model(str(folder / "model"))


@pytest.fixture
def told(monkeypatch):
    """The codes of languages that recognition is told."""
    codes, asked = [], Transcriber._asked

    def listen(self, words, language):
        codes.append(asked(self, words, language))
        return codes[-1]

    monkeypatch.setattr(Transcriber, "_asked", listen)
    return codes


def test_a_model_with_languages_is_told_one(home, tmp_path, told):
    audio, model = str(write_tone(tmp_path / "a.flac", seconds=1.0)), loaded(tmp_path, bundle_with_languages)
    assert model.predict(audio, params={"language": "de-CH"})["error"].tolist() == [""]
    model.predict(audio)
    assert told == ["de", ""]
    with pytest.raises(DecodeError, match="the model knows the languages de, en, not 'fr': give one"):
        model.predict(audio, params={"language": "fr"})


def test_a_model_without_languages_refuses_one(home, tmp_path, monkeypatch):
    audio, model = str(write_tone(tmp_path / "a.flac", seconds=1.0)), loaded(tmp_path, tiny_bundle)
    with pytest.raises(DecodeError, match="it writes what it hears: leave the language out"):
        model.predict(audio, params={"language": "de"})
    monkeypatch.setitem(sys.modules, pyfunc_model._SERVER, sys)
    with pytest.raises(mlflow.exceptions.MlflowException, match="leave the language out") as refusal:
        model.predict(audio, params={"language": "de"})
    assert refusal.value.get_http_status_code() == 400  # the client's mistake
