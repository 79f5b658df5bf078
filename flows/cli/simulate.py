"""`starling simulate`: methods of distributed training compared on a virtual cluster, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from flows.cli.common import JsonOption, SetOption, err, friendly, out, print_json

if TYPE_CHECKING:
    from training.job import TrainJob
    from training.simulation import Cluster
    from training.simulation.problem import Problem
    from training.strategies.config import StrategyConfig

Row = dict[str, Any]
COLUMNS = ("strategy", "learners", "condition", "epoch_s", "speedup", "loss", "wer", "staleness", "consensus", "bytes")


@friendly
def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="YAML configuration: what is trained. Not needed with --timing.")
    ] = None,
    overrides: SetOption = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help="Method to simulate. Repeatable; all without it.")
    ] = None,
    learners: Annotated[list[int] | None, typer.Option("--learners", min=1, help="Learners. Repeatable.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="STRATEGY.FIELD=VALUE", help="A method's constant, e.g. bmuf.tau=8."),
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option("--slow", metavar="RANK=FACTOR", help="Learner RANK computes FACTOR x slower.")
    ] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Time and bytes only: no model, no data.")] = False,
    parameters: Annotated[
        int, typer.Option("--parameters", min=1, help="With --timing: weights of the model.")
    ] = 43_000_000,
    steps: Annotated[int, typer.Option("--steps", min=1, help="With --timing: steps of each learner.")] = 100,
    epochs: Annotated[int, typer.Option("--epochs", min=0, help="Epochs; 0 takes the configuration's.")] = 0,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds of a forward and backward pass.")] = 0.1,
    jitter: Annotated[float, typer.Option("--jitter", help="Standard deviation of a step's log time.")] = 0.0,
    per_machine: Annotated[int, typer.Option("--per-machine", min=1, help="Learners of a machine.")] = 1,
    link_gbit: Annotated[float, typer.Option("--link-gbit", help="A machine's network link, Gbit/s.")] = 10.0,
    link_ms: Annotated[float, typer.Option("--link-ms", help="Its latency, milliseconds.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Of jitter and random neighbours.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Simulate methods of distributed training on a virtual clock: the same programs, without the machines."""
    from training.simulation import Cluster
    from training.strategies import METHODS

    if config is None and not timing:
        raise ValueError("give a configuration to train, or --timing to simulate time and bytes without a model")
    factors = _slow_downs(slow or [])
    names = strategy or [name for name, method in METHODS.items() if not method.shared]
    constants = {name: _constants(name, option or []) for name in names}
    job = None if timing or config is None else _job(config, overrides or [])
    rows: list[Row] = []
    for count in learners or [4]:
        cluster = Cluster(
            learners=count,
            per_machine=min(per_machine, count),
            step_s=step_s,
            jitter=jitter,
            slow=factors,
            link_gbit=link_gbit,
            link_ms=link_ms,
        )
        for name in names:
            problem = _problem(job, count, epochs, steps, parameters)
            rows.append(_row(cluster, name, problem, constants[name], seed))
            err.print(f"[dim]{name}, {count} learners: {rows[-1]['epoch_s']:.1f} s an epoch[/dim]")
    if json_output:
        print_json({"rows": rows})
        return
    _show(rows)


def _slow_downs(texts: list[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"--slow {text!r} is not RANK=FACTOR, such as 3=10") from None
    return found


def _constants(name: str, texts: list[str]) -> "StrategyConfig":
    """A method's configuration from `name.field=value` options."""
    from training.strategies import find_method

    values: dict[str, Any] = {}
    for text in texts:
        field, _, value = text.partition("=")
        method, _, field = field.partition(".")
        find_method(method)
        if not field or not value:
            raise ValueError(f"--option {text!r} is not STRATEGY.FIELD=VALUE, such as bmuf.tau=8")
        if method == name:
            values[field] = yaml.safe_load(value)
    return find_method(name).config.model_validate(values)


def _job(config_path: Path, overrides: list[str]) -> "TrainJob":
    """The training job of a configuration, whose shards and features are made if they are not there."""
    import sys
    from contextlib import redirect_stdout

    from flows.cli.common import progress_bars
    from flows.pipeline import new_run_id
    from tasks.config import load_config
    from tasks.orchestration import ALL, run_plainly
    from tasks.stage import Run
    from tasks.train import make_job
    from training.compute import use_threads

    with redirect_stdout(sys.stderr), progress_bars():
        config = load_config(config_path, overrides)
        use_threads(config.train.threads)
        run = Run(config, new_run_id(config), "")
        run_plainly(run, "features")
        return make_job(run, ALL["train"].output(run))


def _problem(job: "TrainJob | None", learners: int, epochs: int, steps: int, parameters: int) -> "Problem":
    if job is None:
        from training.simulation import Timing

        return Timing(batches=steps * learners, epochs=max(1, epochs), num_bytes=4.0 * parameters)
    from training.simulation.speech import Speech

    return Speech(job, learners, epochs)


def _row(cluster: "Cluster", name: str, problem: "Problem", constants: "StrategyConfig", seed: int) -> Row:
    from training.simulation import Simulation

    outcome = Simulation(cluster, name, problem, constants, seed=seed).run()
    condition = ", ".join(f"{rank}={factor:g}" for rank, factor in sorted(cluster.slow.items()))
    return outcome.row(f"slow {condition}" if condition else "none", problem.batches * cluster.step_s)


def _show(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(title="Simulated: an epoch in virtual seconds, bytes sent by a learner a step")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("strategy", "condition") else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in COLUMNS))
    out.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
