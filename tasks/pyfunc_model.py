"""The registered model: MLflow runs this file when it loads the model (models from code: nothing is pickled).

Input is audio: paths, encoded files as bytes, or arrays of samples in ±1, one recording or many, bare, in a list, or in
the column `audio` of a table. Output is a table with one row a recording: `text`, `seconds`, `confidence`, `error`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from speech.transcriber import Transcriber

_FRAME = 200  # no recording has fewer samples than a frame of 25 ms at 8 kHz


def recordings(model_input: Any) -> list[Any]:
    """The recordings in whatever MLflow hands over."""
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
        return pd.DataFrame([asdict(t) for t in self.transcriber.transcribe(recordings(model_input), rate)])


mlflow.models.set_model(SpeechRecognizer())
