"""The steps of flows: Prefect tasks, MLflow, artifacts; a thin layer over training, speech and storage."""

from pathlib import Path

STAGES = (
    "prepare",
    "shard",
    "features",
    "align",
    "adapt",
    "realign",
    "restore",
    "train",
    "lm",
    "rescoring",
    "graph",
    "decode",
    "score",
    "register",
    "report",
)
"""The stages in order. `tasks/stages/<name>.py` declares the stage, in capitals: `tasks.stages.base.get_stage` returns
it. Here are only the names, since the command line needs them before the slow imports."""


def pyfunc_path() -> Path:
    """Path of the registered model's code; MLflow copies this file, so nothing imports it as a module."""
    return Path(__file__).with_name("tracking") / "pyfunc_model.py"
