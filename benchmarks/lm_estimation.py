"""Estimation of n-gram models: ours against KenLM's lmplz, on the same text.

    LMPLZ=/path/to/lmplz python -m benchmarks.lm_estimation --text books-1.txt.bz2,books-2.txt.bz2 --dev dev-clean-5

Prints seconds, CPU seconds and peak memory of each step that starts a process of its own, the numbers of n-grams, and
perplexities on the transcripts under `--dev` (LibriSpeech's layout). Ours reads the compressed text, normalizes it and
writes the ARPA file; lmplz reads plain text that is normalized already. Memory is the sum of the proportional set sizes
(PSS) of a tool and its children, which counts a file that several processes map once; lmplz gets the memory that ours
took at most, but at least 2 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from speech.lm import NgramConfig, Sources, Text, TextConfig, entropy_pruned, estimate, read_arpa
from speech.text import TextNormalizer


@dataclass
class Cost:
    """What a command took."""

    seconds: float
    cpu_s: float
    peak_mb: float
    output: str


def measured(command: list[str]) -> Cost:
    """Runs a command and watches its memory twice a second; raises if it fails."""
    started, before = time.perf_counter(), os.times()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        peak = [0.0]
        watcher = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
        watcher.start()
        output = process.communicate()[0].decode()
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[0]} failed: {errors.read().decode()[-2000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(time.perf_counter() - started, cpu, peak[0] / 1e6, output)


def _watch(pid: int, peak: list[float]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            peak[0] = max(peak[0], total)
            time.sleep(0.5)


def ours(args: argparse.Namespace) -> None:
    """The child process that estimates."""
    cfg = NgramConfig(order=args.order, cutoffs=args.cutoffs, text=TextConfig(paths=args.text))
    print(json.dumps(estimate(Sources(protected=transcripts(args.dev)), cfg, args.folder, args.workers)))


def transcripts(folder: Path) -> list[str]:
    """Normalized transcripts of a folder in LibriSpeech's layout."""
    normalizer = TextNormalizer()
    lines = [line for path in sorted(folder.rglob("*.trans.txt")) for line in path.read_text().splitlines()]
    return [normalizer(line.partition(" ")[2]) for line in lines]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each tool."""
    rows = []
    again = [sys.executable, "-m", "benchmarks.lm_estimation", "--child", *sys.argv[1:], "--folder", str(args.folder)]
    cost = measured(again)
    record = json.loads(cost.output)
    rows.append(row("starling", cost, args.folder / "lm.arpa", args) | {"text": record["text"]})
    if tool := os.environ.get("LMPLZ") or shutil.which("lmplz"):
        plain, arpa = args.folder / "plain.txt", args.folder / "lmplz.arpa"
        text = Text(TextConfig(paths=args.text), protect=transcripts(args.dev), workers=args.workers)
        with plain.open("w") as file:
            for block in text.blocks():
                file.writelines(f"{line}\n" for line in block.lines)
        memory = f"{max(2000, int(cost.peak_mb))}M"
        command = [tool, "-o", str(args.order), "-S", memory, "-T", f"{args.folder}/", "--text", str(plain)]
        command += ["--arpa", str(arpa), *(["--prune", *map(str, args.cutoffs)] if args.cutoffs else [])]
        rows.append(row("lmplz", measured(command), arpa, args))
    return rows


def row(name: str, cost: Cost, arpa: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Costs, sizes and perplexities of one model."""
    model = read_arpa(arpa)
    dev = [line.split() for line in transcripts(args.dev)]
    figures = {"tool": name, "seconds": round(cost.seconds), "cpu_s": round(cost.cpu_s), "peak_mb": round(cost.peak_mb)}
    figures |= {"ngrams": model.tables.counts, "arpa_mb": round(arpa.stat().st_size / 1e6)}
    total = model.evaluate(dev)
    figures |= {"perplexity": round(total.without_unknown, 2), "with_unknown": round(total.with_unknown, 2)}
    figures["unknown"] = round(100 * total.unknown_rate, 2)
    for threshold in args.prune if name == "starling" else ():
        started = time.process_time()
        pruned = entropy_pruned(model, threshold)
        figures[f"pruned at {threshold:g}"] = {
            "ngrams": pruned.tables.counts,
            "perplexity": round(pruned.evaluate(dev).without_unknown, 2),
            "cpu_s": round(time.process_time() - started),
        }
    print(json.dumps(figures), flush=True)
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=lambda value: tuple(value.split(",")), help="files, with commas")
    parser.add_argument("--dev", required=True, type=Path, help="folder of transcripts; kept out of the text")
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--cutoffs", type=lambda value: tuple(map(int, value.split(","))), default=())
    parser.add_argument("--prune", type=lambda value: tuple(map(float, value.split(","))), default=())
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        ours(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(args.folder or folder)
        rows = compare(args)
    print("| tool | seconds | CPU s | peak MB | n-grams | ARPA MB | perplexity | with unknown words | unknown % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = " + ".join(f"{count / 1e6:.2f} M" for count in row["ngrams"])
        cells = [row["tool"], row["seconds"], row["cpu_s"], row["peak_mb"], sizes, row["arpa_mb"]]
        cells += [row["perplexity"], row["with_unknown"], row["unknown"]]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
