"""What each stage of a pipeline costs for an hour of audio, for docs/scale.md.

    python -m benchmarks.stage_costs [--config FILE] [--stages prepare shard …] [--set FIELD=VALUE …]

Runs a pipeline in a new data folder up to each of the stages in turn, and prints the CPU seconds that all its processes
have used beyond those of a run that does nothing, by hour of audio in its shards. These hardly depend on other work on
the machine.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.pipelines import ROOT, run_pipeline

STAGES = ("prepare", "shard", "features", "train", "decode")
REPEATS = 3
"""Runs that do nothing, of which the cheapest counts."""


def used(config: Path, settings: list[str], until: str) -> tuple[float, float]:
    """CPU seconds and seconds of a run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run_pipeline(config, settings, until)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - began


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "mini_librispeech.yaml")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES[:3]))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STARLING_HOME"] = folder
        for stage in args.stages:
            cpu, seconds = used(args.config, args.set, stage)
            idle = min(used(args.config, args.set, stage)[0] for _ in range(REPEATS))
            rows.append({"stage": stage, "cpu_s": cpu - idle, "seconds": seconds, "start_cpu_s": idle})
            print(f"{stage:10} {cpu - idle:8.1f} CPU seconds ({seconds:.0f} s; {idle:.1f} to start)", flush=True)
        hours = sum(_durations(Path(folder))) / 3600
    for row in rows:
        row["cpu_s_per_hour"] = row["cpu_s"] / hours
        print(f"{row['stage']:10} {row['cpu_s_per_hour']:8.2f} CPU seconds for an hour of audio, of {hours:.2f}")
    print(json.dumps({"benchmark": "cost of stages", "config": args.config.name, "hours": hours, "rows": rows}))


def _durations(folder: Path) -> list[float]:
    """Durations of all utterances in shards below a folder."""
    from storage.index import INDEX_NAME, ShardIndex
    from storage.objects import ObjectStore

    durations: list[float] = []
    for path in sorted(folder.rglob(f"shard/**/{INDEX_NAME}")):
        index = ShardIndex.read(ObjectStore(str(path.parent)))
        durations += index.values("duration").to_pylist()
    return durations


if __name__ == "__main__":
    main()
