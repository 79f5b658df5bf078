"""The registered model: MLflow runs this file when it loads the model (models from code: nothing is pickled).

Input is audio: paths, encoded files as bytes or in base64, or arrays of samples in ±1, one recording or many, bare, in
a list, or in the column `audio` of a table. Output is a table with one row a recording: `text`, `seconds`,
`confidence`, `error`. A recording that cannot be recognized has its reason in `error`, an empty `text`, and stops no
other. Behind `mlflow models serve` a path is refused: anyone who reaches the port could have it opened. A request whose
recordings are all refused is an error as a whole.
"""

import base64
import binascii
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from speech.transcriber import Transcriber, Transcript

_COLUMNS = ("text", "seconds", "confidence", "error")
_SERVER = "mlflow.pyfunc.scoring_server.app"
_HEADER, _PATH = 40, 4096  # bytes that no audio file is shorter than, characters that no path is longer than
_FRAME = 200  # no recording has fewer samples than a frame of 25 ms at 8 kHz


def recordings(model_input: Any) -> list[Any]:
    """The recordings in the data that MLflow hands over."""
    if isinstance(model_input, pd.DataFrame):
        model_input = model_input["audio" if "audio" in model_input else model_input.columns[0]].tolist()
        if 0 < len(model_input) < _FRAME and all(isinstance(item, int | float) for item in model_input):
            raise ValueError(
                "a list of arrays reaches the model without all but the first sample of each, since MLflow makes "
                "columns of samples: give one array, or a table with an array in each row of its column 'audio'"
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
    """A text as the bytes that it holds in base64, or as the path that it is; anything else as it is.

    No path is taken for base64: it is too short for a recording, has a dot or another sign that base64 has not, or is
    there.
    """
    if isinstance(item, np.ndarray) and item.ndim == 0:
        item = item.item()
    if not isinstance(item, str):
        return item
    text = item.partition(";base64,")[2] if item.startswith("data:") else item
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if len(data) >= _HEADER and not (len(item) < _PATH and Path(item).exists()):
        return data
    if _SERVER in sys.modules:
        raise ValueError("a server takes audio, not paths: send the file's bytes in base64, or an array of samples")
    return item


def accepted(items: list[Any]) -> tuple[list[Any], list[str]]:
    """What may be recognized of some recordings, decoded, and for each of them why it is refused; empty if it is not.

    Raises:
        ValueError: All of them are refused.
    """
    good, refused = [], []
    for item in items:
        try:
            good.append(decoded(item))
            refused.append("")
        except ValueError as error:
            refused.append(str(error))
    if items and not good:
        raise ValueError(refused[0])
    return good, refused


class SpeechRecognizer(PythonModel):  # type: ignore[misc]
    """A bundle behind MLflow's generic interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the bundle that came with the model."""
        self.transcriber = Transcriber(Path(context.artifacts["bundle"]))

    # without a type hint on model_input: MLflow would take it for a schema, and warn that it knows no schema Any
    def predict(self, context, model_input, params=None) -> pd.DataFrame:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Recognize recordings.

        Args:
            context: Not used.
            model_input: See the module.
            params: `sample_rate` of arrays in Hz; 0 is the model's own.
        """
        rate = int((params or {}).get("sample_rate") or 0) or None
        items, refused = accepted(recordings(model_input))
        found = iter(self.transcriber.transcribe(items, rate))
        texts = [Transcript("", 0.0, 0.0, error=reason) if reason else next(found) for reason in refused]
        rows = [[getattr(text, name) for name in _COLUMNS] for text in texts]
        return pd.DataFrame(rows, columns=list(_COLUMNS))


mlflow.models.set_model(SpeechRecognizer())
