"""The steps of flows: Prefect tasks, MLflow, artifacts; a thin layer over training, speech and storage."""

from pathlib import Path

STAGES = (
    "prepare", "shard", "features", "align", "adapt", "realign", "train", "lm", "rescoring", "graph", "decode",
    "score", "register", "report",
)  # fmt: skip
"""The stages in order; defined here because the command line needs them before the slow imports."""
OPTIONAL = ("align", "adapt", "realign", "lm", "rescoring", "graph")
"""Stages that run only if the configuration needs them: it has a section of their name, features that are adapted to
speakers, or a graph that has to be made."""


def pyfunc_path() -> Path:
    """Path of the registered model's code; MLflow copies this file, so nothing imports it as a module."""
    return Path(__file__).with_name("tracking") / "pyfunc_model.py"
