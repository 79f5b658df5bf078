"""Stage report: one self-contained HTML page per run, and its texts for the Prefect UI."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configurable.addresses import address_content
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks import STAGES
from tasks.config.home import shown_mlflow_uri
from tasks.dataset.duplicates import data_warnings, doubles_of
from tasks.figures import speakers_text
from tasks.pages import as_code, keep_page, page_templates
from tasks.scores import GROUPS, interval
from tasks.stages import progress
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageRecord, StageResult, counts_text
from tasks.stages.register import REGISTER
from tasks.stages.report_charts import set_histograms
from tasks.stages.report_details import changes_of, set_details
from tasks.stages.trained_model import trained_model
from tasks.tracking.model_card import begun_text, compute_text, initial, learners_text
from tasks.tracking.provenance import provenance
from tasks.tracking.registry import report_text
from tasks.tracking.runs import REPORT_FILE, client

_CONFUSIONS = 15


def _speakers(entry: dict[str, Any]) -> str:
    """Number of speakers of a set, from the prepare stage's record."""
    return speakers_text(entry["speakers"], entry.get("unnamed", 0))


_PAGES = page_templates(interval=interval, counts=counts_text, speakers=_speakers)


def _confused(entries: list[dict[str, Any]], *names: str) -> list[list[Any]]:
    """Rows of a table of confusions: the words, and how often."""
    return [[*(entry[name] for name in names), entry["count"]] for entry in entries[:_CONFUSIONS]]


def speed_text(decoded: dict[str, Any], name: str) -> str:
    """Real-time factor of a set's decoding; a dash if it was not measured, as of a decoding that was resumed.

    Args:
        decoded: Record of the stage `decode`.
        name: The set.
    """
    speed = decoded.get("speed", {}).get(name)
    return "–" if not speed or not speed["audio"] else f"{speed['seconds'] / speed['audio']:.3f}"


def render(run: Run, curves: bytes) -> str:
    """Render the page.

    Args:
        run: The run, with the results of all earlier stages.
        curves: Plot of the learning curves, PNG.
    """
    register, trained = REGISTER.record(run), trained_model(run)
    training = trained.figures()
    facts = {"model": register["model_uri"], "decision": as_code(register["decision"]["reason"]), "run": run.run_id}
    facts |= {
        "parameters": f"{training['parameters']:,}",
        "trained": f"{training['epoch']} epochs, {training['step']:,} steps, {training['elapsed'] / 60:.1f} minutes on "
        + compute_text(training),
        "strategy": f"{training['strategy']}, {learners_text(training['nodes'], training['learners_per_node'])}",
    }
    if begun := initial(run):
        facts["began with"] = begun_text(begun)
    if repeated := trained.result.counts.get("repeated"):
        facts["repeated"] = f"{repeated:,} utterances, first leased to a node that was lost"
    prepare, shard = run.result("prepare").record, run.result("shard")
    return _PAGES.get_template("report.html").render(
        name=run.config.name,
        facts=facts,
        curves=base64.b64encode(curves).decode(),
        prepare=prepare,
        shard=shard.record,
        charts=[chart for name in shard.record["sets"] for chart in set_histograms(shard.store.child(name), name)],
        decision=register["decision"],
        changes=changes_of(register["decision"]),
        warnings=data_warnings(prepare, run.config.data),
        doubles=doubles_of(prepare, run.config.data),
        stages=run.results,
        **_recognition(run, run.result("score").output.read_json("scores.json")),
        **_origin(run),
    )


def render_evaluation(run: Run, model: str) -> str:
    """Render the page of an evaluation of an existing model."""
    scores = run.result("score").output.read_json("scores.json")
    return _PAGES.get_template("evaluation.html").render(
        name=run.config.name,
        facts={"model": model, "corpus": ", ".join(source.path for source in run.config.data.sources)},
        prepare=run.result("prepare").record,
        stages=run.results,
        **_recognition(run, scores),
        **_origin(run),
    )


def _recognition(run: Run, scores: dict[str, Any]) -> dict[str, Any]:
    """What the section on recognition shows."""
    names = list(scores["details"])
    budget = int(1e6 * run.config.report.audio_mb / max(1, len(names)))
    return {
        "scores": scores,
        "groups": {**GROUPS, "speakers": "speaker"},
        "details": {name: set_details(run, name, scores["details"][name]["worst"], budget) for name in names},
        "speed": {name: speed_text(run.result("decode").record, name) for name in names},
        "confused": _confused,
    }


def _origin(run: Run) -> dict[str, Any]:
    """What the sections on provenance and configuration show."""
    return {"provenance": provenance(), "config": run.config.model_dump_json(indent=2, by_alias=True)}


def _inputs(run: Run) -> Inputs:
    # outputs of earlier stages, not the run: the same results have the same report
    return address_content(run.config.report), {
        name: run.result(name).key for name in STAGES if name in run.results and name != "report"
    }


class ReportRecord(StageRecord):
    """The written report."""

    report: str
    """Path of the copy in the data folder."""
    registered: dict[str, Any]
    """The MLflow run that it is attached to, and the decision that it tells."""


def _work(run: Run, output: StageOutput) -> ReportRecord:
    curves = trained_model(run).curves()
    page = render(run, curves)
    output.store.write("learning_curves.png", curves)
    output.store.write(REPORT_FILE, page.encode())
    path = local_report(output.store, run.config.name, output.key)
    _attach(run, page)
    return {"counts": {"bytes": len(page.encode())}, "report": str(path), "registered": _registered(run)}


def _registered(run: Run) -> dict[str, Any]:
    """What a report tells that is in the registry: the addresses of stage outputs do not tell it."""
    record = REGISTER.record(run)
    return {"run": record["mlflow_run"], "decision": record["decision"]}


def _of_last_registration(run: Run, record: dict[str, Any]) -> bool:
    """Whether a report is not that of a former decision, or of the MLflow run of another registry."""
    return bool(record.get("registered") == _registered(run))


def local_report(store: ObjectStore, name: str, key: str) -> Path:
    """Write a copy of the report to the data folder, and return its path."""
    return keep_page(f"{name}-{key}", store.read(REPORT_FILE))


def _attach(run: Run, page: str) -> None:
    """Attach the report to the model's MLflow run; a failure to do so is only reported."""
    try:
        client().log_text(REGISTER.record(run)["mlflow_run"], page, REPORT_FILE)
    except Exception as error:  # any tracking error: the report itself is in the object store
        progress.announce("report", f"not attached to MLflow at {shown_mlflow_uri()}: {type(error).__name__}")


def report_link(run: Run) -> str:
    """Where the report is, as Markdown."""
    return report_text(REGISTER.record(run), REPORT.record(run)["report"])


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    yield Artifact(report_link(run), "HTML report")


REPORT = Stage(
    "report",
    13,
    _inputs,
    _work,
    _of_last_registration,
    artifacts=_artifacts,
    reads="all",
    writes="one self-contained HTML page",
)
