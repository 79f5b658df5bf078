"""`starling plan`: which method of distributed training a cluster wants."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import JsonOption, SetOption, err, friendly, out, print_json

if TYPE_CHECKING:
    from training.simulation.planner import Plan

_MEASURED = 5
"""Steps that are timed, after one that is not."""


@friendly
def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML configuration: the model, for --measure.")] = None,
    overrides: SetOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Take size and step time of the configuration's model on this machine.")
    ] = False,
    parameters: Annotated[int, typer.Option("--parameters", min=0, help="Weights of the model.")] = 0,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds of a forward and backward pass.")] = 0.0,
    overhead_s: Annotated[
        float, typer.Option("--overhead-s", help="Seconds a step of communication that nothing hides.")
    ] = 0.0,
    batch_seconds: Annotated[float, typer.Option("--batch-seconds", help="Audio in one learner's batch.")] = 160.0,
    data_hours: Annotated[float, typer.Option("--data-hours", help="Audio in the training set.")] = 100.0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Learners of a machine.")] = 1,
    link_gbit: Annotated[float, typer.Option("--link-gbit", help="A machine's network link, Gbit/s.")] = 10.0,
    link_ms: Annotated[float, typer.Option("--link-ms", help="Its latency, milliseconds.")] = 0.05,
    local_gbit: Annotated[float, typer.Option("--local-gbit", help="Between GPUs of a machine, Gbit/s.")] = 200.0,
    slow: Annotated[
        list[float] | None, typer.Option("--slow", help="A learner is so many times slower. Repeatable.")
    ] = None,
    losses_per_day: Annotated[float, typer.Option("--losses-per-day", help="Learners that die in a day.")] = 0.0,
    json_output: JsonOption = False,
) -> None:
    """Predict each method's epoch time, efficiency, network load and staleness on a cluster, and recommend one."""
    from training.simulation.planner import PlanRequest
    from training.simulation.planner import plan as make_plan

    if measure:
        if config is None:
            raise ValueError("--measure needs a configuration: whose model is it to measure?")
        parameters, step_s = _measure(config, overrides or [], batch_seconds)
        err.print(f"[dim]{parameters:,} weights; {step_s:.3f} s a step of {batch_seconds:g} s of audio here[/dim]")
    if not parameters or step_s <= 0:
        raise ValueError("give the model by --parameters and --step-s, or a configuration and --measure")
    request = PlanRequest(
        parameters=parameters,
        step_s=step_s,
        overhead_s=overhead_s,
        data_hours=data_hours,
        batch_seconds=batch_seconds,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        link_gbit=link_gbit,
        link_ms=link_ms,
        local_gbit=local_gbit,
        slow=tuple(slow or ()),
        losses_per_day=losses_per_day,
    )
    found = make_plan(request)
    if json_output:
        print_json({"request": request.model_dump(mode="json")} | found.to_dict())
        return
    _show(found)


def _measure(config_path: Path, overrides: list[str], batch_seconds: float) -> tuple[int, float]:
    """Weights of a configuration's model, and seconds of its forward and backward pass on this machine.

    The input is noise of the right shape, in utterances of at most ten seconds; a vocabulary of a few hundred tokens
    is assumed, whose share of the time is small.
    """
    import torch
    from torch.nn import functional as F

    from speech.features import build_features
    from speech.models import build_model
    from tasks.config import load_config
    from training.compute import pick_device, use_threads

    config = load_config(config_path, overrides)
    device = pick_device(config.train.device)
    use_threads(config.train.threads)
    dim = int(build_features(config.features, config.data.sample_rate).dim) * config.features.frame_factor
    torch.manual_seed(0)
    model = build_model(config.model, dim, 256).to(device)
    each = min(10.0, batch_seconds)
    count = max(1, round(batch_seconds / each))
    feats = torch.randn(count, int(100 * each), dim, device=device)
    lengths = torch.full((count,), feats.shape[1], device=device)
    tokens = torch.randint(1, 256, (count, max(1, int(each))), device=device)
    seconds = []
    for _ in range(1 + _MEASURED):
        began = time.perf_counter()
        log_probs, frames = model(feats, lengths)
        loss = F.ctc_loss(log_probs.transpose(0, 1), tokens, frames, torch.full_like(lengths, tokens.shape[1]))
        loss.backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return model.num_parameters(), sorted(seconds[1:])[_MEASURED // 2]


def _show(found: "Plan") -> None:
    from rich.table import Table

    table = Table(title="Predicted, the quickest first")
    for name in ("strategy", "epoch", "speed-up", "efficiency", "GB per NIC and epoch", "staleness"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for one in found.predictions:
        mark = "[bold]" if one.strategy == found.choice else ""
        table.add_row(
            mark + one.strategy,
            f"{one.epoch_s / 60:,.1f} min",
            f"{one.speedup:.2f}",
            f"{one.efficiency:.0%}",
            f"{one.nic_gb:,.1f}",
            f"{one.staleness:.1f}",
        )
    out.print(table)
    out.print(f"take [bold]{found.choice}[/bold]: {found.reason}", highlight=False)
