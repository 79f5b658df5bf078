"""Display of `starling top`: totals of a training, a table of learners, one of machines, and the last events."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from configurable.wording import counted
from tasks.figures import clock
from tasks.tracking.training_lookup import WatchedTraining
from tasks.tracking.training_view import DEFICIT, training_line

_EVENT_LINES = 8
_DASH = "–"


def picture(watched: WatchedTraining) -> dict[str, Any]:
    """All figures of the display, as JSON."""
    shown = {"training": watched.name, **watched.view.to_dict(), "trouble": watched.trouble}
    coordinator = watched.coordinator
    if coordinator is None:
        return shown
    leases = {member["node"]: member for member in coordinator["members"]}
    for learner in shown["learners"]:
        member = leases.get(learner["node"], {})
        learner |= {name: member.get(name) for name in ("leases", "leased")}
    names = ("pool", "wanted", "view", "session", "finish", "failure", "checkpoint")
    return shown | {
        "coordinator": {name: coordinator.get(name) for name in names} | {"members": coordinator["members"]}
    }


def render(shown: dict[str, Any]) -> RenderableType:
    """Render the result of `picture` for a terminal."""
    parts: list[RenderableType] = [_headline(shown), Text(), _learners(shown)]
    if shown["systems"]:
        parts += [Text(), _machines(shown["systems"])]
    parts.append(Text())
    parts += [Text(f"{clock(event['elapsed'])}  {event['text']}", "dim") for event in shown["events"][-_EVENT_LINES:]]
    if shown["trouble"]:
        parts.append(Text(shown["trouble"], "yellow"))
    return Group(*parts)


def number(value: Any, form: str = ".2f", unit: str = "") -> str:
    """Format a number; a dash for None."""
    return _DASH if value is None else f"{value:{form}}{unit}"


def _headline(shown: dict[str, Any]) -> Text:
    nodes, coordinator = shown["nodes"], shown.get("coordinator", {})
    count = counted(len(shown["learners"]), "learner")
    if nodes is not None:
        wanted = coordinator.get("wanted") or 0
        lacking = f"{len(nodes)} of " if len(nodes) < wanted else ""
        count += f" on {lacking}{counted(max(len(nodes), wanted), 'node')}"
    words = [f"{number(shown['steps_per_s'])} steps/s", count, f"elapsed {clock(shown['elapsed'])}"]
    if "pool" in coordinator and not shown["ended"]:
        words.append(f"{coordinator['pool']} utterances unleased")
    return Text.assemble((shown["training"], "bold"), "\n", training_line(shown), "\n", ", ".join(words))


def _learners(shown: dict[str, Any]) -> Table:
    table = _table()
    leases = "coordinator" in shown
    columns = ["learner", "step", "steps/s", "loss", "stale", "exch.", "/step", "dist.", "failed"]
    # these fit into 80 columns; hosts are in the table of machines
    for name in columns + (["leases", "left"] if leases else []):
        table.add_column(name, justify="left" if name == "learner" else "right", no_wrap=True)
    for learner in shown["learners"]:
        row = [learner["learner"], str(learner["step"]), number(learner["steps_per_s"]), number(learner["loss"], ".3f")]
        row += [number(learner["staleness"], ".1f"), number(learner["exchange_s"], ".2f", " s")]
        a_step = learner.get("exchanges_per_step")
        row += [Text(number(a_step, ".1f"), "bold red" if a_step is not None and a_step < DEFICIT else "")]
        row += [number(learner["distance"], ".0e"), number(learner["failed"], "d")]
        row += [number(learner.get("leases"), "d"), number(learner.get("leased"), "d")] if leases else []
        table.add_row(*row)
    return table


def _table() -> Table:
    return Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _machines(systems: list[dict[str, Any]]) -> Table:
    table = _table()
    for name in ("node", "host", "CPU", "memory", "GPUs"):
        table.add_column(name, justify="left" if name in ("host", "GPUs") else "right")
    for system in systems:
        gpus = ", ".join(
            f"{gpu['gpu']:g}: {number(gpu.get('load'), '.0f')} %, {number(gpu.get('memory_mb'), '.0f')} MB"
            for gpu in system.get("gpus", [])
        )
        percent = (number(system.get(name), ".0f", " %") for name in ("cpu", "memory"))
        table.add_row(str(system["node"]), str(system.get("host", _DASH)), *percent, gpus or _DASH)
    return table
