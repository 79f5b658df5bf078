"""A new voice on FSDD: the champion of three speakers goes on with twenty recordings of the fourth.

    python -m benchmarks.fsdd_new_voice [--config configs/fsdd_whisper.yaml] [--speakers NAME …]

Needs STARLING_SHARED_DATA, and what the configuration needs. For each speaker, a pipeline on the training sets of the
other three registers a champion; a second one begins with that version (`train.init`) and trains on twenty
recordings of the new voice, two of each digit, and on a share of the old ones. Both are scored on the speaker's other
480 recordings, and on the official test recordings of the three known speakers. Prints both error rates of both models,
and JSON. Runs are cached: an interrupted benchmark continues.
"""

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.fsdd_leave_one_out import SPEAKERS
from benchmarks.pipelines import ROOT, run_pipeline
from tasks.config.home import home

CONFIG = ROOT / "configs" / "fsdd_whisper.yaml"
SETS = ("new", "known")
OF_EACH_DIGIT = 2
"""Recordings of the new voice that are trained on."""


def write_table(source: Path, target: Path, speaker: str) -> None:
    """Write the corpus' table with a column that says what each recording is for.

    `train` and `known` are the official parts of the known speakers; `few` and `new` are recordings of the new one.
    """
    few: dict[str, int] = {}
    with source.open(newline="") as lines, target.open("w", newline="") as written:
        table = csv.DictWriter(written, ("path", "text", "speaker", "use"))
        table.writeheader()
        for row in csv.DictReader(lines):
            use = "train" if row["part"] == "train" else "known"
            if row["speaker"] == speaker:
                few[row["text"]] = few.get(row["text"], 0) + 1
                use = "few" if few[row["text"]] <= OF_EACH_DIGIT else "new"
            path = str(source.parent / row["path"])
            table.writerow({"path": path, "text": row["text"], "speaker": row["speaker"], "use": use})


def run(
    options: argparse.Namespace, name: str, sources: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The summary of a pipeline on some sources, with further settings."""
    fields = {"name": name, "register.model": name, "data.sources": json.dumps(sources), "data.valid_share": 0.05}
    fields |= {"score": json.dumps({"sets": list(SETS)}), **(more or {})}
    fields |= dict(setting.split("=", 1) for setting in options.set)
    return run_pipeline(options.config, [f"{field}={value}" for field, value in fields.items()], until="")


def of_speaker(options: argparse.Namespace, speaker: str) -> dict[str, Any]:
    """Error rates of a speaker's champion, and of the model that goes on with its recordings."""
    folder = home() / "work" / "new-voice"
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{speaker}.csv"
    write_table(Path(os.environ["STARLING_SHARED_DATA"]) / "fsdd" / "metadata.csv", table, speaker)

    def source(use: str, **more: Any) -> dict[str, Any]:
        return {"kind": "table", "path": str(table), "corpus": "fsdd", "where": {"use": use}, **more}

    tests = [source(name, set=name) for name in SETS]
    name = f"new-voice-{options.config.stem.replace('_', '-')}-{speaker}"
    champion = run(options, name, [source("train"), *tests])
    mixed = [source("few", set="train"), source("train", share=options.share), *tests]
    begun = {"train.init": champion["model_uri"], "train.epochs": options.epochs, "data.valid_share": 0.1}
    further = run(options, name, mixed, begun)
    return {
        "speaker": speaker,
        **{f"champion_{which}": champion["sets"][which]["wer"] for which in SETS},
        **{f"further_{which}": further["sets"][which]["wer"] for which in SETS},
        "train_s": sum(stage["seconds"] for stage in further["stages"] if stage["name"] == "train"),
    }


def main() -> None:
    """Run all speakers and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="the configuration to change")
    parser.add_argument("--speakers", nargs="+", choices=SPEAKERS, default=SPEAKERS, help="the new voices")
    parser.add_argument("--share", type=float, default=0.1, help="share of the old recordings that is trained on again")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the further training")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changes to all runs")
    options = parser.parse_args()
    rows = [of_speaker(options, speaker) for speaker in options.speakers]
    print("new voice    champion: new, known     further: new, known")
    for row in rows:
        rates = [100 * row[f"{model}_{name}"] for model in ("champion", "further") for name in SETS]
        print("{:10}   {:8.2f} % {:8.2f} %   {:8.2f} % {:8.2f} %".format(row["speaker"], *rates))
    print(json.dumps({"benchmark": "new voice on FSDD", "config": options.config.name, "rows": rows}))


if __name__ == "__main__":
    main()
