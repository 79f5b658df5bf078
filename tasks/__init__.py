"""One step of a flow each: Prefect tasks, MLflow, artifacts; thin, over training, speech and storage."""

from pathlib import Path

STAGES = ("prepare", "shard", "features", "train", "decode", "score", "register", "report")
"""The stages in order; here, because the command line names them before it loads what they need."""


def pyfunc_path() -> Path:
    """The code file of the registered model; MLflow copies it, and must not import it from here."""
    return Path(__file__).with_name("tracking") / "pyfunc_model.py"
