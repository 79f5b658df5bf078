"""The summary of `make test-gpu`: the machine, the tests that ran on it, and their measurements, as text to paste."""

import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NONE = "No GPU here that torch can use: nothing of this has run. `starling doctor` says why."


def machine() -> list[str]:
    """The GPUs, and the versions of driver, CUDA and torch."""
    import torch

    from devices.choice import inventory
    from devices.gpus import Gpus

    present = inventory()
    if not present.gpus:
        return [NONE, *([present.trouble] if present.trouble else [])]
    names = Counter(torch.cuda.get_device_name(number) for number in range(present.gpus))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return [
        "GPUs: " + ", ".join(f"{count} x {name}" for name, count in names.items()),
        f"driver {Gpus().driver().version}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}, Python {platform.python_version()}",
    ]


def commit() -> str:
    """The commit of the code, with a mark if it has been changed since."""
    try:
        words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def summary(stats: dict[str, list[Any]], facts: list[str], code: str) -> list[str]:
    """Lines of Markdown.

    Args:
        stats: Reports of tests by outcome, as pytest's terminal reporter has them.
        facts: Of `machine`.
        code: Of `commit`.
    """
    lines = ["", 'Paste this below `docs/gpu.md`, "What has run on a GPU":', "", f"### Commit {code}", ""]
    lines += [f"- {fact}" for fact in facts]
    outcomes = {"passed": "passed", "failed": "FAILED", "error": "ERROR", "skipped": "skipped"}
    counts = ", ".join(f"{len(stats[name])} {word}" for name, word in outcomes.items() if stats.get(name))
    lines += [f"- tests: {counts or 'none'}"]
    for name in ("failed", "error"):
        lines += [f"  - {outcomes[name]}: `{report.nodeid}`" for report in stats.get(name, [])]
    if skipped := Counter(_reason(report) for report in stats.get("skipped", [])):
        lines += [f"  - skipped, {reason}: {count}" for reason, count in skipped.items()]
    for report in stats.get("passed", []):
        lines += [f"- {value}" for name, value in report.user_properties if name == "measured"]
    return lines


def _reason(report: Any) -> str:
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(words).removeprefix("Skipped: ")
