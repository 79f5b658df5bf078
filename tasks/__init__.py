"""One step of a flow each: Prefect tasks, MLflow, artifacts; thin, over training, speech and storage."""

from pathlib import Path


def pyfunc_path() -> Path:
    """The code file of the registered model; MLflow copies it, and must not import it from here."""
    return Path(__file__).with_name("pyfunc_model.py")
