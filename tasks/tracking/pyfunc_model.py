"""The registered model: MLflow runs this file when it loads the model (models from code: nothing is pickled).

Input is audio: paths, encoded files as bytes or in base64, or arrays of samples in [-1, 1]; one recording or several,
as a single value, a list, or the column `audio` of a table. Output is a table with one row per recording: `text`,
`seconds`, `confidence`, `error`. For a recording that cannot be recognized, `error` gives the reason and `text` is
empty; others are not affected. `mlflow models serve` refuses paths, since every client could have them opened; a
request fails only if all its recordings are refused.
"""

import base64
import binascii
import json
import os
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc import PythonModel, PythonModelContext

from recognition.transcriber import Transcriber, Transcript

_COLUMNS = ("text", "seconds", "confidence", "error")
_SERVER = "mlflow.pyfunc.scoring_server.app"
_HEADER, _PATH = 40, 4096  # minimum size of an audio file in bytes, maximum length of a path in characters
_FRAME = 200  # minimum number of samples of a recording: a frame of 25 ms at 8 kHz


def recordings(model_input: Any) -> list[Any]:
    """List the recordings in the input that MLflow passes."""
    if isinstance(model_input, pd.DataFrame):
        if not len(model_input) and "audio" not in model_input:
            return [np.zeros(0, dtype=np.float32)]  # what MLflow makes of an array without samples
        model_input = model_input["audio" if "audio" in model_input else model_input.columns[0]].tolist()
        if 0 < len(model_input) < _FRAME and all(isinstance(item, int | float) for item in model_input):
            raise ValueError(
                "MLflow turns a list of arrays into columns and drops all samples but the first of each: pass one "
                "array, or a table with an array in each row of its column 'audio'"
            )
    if isinstance(model_input, dict):
        model_input = model_input["audio"]
    if isinstance(model_input, pd.Series):
        model_input = model_input.tolist()
    if isinstance(model_input, str | bytes | Path):
        return [model_input]
    if isinstance(model_input, np.ndarray) and model_input.ndim == 1 and model_input.dtype != object:
        return [model_input]
    items = list(model_input)
    if items and all(isinstance(item, int | float | np.number) for item in items):
        return [np.asarray(items, dtype=np.float32)]  # one recording as a bare list of samples
    return items


def decoded(item: Any) -> Any:
    """Decode base64, as text or as bytes, with or without line breaks; other values, paths too, are returned unchanged.

    A path is not mistaken for base64: it is too short for a recording, contains a dot or another character that base64
    does not use, or exists. Encoded audio is not: its bytes are not all letters and digits.

    Raises:
        ValueError: If the text is neither base64 nor a path, or if the model is served and the text is a path.
    """
    if isinstance(item, np.ndarray) and item.ndim == 0:
        item = item.item()
    if not isinstance(item, str | bytes):
        return item
    data = _from_base64(item)
    if isinstance(item, bytes):
        return data or item
    if data and not (len(item) < _PATH and os.path.exists(item)):  # noqa: PTH110 - Path.exists raises for long names
        return data
    if len(item) >= _PATH:
        raise ValueError(
            f"a text of {len(item)} characters is neither a path nor base64: send the bytes of an audio file in base64"
        )
    if _SERVER in sys.modules:
        raise ValueError("a server accepts audio, not paths: send the file's bytes in base64, or an array of samples")
    return item


def _from_base64(text: str | bytes) -> bytes:
    """The bytes that base64 stands for; empty if it is something else, or too short for a recording."""
    try:
        plain = text.decode("ascii") if isinstance(text, bytes) else text
        plain = plain.partition(";base64,")[2] if plain.startswith("data:") else plain
        data = base64.b64decode("".join(plain.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""
    return data if len(data) >= _HEADER else b""


def accepted(items: list[Any]) -> tuple[list[Any], list[str]]:
    """Decode recordings, and refuse text that is none, and paths if the model is served.

    Returns:
        The accepted recordings, and for each recording the reason for its refusal; empty if it is accepted.

    Raises:
        ValueError: If the model is served, and all recordings are refused.
    """
    good, refused = [], []
    for item in items:
        try:
            good.append(decoded(item))
            refused.append("")
        except ValueError as error:
            refused.append(str(error))
    if items and not good and _SERVER in sys.modules:
        raise ValueError(refused[0])
    return good, refused


class RefusedRequest(MlflowException):  # type: ignore[misc]
    """A request of which nothing can be recognized.

    MLflow's server answers with the trace of any other exception, and puts the request, with all its audio, before the
    message of its own ones.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, error_code=BAD_REQUEST)
        self.reason = reason

    def serialize_as_json(self) -> str:
        """The answer to the client."""
        return json.dumps({"error_code": self.error_code, "message": self.reason})


class SpeechRecognizer(PythonModel):  # type: ignore[misc]
    """A bundle behind MLflow's generic interface."""

    # Without this line, MLflow prints advice to add a type hint whenever a model is loaded. No hint covers every input.
    _skip_type_hint_validation = True

    def load_context(self, context: PythonModelContext) -> None:
        """Load the model's bundle."""
        self.transcriber = Transcriber(Path(context.artifacts["bundle"]))

    # no type hint on model_input: MLflow would take it for a schema, and warn about Any
    def predict(self, context, model_input, params=None) -> pd.DataFrame:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Recognize recordings.

        Args:
            context: Not used.
            model_input: Recordings, as described in the module.
            params: `sample_rate` of arrays in Hz; 0: the model's own. `language` of the recordings, as a BCP 47 tag,
                for models with tokens of languages; empty: such a model finds it.

        Raises:
            DecodeError: The model cannot be told this language.
        """
        rate = int((params or {}).get("sample_rate") or 0) or None
        language = str((params or {}).get("language") or "")
        try:
            if language:
                self.transcriber.recognizer.check_language(language)
            items, refused = accepted(recordings(model_input))
        except ValueError as error:
            raise RefusedRequest(str(error)) if _SERVER in sys.modules else error from error
        transcripts = iter(self.transcriber.transcribe(items, rate, language=language))
        texts = [Transcript("", 0.0, 0.0, error=reason) if reason else next(transcripts) for reason in refused]
        rows = [[getattr(text, name) for name in _COLUMNS] for text in texts]
        return pd.DataFrame(rows, columns=list(_COLUMNS))


mlflow.models.set_model(SpeechRecognizer())
