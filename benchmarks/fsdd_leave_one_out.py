"""Leave-one-speaker-out evaluation on FSDD: how well digit recognition generalizes to unseen voices.

    python -m benchmarks.fsdd_leave_one_out [--config configs/fsdd_align.yaml] [--set FIELD=VALUE …]

Needs STARLING_SHARED_DATA. Prints a table and JSON; every run is cached, so an interrupted evaluation continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.pipelines import ROOT, run_pipeline

CONFIGS = ROOT / "configs"
SPEAKERS = ("george", "jackson", "lucas", "nicolas")


def run_without(config: Path, speaker: str, settings: list[str]) -> dict[str, Any]:
    """Train on the training sets of the other speakers, test on all recordings of this speaker."""
    changes = {
        "name": f"starling-{config.stem.replace('_', '-')}-without-{speaker}",
        "data.sources.0.exclude_speakers": f"[{speaker}]",
        "data.sources.1.speakers": f"[{speaker}]",
        "data.sources.1.where": "{}",
    }
    return run_pipeline(config, [f"{field}={value}" for field, value in changes.items()] + settings)


def main() -> None:
    """Run all four and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGS / "fsdd.yaml", help="the configuration to change")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="further changes")
    args = parser.parse_args()
    rows = []
    for speaker in SPEAKERS:
        summary = run_without(args.config, speaker, args.set)
        seconds = sum(stage["seconds"] for stage in summary["stages"] if stage["name"] in ("align", "train"))
        rows.append({"speaker": speaker, "train_s": seconds, **summary["sets"]["test"]})
        print(f"{speaker:10} WER {100 * rows[-1]['wer']:6.2f} %  ({rows[-1]['utterances']} utterances)", flush=True)
    print(f"{'mean':10} WER {100 * sum(row['wer'] for row in rows) / len(rows):6.2f} %")
    print(json.dumps({"benchmark": "fsdd leave one speaker out", "config": args.config.name, "rows": rows}))


if __name__ == "__main__":
    main()
