"""Results of the experiments as rows and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

from benchmarks import experiment_plans as plans
from benchmarks.experiment_runs import Record, Results, Run
from training.strategies.gossip import Newcomer

Row = dict[str, Any]
WORDS = 360
"""Number of words in the held-out recordings, one in each."""
_EXCHANGE_BYTES = 2 * 4 * 103_139
"""Bytes of an exchange: the model once in each direction."""
HEADINGS = {
    "lr": "learning rate",
    "loss": "loss, nats a word",
    "wer": "WER, % (95 % interval)",
    "seconds": "virtual time, s",
    "target_s": f"to {plans.TARGET:g} nats, s",
    "megabytes": "MB a step",
    "consensus": "consensus distance, 10⁻³",
    "staleness": "staleness, steps",
    "join": "learners that join",
    "takes": "they take",
    "after": "loss in the epoch after",
    "errors": "WER, %",
    "frame_loss": "loss, nats a frame",
    "right": "frames right, %",
}


def interval(wer: float, words: int = WORDS) -> tuple[float, float]:
    """95 % confidence interval of a word error rate with independent errors (Wilson)."""
    square = 1.96**2
    middle = (wer + square / (2 * words)) / (1 + square / words)
    half = 1.96 / (1 + square / words) * (wer * (1 - wer) / words + square / (4 * words**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def sweep_rows(results: Results, name: str = "headline") -> list[Row]:
    """The best learning rate of each method at each batch size tried."""
    sweep, rows = plans.SWEEPS[name], []
    for batch in sweep.batches:
        for choice in sweep.choices:
            runs = sweep.runs(batch, choice)
            tried = [run for run in runs if results.get(run) is not None]
            if not tried:
                continue
            top = plans.best(runs, results)
            rows.append(
                {
                    "method": tried[0].method,
                    "batch": batch,
                    "lr": top["run"]["lr"] if top else None,
                    "loss": top["loss"] if top else None,
                    "wer": top["wer"] if top else None,
                    "frame_accuracy": top.get("frame_accuracy") if top else None,
                    "staleness": top["staleness"] if top else None,
                    "consensus": top["consensus"] if top else None,
                    "converged": plans.converged(top),
                    "rates": len(tried),
                }
            )
    return rows


def largest_batches(results: Results, name: str = "headline") -> dict[str, int | None]:
    """The largest batch size at which each method converged, whether or not it converged at all smaller ones."""
    largest: dict[str, int | None] = {}
    for row in sweep_rows(results, name):
        largest.setdefault(row["method"], None)
        if row["converged"]:
            largest[row["method"]] = row["batch"]
    return largest


def strategy_rows(results: Results) -> list[Row]:
    """Each method at its best learning rate, with equal learners and with a slow one."""
    rows = []
    for choice in plans.STRATEGIES:
        runs = plans.strategies(choice)
        top = plans.best(runs, results)
        if top is None:
            continue
        run = next(run for run in runs if results.get(run) is top)
        for slow in (1.0, plans.SLOW):
            record = results.get(replace(run, slow=slow))
            if record is not None:
                rows.append(_strategy_row(replace(run, slow=slow), record))
    return rows


def _strategy_row(run: Run, record: Record) -> Row:
    return {
        "method": run.method,
        "condition": "equal" if run.slow == 1.0 else f"one {run.slow:g}x slower",
        "lr": run.lr,
        "loss": record["loss"],
        "wer": record["wer"],
        "seconds": record.get("seconds"),
        "target_s": plans.time_to(record, plans.TARGET),
        "staleness": record.get("staleness"),
        "megabytes": record["bytes"] / 1e6 if "bytes" in record else None,
    }


def ring_rows(results: Results) -> list[Row]:
    """All ring topologies by number of learners."""
    rows = []
    for run in [*plans.rings(), *plans.rings(seed=2)]:
        record = results.get(run)
        if record is not None:
            row = {"method": run.method, "learners": run.learners, "seed": run.seed}
            rows.append({**row, **{name: record.get(name) for name in ("consensus", "loss", "wer", "staleness")}})
    return rows


def link_rows(results: Results) -> list[Row]:
    """ADPSGD with more exchanges per step and faster links: figures of all seeds."""
    rows, runs = [], plans.links()
    for first in (run for run in runs if run.seed == plans.LINK_SEEDS[0]):
        records = [record for run in runs if replace(run, seed=first.seed) == first and (record := results.get(run))]
        if records:
            row: Row = {"method": first.method, "link, Gbit/s": f"{first.link:g}"}
            row["exchanges a step"] = _each((record["bytes"] / _EXCHANGE_BYTES for record in records), 2)
            rows.append(
                {**row, **{name: _each((record[name] for record in records), 2) for name in ("staleness", "loss")}}
            )
    return rows


def momenta_rows(results: Results) -> list[Row]:
    """BMUF with momentum within blocks, too."""
    return _rows(plans.momenta(), results, "method", "batch", "lr")


def plain_rows(results: Results) -> list[Row]:
    """A large batch without momentum."""
    return _rows(plans.plain(), results, "method", "lr")


def seed_rows(results: Results, name: str = "headline") -> list[Row]:
    """The best learning rates of a sweep's largest batches with all seeds: losses, and WER or frame accuracy."""
    sweep, rows = plans.SWEEPS[name], []
    words = ("wer", "loss", "errors")
    figure, of_loss, of_figure = words if sweep.data == "digits" else ("frame_accuracy", "frame_loss", "right")
    for batch in sweep.repeated:
        for choice in sweep.choices:
            finished = [
                (run, record) for run in plans.seeds(sweep, batch, choice, results) if (record := results.get(run))
            ]
            if not finished:
                continue
            run = finished[0][0]
            rates = " / ".join(
                "–" if record.get(figure) is None else f"{100 * record[figure]:.1f}" for _, record in finished
            )
            losses = " / ".join("–" if record["loss"] is None else _number(record["loss"]) for _, record in finished)
            rows.append({"batch": batch, "method": run.method, "lr": run.lr, of_loss: losses, of_figure: rates})
    return rows


def _rows(runs: Sequence[Run], results: Results, *names: str) -> list[Row]:
    """Selected settings of runs, with loss, WER and virtual time."""
    finished = [(run, record) for run in runs if (record := results.get(run)) is not None]
    return [
        {
            **{name: getattr(run, name) for name in names},
            **{name: record.get(name) for name in ("loss", "wer", "seconds")},
        }
        for run, record in finished
    ]


def recipe_rows(results: Results) -> list[Row]:
    """The loss of a single learner with each recipe at each batch size."""
    rows = []
    for batch in plans.RECIPE_BATCHES:
        for run in plans.recipes(batch):
            record = results.get(run)
            if record is not None:
                clip = f"clipped to {run.clip:g}" if run.clip else "not clipped"
                shared = {"batch": batch, "lr": run.lr, "loss": record["loss"], "wer": record["wer"]}
                rows.append({"recipe": f"{run.optimizer}, {clip}", **shared})
    return rows


def newcomer_rows(results: Results) -> list[Row]:
    """Learners that join late: loss and largest distance in the epoch after joining, and final loss, by seed."""
    rows = []
    for recipe in plans.NEWCOMER_RECIPES:
        for late, _ in plans.NEWCOMERS:
            for takes in get_args(Newcomer):
                runs = plans.newcomers(recipe, late, takes)
                finished = [(run, record) for run in runs if (record := results.get(run)) and record["curve"]]
                if not finished:
                    continue
                after = [_after(run, record) for run, record in finished]
                rows.append(
                    {
                        "optimizer": recipe[0],
                        "lr": recipe[1],
                        "join": f"{late} of {runs[0].learners}",
                        "takes": takes,
                        "consensus": _each(1000 * max(point[4] for point in looks) for looks in after),
                        "after": _each(sum(point[2] for point in looks) / len(looks) for looks in after),
                        "loss": _each(record["loss"] for _, record in finished),
                    }
                )
    return rows


def _after(run: Run, record: Record) -> list[list[float]]:
    """Points of the curve within an epoch after learners have joined."""
    curve = record["curve"]
    joined = next((point[1] for point in curve if point[0] >= run.join_s), run.epochs)
    return [point for point in curve if point[0] >= run.join_s and point[1] <= joined + 1]


def _each(values: Iterable[float], digits: int = 3) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def tables(results: Results) -> str:
    """All experiments, in Markdown."""
    parts = [
        *(_sweep_table(sweep_rows(results, name)) for name in plans.SWEEPS),
        *(_table(seed_rows(results, name)) for name in plans.SWEEPS),
        _table(plain_rows(results)),
        _table(link_rows(results)),
        _table(momenta_rows(results)),
        _table(strategy_rows(results)),
        _table(ring_rows(results)),
        _table(recipe_rows(results)),
        _table(newcomer_rows(results)),
    ]
    return "\n".join(part for part in parts if part)


def _sweep_table(rows: Sequence[Row]) -> str:
    """A row for each batch, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_batch: dict[int, Row] = {}
    for row in rows:
        cell = f"{_number(row['loss'])}, {_quality(row)} %, at {row['lr']:g}" if row["lr"] else "diverged"
        by_batch.setdefault(row["batch"], {})[row["method"]] = f"**{cell}**" if row["converged"] else cell
    return _markdown(
        ["total batch", *methods],
        [[str(batch), *(cells.get(method, "–") for method in methods)] for batch, cells in by_batch.items()],
    )


def _quality(row: Row) -> str:
    if row["wer"] is None:
        return f"frames right {100 * row['frame_accuracy']:.1f}"
    return f"WER {100 * row['wer']:.1f}"


def _table(rows: Sequence[Row]) -> str:
    names = list(rows[0]) if rows else []
    cells = [[_cell(name, row[name]) for name in names] for row in rows]
    return _markdown([HEADINGS.get(name, name) for name in names], cells)


def _markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    if not cells:
        return ""
    lines = [headings, ["---"] * len(headings), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "wer":
        if value > 1:  # more than 100 % because of insertions: no interval
            return f"{100 * value:.0f}"
        low, high = interval(value)
        return f"{100 * value:.1f} ({100 * low:.1f} – {100 * high:.1f})"
    if name == "consensus" and not isinstance(value, str):
        return f"{1000 * value:.2f}"
    return _number(value) if isinstance(value, float) and name != "lr" else str(value)


def _number(value: float) -> str:
    """Format with two decimals below 10, with none above."""
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"
