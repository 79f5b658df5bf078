"""What the Prefect UI shows of a stage."""

from tasks.stages.base import StageResult
from tasks.stages.score import score_table
from tasks.tracking.runs import client


def test_error_rates_of_corpora_and_domains_follow_their_set():
    rates = {"wer": 0.25, "wer_low": 0.2, "wer_high": 0.3, "cer": 0.1, "words": 40, "utterances": 9}
    by = {"digits": {"wer": 0.05, "ref_words": 20}, "": {"wer": 0.45, "ref_words": 20}}
    record = {"sets": {"test": rates}, "groups": {"test": {"domains": by}}}
    result = StageResult("score", "k", "memory://x", 1.0, False, {}, record)
    rows = score_table(result)
    assert [row["set"] for row in rows] == ["test", "test, domain digits", "test, domain –"]
    assert [row["wer"] for row in rows] == ["25.00 %", "5.00 %", "45.00 %"]
    assert score_table(StageResult("score", "k", "memory://x", 1.0, False, {}, {"sets": {"test": rates}})) == rows[:1]


def test_progress_shows_the_note_and_links_to_mlflow(monkeypatch):
    from support import tiny_document

    from tasks.config.pipeline import parse_config
    from tasks.orchestration import artifacts
    from tasks.stages import progress
    from tasks.stages.base import Run

    shown = []
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda share, **more: shown.append((share, more)) or 7)
    monkeypatch.setattr(
        artifacts, "update_progress_artifact", lambda known, **more: shown.append((more.pop("progress"), more))
    )
    bar = artifacts.ProgressArtifact(Run(parse_config(tiny_document()), "r"), "train")
    progress.link("train", "MLflow run", "http://127.0.0.1:5000/#/experiments/1/runs/2")
    with progress.listening(bar):
        progress.report("shard", 1, 2, "not this one")
        progress.report("train", 0.5, 2.0, "loss 2.000, 3.1 steps/s")
    assert shown[0][0] == 25.0
    link = "[MLflow run](http://127.0.0.1:5000/#/experiments/1/runs/2)"
    assert shown[0][1]["description"] == f"loss 2.000, 3.1 steps/s, {link}"
    bar.finish()
    assert shown[-1][0] == 100.0
    assert progress.links("train") == {}


def test_parent_run_shows_a_summary(finished, monkeypatch):
    from tasks.orchestration import artifacts

    written = []
    monkeypatch.setattr(artifacts, "create_markdown_artifact", lambda text, **more: written.append((text, more)))
    artifacts.publish_summary(finished)
    ((text, more),) = written
    assert more["key"] == "tiny-summary"
    for stage in finished.results:
        assert f"| {stage} | " in text
    assert f"**{finished.result('register').record['model_uri']}**" in text
    assert "| test | " in text
    assert finished.result("report").record["report"] in text


def test_each_stage_has_its_artifact_and_failures_only_warn(finished, monkeypatch):
    from tasks.orchestration import artifacts

    shown, warned = [], []
    for kind in ("table", "markdown"):
        create = lambda content, key, description="", kind=kind: shown.append((kind, key, content, description))  # noqa: E731
        monkeypatch.setattr(artifacts, f"create_{kind}_artifact", create)
    for result in finished.results.values():
        artifacts.publish(finished, result)
    assert [(kind, key) for kind, key, _, _ in shown] == [
        ("table", "tiny-prepare"),
        ("markdown", "tiny-shard"),
        ("markdown", "tiny-features"),
        ("markdown", "tiny-train"),
        ("markdown", "tiny-curves"),
        ("markdown", "tiny-decode"),
        ("table", "tiny-score"),
        ("markdown", "tiny-register"),
        ("markdown", "tiny-report"),
    ]
    by_key = {key: (content, about) for _, key, content, about in shown}
    assert by_key["tiny-prepare"][1].startswith("**prepare**: ")
    assert finished.result("shard").url in by_key["tiny-shard"][0]
    assert by_key["tiny-register"][0].startswith("**models:/tiny/1**\n\nbecame champion: there was none before")
    assert by_key["tiny-report"][0] == f"Report: `{finished.result('report').record['report']}`"
    assert "| epoch | training loss | validation loss | WER |" in by_key["tiny-train"][0]
    assert by_key["tiny-train"][0].count("\n| ") == 1 + finished.config.train.epochs
    assert by_key["tiny-curves"][0].startswith("![tiny-curves](data:image/png;base64,")
    logger = type("Logger", (), {"warning": lambda self, text, error: warned.append(str(error))})
    monkeypatch.setattr(artifacts, "get_run_logger", logger)

    def away(*_, **__):
        raise OSError("the server is away")

    monkeypatch.setattr(artifacts, "create_markdown_artifact", away)
    artifacts.publish(finished, finished.result("shard"))
    assert warned == ["the server is away"]


def test_report_link_opens_in_a_browser(finished, monkeypatch):
    from tasks.tracking import runs
    from tasks.tracking.registry import report_text

    record = finished.result("register").record
    assert report_text(record, "/here/it.html") == "Report: `/here/it.html`"
    monkeypatch.setattr(runs, "shown_mlflow_uri", lambda: "http://127.0.0.1:5000/")
    run = client().get_run(record["mlflow_run"])
    page = f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (
        report_text(record, "/here/it.html") == f"[Report]({page}/artifacts/report.html?workflowType=machine_learning)"
    )


def test_epochs_show_the_measured_values():
    from tasks.stages.train import validation_table

    valid = {"kind": "valid", "epoch": 1, "train_loss": 2.0, "valid_loss": float("nan")}
    assert validation_table([{"kind": "start"}, valid]).splitlines()[-1] == "| 1 | 2.000 | – |"
    rated = validation_table([valid | {"valid_wer": 0.5}, valid | {"epoch": 2}])
    assert rated.splitlines()[2:] == ["| 1 | 2.000 | – | 50.00 % |", "| 2 | 2.000 | – | – |"]


def test_a_language_model_and_tuned_weights_are_shown_as_tables(finished, monkeypatch):
    from tasks.orchestration import artifacts

    shown = {}
    create = lambda table, key, description: shown.update({key: (table, description)})  # noqa: E731
    monkeypatch.setattr(artifacts, "create_table_artifact", create)
    perplexity = {"perplexity_with_unknown": 12.34567, "perplexity_without_unknown": 11.0, "unknown_rate": 0.02}
    about = {
        "perplexity": {"valid": perplexity},
        "ngrams": [13, 1200],
        "words": 10,
        "text": {"kept": 9, "protected": 2},
    }
    record = {"lm": about, "bytes": {"lm.arpa": 1_000_000, "words.txt": 50}}
    artifacts.publish(finished, StageResult("lm", "k", "memory://lm", 1.0, False, {"words": 10}, record))
    rows = {row["figure"]: row["value"] for row in shown["tiny-lm"][0]}
    assert rows["lm.valid.perplexity_with_unknown"] == "12.3457"
    assert (rows["lm.ngrams.2"], rows["lm.bytes"], rows["text: protected"]) == ("1,200", "1,000,050", "2")
    table = [{"lm_weight": 1.0, "errors": 3, "wer": 0.3, "cer": 0.1}]
    tuning = {"set": "valid", "utterances": 7, "chosen": {"lm_weight": 1.0}, "wer": 0.3, "table": table}
    artifacts.publish(finished, StageResult("decode", "k", "memory://d", 1.0, False, {}, {"tuning": tuning}))
    assert shown["tiny-decode"][0] == table
    assert "chosen on 7 utterances of valid: lm_weight 1, WER 30.00 %" in shown["tiny-decode"][1]
