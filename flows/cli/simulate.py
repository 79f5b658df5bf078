"""`starling simulate`: compare methods of distributed training on a virtual cluster, on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from flows.cli.common import JsonOption, SetOption, err, friendly, out, print_json
from flows.cli.configs import OptionalConfigArgument
from storage.disks import size_text
from tasks.config.yaml_text import parse_yaml
from tasks.figures import percent

if TYPE_CHECKING:
    from training.job import TrainJob
    from training.simulation import Cluster
    from training.simulation.problem import Problem
    from training.strategies.strategy import StrategyConfig

Row = dict[str, Any]


StrategyOption = Annotated[
    list[str] | None, typer.Option("--strategy", help="Method to simulate. Repeatable; all without it.")
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="STRATEGY.FIELD=VALUE", help="A method's constant, e.g. bmuf.tau=8."),
]
SlowOption = Annotated[
    list[str] | None, typer.Option("--slow", metavar="RANK=FACTOR", help="Learner RANK computes FACTOR x slower.")
]
LoseOption = Annotated[
    list[str] | None, typer.Option("--lose", metavar="RANK=SECONDS", help="Learner RANK dies at that virtual time.")
]
JoinOption = Annotated[
    list[str] | None, typer.Option("--join", metavar="RANK=SECONDS", help="Learner RANK joins at that virtual time.")
]
ParametersOption = Annotated[int, typer.Option("--parameters", min=1, help="With --timing: weights of the model.")]
BorderMbOption = Annotated[
    float, typer.Option("--border-mb", min=0, help="With --timing: activations of a learner's batch, for pipeline.")
]
JitterOption = Annotated[
    float,
    typer.Option("--jitter", help="Standard deviation of the logarithm of a step's time; 0: all take equally long."),
]


@friendly
def simulate(
    config: OptionalConfigArgument = None,
    overrides: SetOption = None,
    strategy: StrategyOption = None,
    learners: Annotated[list[int] | None, typer.Option("--learners", min=1, help="Learners. Repeatable.")] = None,
    option: OptionOption = None,
    slow: SlowOption = None,
    lose: LoseOption = None,
    join: JoinOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Seconds until a dead learner is detected.")] = 5.0,
    timing: Annotated[bool, typer.Option("--timing", help="Time and bytes only: no model, no data.")] = False,
    parameters: ParametersOption = 43_000_000,
    steps: Annotated[int, typer.Option("--steps", min=1, help="With --timing: steps of each learner.")] = 100,
    epochs: Annotated[int, typer.Option("--epochs", min=0, help="Epochs; 0 takes the configuration's.")] = 0,
    border_mb: BorderMbOption = 8.0,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds of a forward and backward pass.")] = 0.1,
    jitter: JitterOption = 0.0,
    per_machine: Annotated[int, typer.Option("--per-machine", min=1, help="Learners of a machine.")] = 1,
    link_gbit: Annotated[float, typer.Option("--link-gbit", help="A machine's network link, Gbit/s.")] = 10.0,
    link_ms: Annotated[float, typer.Option("--link-ms", help="Its latency, milliseconds.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Seed of jitter and random neighbours.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Simulate methods of distributed training on a virtual clock: the same programs, without the machines."""
    if config is None and not timing:
        raise ValueError("give a configuration to train, or --timing to simulate time and bytes without a model")
    fields: dict[str, Any] = {
        "step_s": step_s,
        "jitter": jitter,
        "slow": _by_rank("--slow", slow, "RANK=FACTOR, such as 3=10"),
        "link_gbit": link_gbit,
        "link_ms": link_ms,
        "timeout_s": timeout_s,
    }
    for name, option_name, texts in (("losses", "--lose", lose), ("joins", "--join", join)):
        times = _by_rank(option_name, texts, "RANK=SECONDS, such as 3=60")
        fields[name] = [{"rank": rank, "at_s": seconds} for rank, seconds in times.items()]
    clusters = [_cluster(count, min(per_machine, count), fields) for count in learners or [4]]
    constants = _all_constants(strategy, option or [])
    job = None if timing or config is None else training_job(config, overrides or [])

    def problem(count: int) -> "Problem":
        return _problem(job, count, epochs, steps, parameters, border_mb)

    rows, curves = _run(clusters, constants, problem, seed, optional=not strategy)
    if json_output:
        print_json({"rows": rows, "curves": curves})
        return
    _show(rows)


def _run(
    clusters: list["Cluster"],
    constants: dict[str, "StrategyConfig"],
    problem_for: Callable[[int], "Problem"],
    seed: int,
    *,
    optional: bool,
) -> tuple[list[Row], list[list[Row]]]:
    """Simulate every method on every cluster.

    Args:
        clusters: The clusters.
        constants: The methods' configurations by name.
        problem_for: Returns what a number of learners train.
        seed: Of jitter and random neighbours.
        optional: Whether a method that cannot train this model is left out, not refused.

    Returns:
        A row per simulation, and its curve.
    """
    from training.simulation import simulate as run
    from training.strategies.base import StrategyError
    from training.strategies.registry import METHODS

    rows: list[Row] = []
    curves: list[list[Row]] = []
    for cluster in clusters:
        for name, chosen in constants.items():
            problem = problem_for(cluster.learners)
            try:
                outcome = run(cluster, name, problem, chosen, seed=seed)
            except StrategyError as error:
                if name in METHODS or not optional:
                    raise
                err.print(f"{name} is left out: {error}", highlight=False)
                continue
            rows.append(outcome.row(_condition(cluster), problem.batches * cluster.step_s))
            curves.append(outcome.curve())
            err.print(f"[dim]{name}, {cluster.learners} learners: {rows[-1]['epoch_s']:,.1f} s an epoch[/dim]")
    return rows, curves


def _by_rank(option: str, texts: list[str] | None, form: str) -> dict[int, float]:
    by_rank: dict[int, float] = {}
    for text in texts or []:
        left, _, right = text.partition("=")
        try:
            rank, value = int(left), float(right)
        except ValueError:
            raise ValueError(f"{option} {text!r} is not {form}") from None
        if rank in by_rank:
            raise ValueError(f"{option} names learner {rank} twice: name it once")
        by_rank[rank] = value
    return by_rank


def _cluster(learners: int, per_machine: int, fields: dict[str, Any]) -> "Cluster":
    from training.simulation import Cluster

    return Cluster.model_validate({"learners": learners, "per_machine": per_machine} | fields)


def _all_constants(names: list[str] | None, texts: list[str]) -> dict[str, "StrategyConfig"]:
    """Configurations of these methods, or of all that a virtual cluster can run, by name."""
    from training.strategies.registry import STRATEGIES

    simulated = [name for name, method in STRATEGIES.items() if not method.traits.shared]
    return {name: _constants(name, texts) for name in names or simulated}


def _constants(name: str, texts: list[str]) -> "StrategyConfig":
    """A method's configuration from `name.field=value` options."""
    from pydantic import ValidationError

    from tasks.config.mistakes import explained
    from training.strategies.registry import find_strategy

    values: dict[str, Any] = {}
    for text in texts:
        field, _, value = text.partition("=")
        method, _, field = field.partition(".")
        find_strategy(method)
        if not field or not value:
            raise ValueError(f"--option {text!r} is not STRATEGY.FIELD=VALUE, such as bmuf.tau=8")
        if method != name:
            continue
        if field in values:
            raise ValueError(f"--option {text!r} is the second one of {method}.{field}: keep one of them")
        try:
            values[field] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--option {text!r}: {value!r} is no YAML value; quote it if it is text") from error
    config = find_strategy(name).config
    try:
        return config.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(f"--option {name}.{line}" for line in explained(error, config))) from error


def training_job(config_path: Path, overrides: list[str]) -> "TrainJob":
    """The training job of a configuration; what it reads is made first if it is not there.

    Args:
        config_path: YAML file.
        overrides: Assignments `FIELD=VALUE`.
    """
    import sys
    from contextlib import redirect_stdout

    from flows.cli.common import progress_bars
    from flows.names import new_run_id
    from storage.objects import ObjectStore
    from storage.stages import StageOutput
    from tasks.config.home import home
    from tasks.config.pipeline import load_config
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages.base import Run, get_stage, position, stages_of
    from tasks.stages.train import cut_segments, make_job
    from training.learner.compute import use_threads

    with redirect_stdout(sys.stderr), progress_bars():
        config = load_config(config_path, overrides)
        use_threads(config.train.threads)
        run = Run(config, new_run_id(config), "")
        run_plainly(run, stages=[name for name in stages_of(config) if position(name) < position("train")])
        output = StageOutput(ObjectStore(str(home() / "work")), "simulate", get_stage("train").output(run).key)
        cut_segments(run, output.store)
        return make_job(run, output)


def _problem(
    job: "TrainJob | None", learners: int, epochs: int, steps: int, parameters: int, border_mb: float
) -> "Problem":
    if job is None:
        from training.simulation import Timing

        return Timing(steps * learners, max(1, epochs), num_bytes=4.0 * parameters, border_bytes=1e6 * border_mb)
    from tasks.simulated_speech import Speech

    return Speech(job, learners, epochs)


def _condition(cluster: "Cluster") -> str:
    """What happens to the cluster: `slow 3=10, lost 2=30, joined 1=5`."""
    events = [("slow", rank, factor) for rank, factor in sorted(cluster.slow.items())]
    events += [("lost", loss.rank, loss.at_s) for loss in cluster.losses]
    events += [("joined", joining.rank, joining.at_s) for joining in cluster.joins]
    return ", ".join(f"{what} {rank}={value:g}" for what, rank, value in events) or "none"


def _show(rows: list[Row]) -> None:
    """Print a table that fits 80 columns: values that all rows share are below it, empty columns are left out."""
    from rich.table import Table

    same = {name: rows[0][name] for name in ("learners", "condition") if len({row[name] for row in rows}) == 1}
    bare = {name for name in ("loss", "wer", "consensus") if not any(row[name] for row in rows)}
    unit, seconds = time_unit([row["epoch_s"] for row in rows])
    caption = f"epoch in {unit} of virtual time, bytes sent by a learner a step"
    caption += f"; {same['learners']} learners" if "learners" in same else ""
    caption += f"; {same['condition']}" if same.get("condition", "none") != "none" else ""
    table = Table(caption=caption)
    shown = [name for name in CELLS if name not in same and name not in bare]
    for name in shown:
        title = f"epoch {unit}" if name == "epoch_s" else CELLS[name][0]
        left = name in ("strategy", "condition")
        table.add_column(title, justify="left" if left else "right", no_wrap=name != "condition")
    for row in rows:
        values = row | {"epoch_s": row["epoch_s"] / seconds}
        table.add_row(*("-" if values[name] is None else CELLS[name][1](values[name]) for name in shown))
    out.print(table)


def time_unit(seconds: list[float]) -> tuple[str, float]:
    """A unit in which all of some durations are readable, and its seconds."""
    least = min(seconds)
    if least < 0.1:
        return "ms", 1e-3
    if least < 120:
        return "s", 1.0
    return ("min", 60.0) if least < 7200 else ("h", 3600.0)


CELLS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("strategy", str),
    "learners": ("N", str),
    "condition": ("condition", str),
    "epoch_s": ("epoch", "{:,.1f}".format),
    "speedup": ("speed-up", "{:.2f}".format),
    "loss": ("loss", "{:.3f}".format),
    "wer": ("WER", lambda rate: percent(rate, 1)),
    "staleness": ("stale", "{:.2f}".format),
    "consensus": ("consensus", "{:.1e}".format),
    "bytes": ("sent", size_text),
}
"""Header and form of each field in the table for people."""
