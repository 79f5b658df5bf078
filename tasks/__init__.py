"""The steps of flows: Prefect tasks, MLflow, artifacts; a thin layer over training, speech and storage."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.config.pipeline import PipelineConfig


def _always(config: "PipelineConfig") -> bool:
    return True


CONDITIONS: "dict[str, Callable[[PipelineConfig], bool]]" = {
    "prepare": _always,
    "shard": _always,
    "features": _always,
    "align": lambda config: config.align is not None,
    "adapt": lambda config: config.features.adapted and config.system.is_trained,
    "realign": lambda config: config.realign is not None and config.system.is_trained,
    "restore": lambda config: config.restore is not None and config.system.is_trained,
    "train": lambda config: config.system.is_trained,
    "lm": lambda config: config.lm is not None,
    "rescoring": lambda config: config.rescoring is not None,
    "graph": lambda config: config.decoder.makes_graph,
    "decode": _always,
    "score": _always,
    "register": _always,
    "report": _always,
}
"""The stages in order, and whether the pipeline of a configuration has each. `tasks/stages/<name>.py` declares the
stage, in capitals: `tasks.stages.base.get_stage` returns it. What is needed before the slow imports of these files
(torch, MLflow, Prefect) is here."""
STAGES = tuple(CONDITIONS)
"""Their names."""


def pyfunc_path() -> Path:
    """Path of the registered model's code; MLflow copies this file, so nothing imports it as a module."""
    return Path(__file__).with_name("tracking") / "pyfunc_model.py"
