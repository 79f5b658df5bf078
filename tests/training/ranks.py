"""Runs a program as the ranks of a node: real processes that rendezvous by a file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]


def device_of(rank: int) -> "torch.device":
    """A rank's device, for programs of `run_ranks`.

    One GPU per rank if `cuda` is among their words, the first one for all if `shared` is, too, else the CPU.
    """
    import torch

    from devices.choice import claim

    if "cuda" not in sys.argv[4:]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # wherever it runs
        return torch.device("cpu")
    claim(device := torch.device("cuda", 0 if "shared" in sys.argv[4:] else rank))
    return device


def run_ranks(program: str, ranks: int, folder: Path, *words: str) -> None:
    """Run a program once for each rank; it must print `fine` and end with status 0.

    Args:
        program: Python source; `sys.argv` holds its rank, the number of ranks, a folder, and `words`.
        ranks: How many.
        folder: For whatever the ranks share.
        words: Further arguments.
    """
    from forks import Forkable  # ranks import this module, too, and have no tests/ on their path

    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *([before] if before else [])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", Forkable(program), str(rank), str(ranks), str(folder), *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-3000:]
            assert out.strip() == "fine"
    finally:
        for process in processes:
            process.kill()
