"""Provenance of a result: code version, machine, library versions."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mlflow.utils.mlflow_tags import (
    MLFLOW_GIT_COMMIT,
    MLFLOW_GIT_DIRTY,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)

if TYPE_CHECKING:
    from tasks.stages.base import Run

_CHANGED, _UNKNOWN = "+", "unknown"


@cache
def provenance() -> dict[str, str]:
    """Version, git commit (with `+` if files are changed), Python, torch, operating system and device."""
    return {
        "version": metadata.version("starling"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
    }


def run_tags(run: "Run") -> dict[str, str]:
    """Tags of an MLflow run: the pipeline's run, its objects, its flow run, and the provenance.

    Args:
        run: The pipeline's run.
    """
    about = provenance()
    tags = {"starling.run": run.run_id, "starling.objects": run.store.url}
    tags |= {f"starling.{name}": str(value) for name, value in about.items()}
    tags |= {MLFLOW_SOURCE_NAME: f"starling {about['version']}", MLFLOW_SOURCE_TYPE: "LOCAL"}
    if about["commit"] != _UNKNOWN:
        tags[MLFLOW_GIT_COMMIT] = about["commit"].removesuffix(_CHANGED)
        tags[MLFLOW_GIT_DIRTY] = str(about["commit"].endswith(_CHANGED))
    if run.flow_run_url:
        tags["prefect.flow_run"] = run.flow_run_url
    return tags


def version_tags(run: "Run") -> dict[str, str]:
    """The tags of `run_tags` that also describe a registered version; MLflow shows a version's source by itself.

    Args:
        run: The pipeline's run.
    """
    return {name: value for name, value in run_tags(run).items() if not name.startswith("mlflow.")}


def _commit() -> str:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return _UNKNOWN
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + (_CHANGED if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
