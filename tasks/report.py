"""Stage 8, report: one self-contained HTML page a run, and what the Prefect UI shows of it."""

import base64
import html
import tempfile
from pathlib import Path
from typing import Any

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

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1d2b33;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #d8e0e4;padding-bottom:.2rem}
table{border-collapse:collapse;margin:.6rem 0;width:100%}
th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #e6ecef;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code,pre{font:13px/1.5 ui-monospace,monospace;background:#f3f6f7;border-radius:4px;padding:.1rem .3rem}
pre{padding:.7rem;overflow-x:auto}img{max-width:100%}.big{font-size:2rem;font-weight:600}
.err{color:#b3261e;font-weight:600}.muted{color:#6b7b84}
"""


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


def table(head: list[str], rows: list[list[Any]], numeric: set[int] | None = None) -> str:
    """An HTML table; every cell is escaped."""
    numeric = numeric or set()

    def cell(tag: str, i: int, value: Any) -> str:
        return f"<{tag}{' class=n' if i in numeric else ''}>{html.escape(str(value))}</{tag}>"

    lines = ["".join(cell("td", i, value) for i, value in enumerate(row)) for row in rows]
    header = "".join(cell("th", i, value) for i, value in enumerate(head))
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _scores_html(scores: dict[str, Any]) -> str:
    head = ["set", "WER", "95 % interval", "CER", "sub", "ins", "del", "words", "utterances"]
    rows = [
        [
            name,
            percent(s["wer"]),
            f"{percent(s['wer_low'])} to {percent(s['wer_high'])}",
            percent(s["cer"]),
            *(f"{s[column]:,}" for column in ("sub", "ins", "del", "words", "utterances")),
        ]
        for name, s in scores["sets"].items()
    ]
    parts = [table(head, rows, set(range(1, 9)))]
    for name, detail in scores["details"].items():
        for group, one in {**GROUPS, "speakers": "speaker"}.items():
            if len(detail[group]) > 1:
                lines = [
                    [who or "–", percent(c["wer"]), c["errors"], c["ref_words"]] for who, c in detail[group].items()
                ]
                parts.append(f"<h3>{html.escape(name)} by {one}</h3>")
                parts.append(table([one, "WER", "errors", "words"], lines, {1, 2, 3}))
        parts.append(_worst_html(name, detail["worst"]))
    return "".join(parts)


def _worst_html(name: str, worst: list[dict[str, Any]]) -> str:
    rows = [
        [entry["id"], entry["errors"], mark(align(entry["ref"].split(), entry["hyp"].split()))] for entry in worst[:12]
    ]
    if not rows:
        return f"<p class=muted>{html.escape(name)}: no utterance has an error.</p>"
    note = "<p class=muted>(said->heard) substituted, (-word) deleted, (+word) inserted</p>"
    return f"<h3>{html.escape(name)}: worst utterances</h3>{note}" + table(["utterance", "errors", "alignment"], rows)


def _stages_html(run: Run) -> str:
    rows = [
        [r.name, "cached" if r.cached else f"{r.seconds:.1f} s", counts_text(r.counts), f"{r.name}/{r.key}"]
        for r in run.results.values()
    ]
    return table(["stage", "time", "counts", "output"], rows, {1})


def _data_html(run: Run) -> str:
    prepare, shard = run.result("prepare").record, run.result("shard").record
    speakers = {name: f"{entry['speakers']:,}" for name, entry in prepare["sets"].items()}
    rows = [
        [name, f"{s['utterances']:,}", f"{s['seconds'] / 3600:.2f}", speakers[name], s["shards"], s["digest"][:16]]
        for name, s in shard["sets"].items()
    ]
    warnings = "".join(f"<p class=err>{html.escape(w)}.</p>" for w in overlap_warnings(prepare, run.config.data))
    reasons = counts_text(prepare["reasons"]) or "none"
    return (
        table(["set", "utterances", "hours", "speakers", "shards", "digest"], rows, {1, 2, 3, 4})
        + warnings
        + f"<p>Quarantined: {html.escape(reasons)}.</p>"
        + f"<p>Speech that comes twice: {html.escape(counts_text(prepare['duplicates']) or 'none')}.</p>"
        + damage_html(run)
        + text_html(prepare["text"])
    )


def text_html(languages: dict[str, Any]) -> str:
    """What normalization changed, by language and kind, with examples; nothing where it changed nothing."""
    rows = [
        [language or "–", kind, f"{number:,}", f"{example['was']} → {example['became'] or '(nothing)'}"]
        for language, entry in languages.items()
        for kind, number in entry["kinds"].items()
        for example in entry["examples"][kind][:1]
    ]
    if not rows:
        return ""
    changed = "; ".join(
        f"{entry['changed']:,} of {entry['utterances']:,} in {language or 'no language'}"
        for language, entry in languages.items()
        if entry["changed"]
    )
    note = f"<h3>Text</h3><p>Transcripts that normalization changed: {html.escape(changed)}.</p>"
    return note + table(["language", "what", "changes", "such as"], rows, {2})


def damage_html(run: Run) -> str:
    """Damaged shards that stages went on without; nothing where there were none."""
    rows = [
        [stage, entry["shard"], entry["reason"], f"{entry['utterances']:,}", f"{entry['seconds']:.0f} s"]
        for stage, result in run.results.items()
        for entry in result.record.get("quarantined_shards", ())
    ]
    head = ["stage", "damaged shard", "reason", "utterances", "audio"]
    return table(head, rows, {3, 4}) if rows else ""


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
        facts["repeated"] = f"{training['repeated']:,} utterances, begun by a node that was lost"
    config = run.config.model_dump_json(indent=2, by_alias=True)
    first = next(iter(scores["sets"].items()))
    image = base64.b64encode(curves).decode()
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(run.config.name)} – Starling report</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(run.config.name)}</h1><p><span class=big>{percent(first[1]['wer'])}</span> WER on "
        f"{html.escape(first[0])}</p>{table(['', ''], [[k, v] for k, v in facts.items()])}"
        f"<h2>Training</h2><img alt='learning curves' src='data:image/png;base64,{image}'>"
        f"<h2>Recognition</h2>{_scores_html(scores)}<h2>Data</h2>{_data_html(run)}<h2>Stages</h2>{_stages_html(run)}"
        f"<h2>Provenance</h2>{table(['', ''], [[k, v] for k, v in provenance().items()])}"
        f"<details><summary>Configuration</summary><pre>{html.escape(config)}</pre></details></html>"
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


REPORT = Stage("report", 3, _inputs, _work)
