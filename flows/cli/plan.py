"""`starling plan`: which method of distributed training suits a cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import JsonOption, SetOption, err, friendly, out, print_json
from flows.cli.configs import OptionalConfigArgument
from flows.cli.simulate import time_unit
from tasks.figures import percent

if TYPE_CHECKING:
    from flows.cli.step_time import Step
    from tasks.config.pipeline import PipelineConfig
    from training.simulation.planner import Plan


MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Time the configuration's model here, on its data if they are prepared.")
]
OverheadSOption = Annotated[
    float, typer.Option("--overhead-s", help="Seconds of communication per step that overlap with nothing.")
]
DataHoursOption = Annotated[
    float, typer.Option("--data-hours", help="Audio in the training set; 0: the measured data's, or 100.")
]
BatchSecondsOption = Annotated[
    float,
    typer.Option("--batch-seconds", min=0, help="Audio in one learner's batch; 0: the configuration's share, or 160."),
]
SlowOption = Annotated[
    list[float] | None, typer.Option("--slow", help="How many times slower a learner is. Repeatable.")
]
RestartSOption = Annotated[
    float, typer.Option("--restart-s", help="Seconds until training continues after a learner died.")
]
BorderMbOption = Annotated[
    float, typer.Option("--border-mb", min=0, help="Activations of a learner's batch between layers, for pipeline.")
]


@friendly
def plan(
    config: OptionalConfigArgument = None,
    overrides: SetOption = None,
    measure: MeasureOption = False,
    parameters: Annotated[int, typer.Option("--parameters", min=0, help="Weights of the model.")] = 0,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds of a forward and backward pass.")] = 0.0,
    overhead_s: OverheadSOption = 0.0,
    batch_seconds: BatchSecondsOption = 0.0,
    data_hours: DataHoursOption = 0.0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Learners of a machine.")] = 1,
    link_gbit: Annotated[float, typer.Option("--link-gbit", help="A machine's network link, Gbit/s.")] = 10.0,
    link_ms: Annotated[float, typer.Option("--link-ms", help="Its latency, milliseconds.")] = 0.05,
    local_gbit: Annotated[float, typer.Option("--local-gbit", help="Between GPUs of a machine, Gbit/s.")] = 200.0,
    slow: SlowOption = None,
    losses_per_day: Annotated[float, typer.Option("--losses-per-day", help="Learners that die per day.")] = 0.0,
    restart_s: RestartSOption = 60.0,
    layers: Annotated[int, typer.Option("--layers", min=0, help="Layers of the model, for pipeline.")] = 0,
    border_mb: BorderMbOption = 0.0,
    json_output: JsonOption = False,
) -> None:
    """Predict each method's epoch time, efficiency, network load and staleness on a cluster, and recommend one."""
    from tasks.config.pipeline import load_config
    from training.simulation.planner import PlanRequest
    from training.simulation.planner import plan as make_plan

    known = load_config(config, overrides or []) if config is not None else None
    if known is not None and not batch_seconds:
        batch_seconds = known.train.batch_seconds / known.train.learners
    batch_seconds = batch_seconds or 160.0
    measured = _measure(known, batch_seconds) if measure else None
    if measured:
        parameters, step_s = measured.parameters, measured.seconds
        layers, border_mb = layers or measured.layers, border_mb or measured.border_mb
    if not parameters or step_s <= 0:
        raise ValueError("give the model by --parameters and --step-s, or a configuration and --measure")
    request = PlanRequest(
        parameters=parameters,
        step_s=step_s,
        overhead_s=overhead_s,
        data_hours=data_hours or (measured and measured.data_hours) or 100.0,
        batch_seconds=batch_seconds,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        link_gbit=link_gbit,
        link_ms=link_ms,
        local_gbit=local_gbit,
        slow=tuple(slow or ()),
        losses_per_day=losses_per_day,
        restart_s=restart_s,
        layers=layers,
        border_mb=border_mb,
    )
    planned = make_plan(request)
    if json_output:
        on = {"measured_on": measured.data} if measured else {}
        print_json({"request": request.model_dump(mode="json")} | on | planned.to_dict())
        return
    _show(planned)


def _measure(config: "PipelineConfig | None", batch_seconds: float) -> "Step":
    import sys
    from contextlib import redirect_stdout

    from flows.cli.step_time import measure

    if config is None:
        raise ValueError("--measure needs a configuration: name the YAML file whose model is measured")
    with redirect_stdout(sys.stderr):
        step = measure(config, batch_seconds)
    text = f"[dim]{step.parameters:,} weights; {step.seconds:.3f} s a step here, on {step.data}[/dim]"
    err.print(text, highlight=False)
    return step


def _show(planned: "Plan") -> None:
    from rich.table import Table

    unit, seconds = time_unit([prediction.epoch_s for prediction in planned.predictions])
    table = Table(caption="predicted, the quickest first; GB that the busiest machine sends in an epoch")
    for name in ("strategy", f"epoch {unit}", "speed-up", "efficient", "GB/NIC", "stale"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for prediction in planned.predictions:
        mark = "[bold]" if prediction.strategy == planned.choice else ""
        table.add_row(
            mark + prediction.strategy,
            f"{prediction.epoch_s / seconds:,.1f}",
            f"{prediction.speedup:.2f}",
            percent(prediction.efficiency, 0),
            f"{prediction.nic_gb:,.1f}",
            f"{prediction.staleness:.1f}",
        )
    out.print(table)
    for name, why in planned.left_out.items():
        out.print(f"[dim]without {name}: {why}[/dim]", highlight=False)
    out.print(f"take [bold]{planned.choice}[/bold]: {planned.reason}", highlight=False)
