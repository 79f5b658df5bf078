"""Word error rate by strategy: the same recipe trained by one, two and four learners, and by every strategy.

    python -m benchmarks.strategies [--json] [--config configs/fsdd.yaml] [--set FIELD=VALUE ...] [--setups single ...]
    python -m benchmarks.strategies --rivals         # other methods for comparison, two learners each

Every setup trains the same number of epochs with the same global batch and learning rate. Runs are cached in the data
folder, so an interrupted benchmark continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.pipelines import ROOT, run_pipeline
from training.strategies.registry import STRATEGIES

SETUPS = {
    "single": ("single", 1, 1),
    "scpsgd-2": ("scpsgd", 1, 2),
    "adpsgd-2": ("adpsgd", 2, 1),
    "adpsgd-4": ("adpsgd", 4, 1),
    "h-adpsgd-2x2": ("h-adpsgd", 2, 2),
}
RIVALS = {
    f"{name}-2": (name, 1, 2) if strategy.traits.one_node else (name, 2, 1)
    for name, strategy in STRATEGIES.items()
    if not strategy.traits.exchange
}
ALL = {**SETUPS, **RIVALS, "bmuf-4": ("bmuf", 1, 4)}


def run(config: Path, setup: str, overrides: list[str], options: list[str]) -> dict[str, Any]:
    """Train and score one setup; returns a row of the table.

    Args:
        config: YAML file.
        setup: Name of the setup.
        overrides: Assignments for all setups.
        options: Assignments to fields of strategies, such as `bmuf.tau=8`, each for its strategy only.
    """
    strategy, nodes, learners = ALL[setup]
    own = [f"train.strategy.{text.removeprefix(f'{strategy}.')}" for text in options if text.startswith(f"{strategy}.")]
    changes = [f"train.strategy={strategy}", *own, f"train.nodes={nodes}", f"train.learners_per_node={learners}"]
    changes += overrides
    summary = run_pipeline(config, changes)
    training = next(stage for stage in summary["stages"] if stage["name"] == "train")
    scores = summary["sets"]["test"]
    return {
        "setup": setup,
        "strategy": strategy,
        "learners": nodes * learners,
        "wer": scores["wer"],
        "wer_low": scores["wer_low"],
        "wer_high": scores["wer_high"],
        "utterances": scores["utterances"],
        "train_s": training["seconds"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "fsdd.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="FIELD=VALUE")
    parser.add_argument("--option", action="append", default=[], dest="options", metavar="STRATEGY.FIELD=VALUE")
    parser.add_argument("--setups", nargs="+", choices=ALL, default=list(SETUPS))
    parser.add_argument("--rivals", action="store_true", help="the other methods with two learners")
    args = parser.parse_args()
    rows = []
    for setup in RIVALS if args.rivals else args.setups:
        row = run(args.config, setup, args.overrides, args.options)
        rows.append(row)
        if not args.json:
            interval = f"{row['wer_low']:.2%}-{row['wer_high']:.2%}"
            print(f"{setup:14} WER {row['wer']:7.2%} ({interval})  trained in {row['train_s']:.0f} s", flush=True)
    if args.json:
        print(json.dumps({"benchmark": "strategies", "config": args.config.name, "rows": rows}))


if __name__ == "__main__":
    main()
