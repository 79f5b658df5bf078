"""Perplexity of an LSTM beside an n-gram of the same text and words, each made by the stage `lm`.

    python -m benchmarks.lm_networks --text books-1.txt.bz2 --lines 80000 [--config configs/mini_librispeech.yaml]

The first lines of the text are used, with the training transcripts of the configuration. Perplexities are those of its
validation transcripts, on which the network chooses its epoch. Stages that are complete are not repeated.
"""

import argparse
import bz2
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from flows.names import new_run_id
from tasks.config.pipeline import load_config
from tasks.stages.base import Run
from tasks.stages.lm import LM
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD


def models(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Sections `lm` by name."""
    size = {"vocabulary": args.vocabulary}
    return {
        f"{args.order}-gram": {"kind": "ngram", "order": args.order, **size},
        f"LSTM of {args.dim} cells": {"kind": "lstm", "dim": args.dim, "layers": args.layers, **size},
    }


def made(args: argparse.Namespace, text: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Make one language model; returns its figures."""
    training = [f"lm_train={json.dumps({'epochs': args.epochs})}"] if section["kind"] == "lstm" else []
    lm = json.dumps(section | {"text": [str(text)]})
    config = load_config(args.config, [*args.set, "decode={kind: greedy}", f"lm={lm}", "rescoring=null", *training])
    run = Run(config, new_run_id(config), "")
    for stage in (PREPARE, SHARD):
        stage.execute(run)
    started = time.perf_counter()
    result = LM.execute(run)
    about = result.record["lm"]
    return {
        "seconds": round(time.perf_counter() - started),
        "cached": result.cached,
        "words": about["words"],
        "sentences": about["text"]["kept"],
        "size": sum(about["ngrams"]) if "ngrams" in about else about["parameters"],
        "perplexity": round(about["perplexity"]["valid"]["perplexity_with_unknown"], 1),
        "without_unknown": round(about["perplexity"]["valid"]["perplexity_without_unknown"], 1),
        "unknown_rate": round(about["perplexity"]["valid"]["unknown_rate"], 4),
    }


def main() -> None:
    """Make the models and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/mini_librispeech.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in `starling run`")
    parser.add_argument("--text", type=Path, required=True, help="text with a sentence per line, compressed with bz2")
    parser.add_argument("--lines", type=int, default=80_000)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        with bz2.open(args.text, "rt") as file, text.open("w") as target:
            target.writelines(islice(file, args.lines))
        for name, section in models(args).items():
            print(json.dumps({"model": name} | made(args, text, section)), flush=True)


if __name__ == "__main__":
    main()
