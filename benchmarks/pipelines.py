"""Runs pipelines for benchmarks, each in a process of its own, as a user does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_pipeline(config: Path, settings: Sequence[str], until: str = "score") -> dict[str, Any]:
    """The summary of a pipeline.

    Args:
        config: Its configuration.
        settings: Changes to it, such as `train.epochs=3`.
        until: The last stage; "" for all.

    Raises:
        subprocess.CalledProcessError: It has failed.
    """
    command = [sys.executable, "-m", "flows.cli.app", "run", str(config), "--no-prefect", "--json"]
    command += ["--until", until] if until else []
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return summary
