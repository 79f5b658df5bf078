"""Leave-one-speaker-out evaluation on FSDD: how well digit recognition generalizes to unseen voices.

Needs STARLING_SHARED_DATA. Prints a table and JSON; every run is cached, so an interrupted evaluation continues.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "fsdd.yaml"
SPEAKERS = ("george", "jackson", "lucas", "nicolas")


def run_without(speaker: str) -> dict[str, Any]:
    """Train on the training sets of the other speakers, test on all recordings of this speaker."""
    changes = {
        "name": f"starling-fsdd-without-{speaker}",
        "data.sources.0.exclude_speakers": f"[{speaker}]",
        "data.sources.1.speakers": f"[{speaker}]",
        "data.sources.1.where": "{}",
    }
    command = [sys.executable, "-m", "flows.cli.app", "run", str(CONFIG), "--plain", "--until", "score", "--json"]
    for field, value in changes.items():
        command += ["--set", f"{field}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Run all four and print."""
    rows = []
    for speaker in SPEAKERS:
        summary = run_without(speaker)
        training = next(stage for stage in summary["stages"] if stage["name"] == "train")
        rows.append({"speaker": speaker, "train_s": training["seconds"], **summary["sets"]["test"]})
        print(f"{speaker:10} WER {100 * rows[-1]['wer']:6.2f} %  ({rows[-1]['utterances']} utterances)", flush=True)
    print(f"{'mean':10} WER {100 * sum(row['wer'] for row in rows) / len(rows):6.2f} %")
    print(json.dumps({"benchmark": "fsdd leave one speaker out", "rows": rows}))


if __name__ == "__main__":
    main()
