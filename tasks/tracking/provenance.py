"""Provenance of a result: code version, machine, library versions."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


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


def _commit() -> str:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return "unknown"
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
