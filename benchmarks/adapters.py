"""Bytes and time of a step of full fine-tuning and of adapters, over slow links: `python -m benchmarks.adapters`.

Four learners, each on a machine of its own behind a link of 100 Mbit/s (network namespaces; needs root), exchange what
is trained of a configuration's model: all weights, or adapters. Exchanges, all-reduces, leases and the coordinator are
real; forward and backward passes are waits of equal length, so that the difference is that of the exchange alone (see
`benchmarks.scaling`). Bytes are those that a machine has sent per step, headers included.

    python -m benchmarks.adapters configs/librispeech_100.yaml            # a table, about five minutes
    python -m benchmarks.adapters configs/librispeech_100.yaml --rank 16 --modules '*' --json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netns import why_not
from benchmarks.scaling_run import RunError, measure
from benchmarks.scaling_scenario import Scenario
from speech.models import build_model
from tasks.config.pipeline import load_config
from training.config import LoraConfig, TrainConfig
from training.learner.flat import FlatParameters
from training.learner.trained import trained_network

LEARNERS = 4
STRATEGIES = ("scpsgd", "adpsgd")


def exchanged(config: Path, outputs: int, lora: LoraConfig | None) -> int:
    """Number of weights that learners exchange.

    Args:
        config: Configuration of the model.
        outputs: Its tokens.
        lora: Adapters; None for all weights.
    """
    given = load_config(config)
    network = build_model(given.model, given.features.width, outputs)
    return FlatParameters(trained_network(network, TrainConfig(lora=lora), new=()).network).weights.numel()


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure full fine-tuning and adapters with each strategy.

    Raises:
        RunError: If a run failed.
    """
    lora = LoraConfig(rank=options.rank, modules=tuple(options.modules))
    sizes = {
        "full": exchanged(options.config, options.outputs, None),
        f"LoRA, rank {options.rank}": exchanged(options.config, options.outputs, lora),
    }
    results = []
    for strategy in STRATEGIES:
        for name, params in sizes.items():
            links: dict[str, Any] = {"rate": "100mbit", "seconds": options.seconds}
            scenario = Scenario(strategy, LEARNERS, name, params, options.step_s, **links)
            print(f"{strategy}, {name}: {params:,} weights", file=sys.stderr)
            measured = measure(scenario)
            results.append(
                {
                    "strategy": strategy,
                    "trained": name,
                    "weights": params,
                    "bytes_per_step": measured.bytes_per_step,
                    "step_s": 1 / statistics.median(measured.steps_per_s),
                    "exchanges_per_step": measured.exchanges_per_step,
                    "cpu_share": measured.cpu_share,
                }
            )
    return results


def table(results: Sequence[dict[str, Any]], step_s: float) -> str:
    """The measurements as Markdown."""
    lines = [
        f"Four learners at 100 Mbit/s; a gradient takes {1000 * step_s:.0f} ms.",
        "",
        "| strategy | trained | weights exchanged | kB sent a step | ms a step | exchanges a step |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in results:
        sent, took = row["bytes_per_step"] / 1000, 1000 * row["step_s"]
        often = f"{row['exchanges_per_step']:.2f}" if row["exchanges_per_step"] else "–"
        cells = [row["strategy"], row["trained"], f"{row['weights']:,}", f"{sent:,.0f}", f"{took:,.0f}", often]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table or JSON; returns 1 if this machine cannot emulate links."""
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="configuration of the model")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--modules", nargs="+", default=["*attention*"], help="patterns of the layers with adapters")
    parser.add_argument("--outputs", type=int, default=256, help="the model's tokens")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds per gradient")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(f"links cannot be emulated here: {reason}", file=sys.stderr)
        return 1
    try:
        results = rows(options)
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(results) if options.json else table(results, options.step_s))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
