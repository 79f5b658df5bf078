"""What commands take that do little: CPU and wall time from the shell, of which most are imports.

    python -m benchmarks.starts [--count 5] [--only models] [--json]

Medians of new interpreters, one after another; the first start of each command, which may compile modules, is not
counted. CPU time, with that of child processes, can be compared on a busy machine, wall time cannot. Without a
registered model in the data folder (STARLING_HOME), a tiny one is trained first, which takes a minute.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.common import BenchmarkError
from tasks.config.home import home

_TINY = ("epochs=1", "strategy=single", "nodes=1", "average=1")
_FEW = "data.sources.0.synthesis={train: 60, valid: 6, test: 8}"
_COMMANDS = {
    "--version": "--version",
    "config check": "config check demo",
    "config show": "config show demo",
    "corpus inspect": "corpus inspect {corpus}",
    "corpus list": "corpus list",
    "score": "score {corpus}/0.txt {corpus}/0.txt",
    "models": "models",
    "runs": "runs",
    "transcribe, a file": "transcribe {corpus}/0.wav",
    "transcribe, a folder's model": "transcribe {corpus}/0.wav --model {bundle}",
    "simulate": "simulate",
    "training rank": "-m training.node.rank",
    "coordinator": "-m training.coordinator.server",
    "exchange": "-m training.exchange.daemon",
}
"""Arguments of `starling`, or of the interpreter for a module of its own: these start, and refuse to run."""


def main() -> None:
    """Print a table of all commands, or one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=5, help="starts of each command")
    parser.add_argument("--only", default="", help="only commands whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = {name: line for name, line in _COMMANDS.items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        corpus = _corpus(Path(folder))
        bundle = (
            _bundle() if any("transcribe" in line or line in ("models", "runs") for line in wanted.values()) else ""
        )
        rows = {}
        for name, line in wanted.items():
            words = [word.format(corpus=corpus, bundle=bundle) for word in line.split()]
            rows[name] = _measured(words if words[0] == "-m" else ["-m", "starling", *words], options.count)
            if not options.json:
                print(f"{name:30} {rows[name][0]:6.2f} s CPU {rows[name][1]:6.2f} s wall", flush=True)
    if options.json:
        print(json.dumps({name: {"cpu_s": cpu, "wall_s": wall} for name, (cpu, wall) in rows.items()}))


def _corpus(folder: Path) -> Path:
    """Ten recordings with transcripts."""
    tone = 0.1 * np.random.default_rng(1).standard_normal(16_000)
    for number in range(10):
        soundfile.write(folder / f"{number}.wav", tone, 16_000)
        folder.joinpath(f"{number}.txt").write_text("one two three\n", encoding="utf-8")
    return folder


def _bundle() -> str:
    """The folder of the demo's model; trained, and not well, if there is none."""
    if not (found := _found()):
        overrides = [f"train.{assignment}" for assignment in _TINY]
        overrides += [_FEW, "model.layers=1", "register.accept_untrained=true"]
        words = [word for assignment in overrides for word in ("--set", assignment)]
        _start(["-m", "starling", "run", "demo", "--no-prefect", *words])
        found = _found()
    return str(found[0])


def _found() -> list[Path]:
    return [path.parent for path in (home() / "mlflow" / "artifacts" / "starling-demo").rglob("bundle.json")]


def _measured(command: Sequence[str], count: int) -> tuple[float, float]:
    """Median CPU and wall seconds of starts after the first."""
    times = [_start(command) for _ in range(count + 1)][1:]
    return statistics.median(cpu for cpu, _ in times), statistics.median(wall for _, wall in times)


def _start(command: Sequence[str]) -> tuple[float, float]:
    """CPU and wall seconds of an interpreter with these arguments.

    Raises:
        BenchmarkError: A command failed.
    """
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        if process.returncode and command[1] == "starling":
            raise BenchmarkError(f"{' '.join(command)}: {log.read().decode()[-2000:]}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - begun


if __name__ == "__main__":
    main()
