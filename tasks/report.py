"""Stage 8, report: one self-contained HTML page a run, and what the Prefect UI shows of it."""

import base64
import tempfile
from pathlib import Path
from typing import Any

import jinja2

from speech.scoring import align, mark
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks import STAGES, progress
from tasks.home import home, shown_mlflow_uri
from tasks.model_card import compute_text
from tasks.plots import learning_curves
from tasks.provenance import provenance
from tasks.score import GROUPS
from tasks.speakers import overlap_warnings
from tasks.stage import Inputs, Run, Stage
from training.journal import read_journal

_WORST = 12
"""Utterances that are shown with their errors."""


def percent(rate: float | None) -> str:
    """A rate as text."""
    return "–" if rate is None else f"{100 * rate:.2f} %"


def strategy_text(run: Run) -> str:
    """How the learners of a run work together, in one line."""
    cfg = run.config.train
    if cfg.traits.one_node and cfg.traits.one_learner:
        return cfg.strategy
    nodes = "1 node" if cfg.nodes == 1 else f"{cfg.nodes} nodes"
    return f"{cfg.strategy}, {nodes} of {cfg.learners_per_node} learner{'s' if cfg.learners_per_node > 1 else ''}"


def counts_text(counts: dict[str, Any]) -> str:
    """Counts in one line."""
    return ", ".join(f"{value:,} {name}" for name, value in counts.items())


def _environment() -> jinja2.Environment:
    folder = Path(__file__).parent / "templates"
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "counts": counts_text, "number": "{:,}".format}
    return made


_PAGES = _environment()


def text_html(languages: dict[str, Any]) -> str:
    """What normalization changed, by language and kind, with examples; nothing where it changed nothing."""
    return _PAGES.get_template("text.html").render(languages=languages).strip()


def damage_html(run: Run) -> str:
    """Damaged shards that stages went on without; nothing where there were none."""
    return _PAGES.get_template("damage.html").render(stages=run.results).strip()


def _worst(detail: dict[str, Any]) -> list[list[Any]]:
    """Utterances with the most errors: id, errors, and the alignment with each error marked."""
    return [
        [entry["id"], entry["errors"], mark(align(entry["ref"].split(), entry["hyp"].split()))]
        for entry in detail["worst"][:_WORST]
    ]


def render(run: Run, curves: bytes) -> str:
    """The whole page."""
    scores = run.result("score").output.read_json("scores.json")
    register = run.result("register").record
    training = run.result("train").record["result"]
    facts = {"model": register["model_uri"], "decision": register["decision"]["reason"], "run": run.run_id}
    facts |= {
        "parameters": f"{training['parameters']:,}",
        "trained": f"{training['epoch']} epochs, {training['step']:,} steps, {training['elapsed'] / 60:.1f} minutes on "
        + compute_text(training),
        "strategy": strategy_text(run),
    }
    if training.get("repeated"):
        facts["repeated"] = f"{training['repeated']:,} utterances, first leased to a node that was lost"
    prepare = run.result("prepare").record
    return _PAGES.get_template("report.html").render(
        name=run.config.name,
        scores=scores,
        facts=facts,
        curves=base64.b64encode(curves).decode(),
        groups={**GROUPS, "speakers": "speaker"},
        worst={name: _worst(detail) for name, detail in scores["details"].items()},
        prepare=prepare,
        shard=run.result("shard").record,
        warnings=overlap_warnings(prepare, run.config.data),
        stages=run.results,
        provenance=provenance(),
        config=run.config.model_dump_json(indent=2, by_alias=True),
    )


def _inputs(run: Run) -> Inputs:
    # what earlier stages made, not the run that made it: the same result has the same report
    return {}, {name: run.result(name).key for name in STAGES if name in run.results and name != "report"}


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        journal.write_bytes(run.result("train").output.read("journal.jsonl"))
        curves = learning_curves(read_journal(journal), Path(folder) / "curves.png").read_bytes()
    page = render(run, curves)
    output.store.write("learning_curves.png", curves)
    output.store.write("report.html", page.encode())
    path = local_report(output.store, run.config.name, output.key)
    _attach(run, path)
    return {"counts": {"bytes": len(page.encode())}, "report": str(path)}


def local_report(store: ObjectStore, name: str, key: str) -> Path:
    """A copy of the report in the data folder, wherever the object store is."""
    path = home() / "reports" / f"{name}-{key}.html"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(store.read("report.html"))
    return path


def _attach(run: Run, path: Path) -> None:
    """Put the report beside the model; a tracking server that is away costs the run nothing."""
    from tasks.tracking import client

    try:
        client().log_artifact(run.result("register").record["mlflow_run"], str(path))
    except Exception as error:  # any tracking trouble: the report itself is safe in the store
        progress.report("report", 1, 1, f"not attached to MLflow at {shown_mlflow_uri()}: {type(error).__name__}")


REPORT = Stage("report", 4, _inputs, _work)
