"""`starling simulate` and `starling plan` as users type them."""

import json

import pytest
from typer.testing import CliRunner

from flows.cli.app import app

COLUMNS = {
    "strategy",
    "learners",
    "condition",
    "epoch_s",
    "speedup",
    "loss",
    "wer",
    "staleness",
    "consensus",
    "bytes",
}


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def rows(*words):
    result = call("simulate", "--timing", "--steps", 20, "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])["rows"]


def test_every_row_has_a_curve_over_virtual_time():
    result = call("simulate", "--timing", "--strategy", "adpsgd", "--steps", 20, "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    (row,), (curve,) = found["rows"], found["curves"]
    assert [set(look) for look in curve] == [{"at_s", "epochs", "consensus"}] * 2
    assert curve[-1]["epochs"] == 1
    assert curve[-1]["at_s"] >= 0.9 * row["epoch_s"]


def test_rows_of_a_simulation():
    found = rows("--strategy", "scpsgd", "--strategy", "adpsgd", "--learners", 4, "--learners", 8, "--slow", "3=10")
    assert [(row["strategy"], row["learners"]) for row in found] == [
        ("scpsgd", 4),
        ("adpsgd", 4),
        ("scpsgd", 8),
        ("adpsgd", 8),
    ]
    assert all(set(row) == COLUMNS for row in found)
    assert found[0]["condition"] == "slow 3=10"
    assert found[0]["epoch_s"] > 3 * found[1]["epoch_s"]
    assert found[0]["loss"] is None


def test_a_methods_constants():
    often, seldom = (
        rows("--strategy", "ma", "--steps", 100, "--option", f"ma.tau={tau}")[0]["bytes"] for tau in (1, 10)
    )
    assert often == pytest.approx(10 * seldom, rel=0.2)


def test_losses_and_joins_are_simulated():
    words = ["--strategy", "scpsgd", "--slow", "0=2", "--timeout-s", 0.5]
    calm, disturbed = rows(*words)[0], rows(*words, "--lose", "1=0.9", "--join", "2=0.4")[0]
    assert disturbed["condition"] == "slow 0=2, lost 1=0.9, joined 2=0.4"
    assert disturbed["epoch_s"] > calm["epoch_s"]


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_for_people_fits_their_terminal(monkeypatch, width):
    monkeypatch.setattr("flows.cli.common.out.width", width, raising=False)
    words = ["--timing", "--steps", 4, "--learners", 4, "--slow", "3=10", "--lose", "2=0.3", "--join", "1=0.2"]
    for more in ([], ["--learners", 8]):
        result = call("simulate", *words, *more)
        assert result.exit_code == 0, result.output
        assert "…" not in result.stdout
        assert "h-adpsgd" in result.stdout
        assert "MB" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= width


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate"], "give a configuration to train, or --timing"),
        (["simulate", "--timing", "--strategy", "sgd"], "'sgd' is no strategy"),
        (["simulate", "--timing", "--slow", "three"], "is not RANK=FACTOR"),
        (["simulate", "--timing", "--slow", "9=2"], "there is no learner 9"),
        (["simulate", "--timing", "--lose", "1=soon"], "--lose '1=soon' is not RANK=SECONDS"),
        (["simulate", "--timing", "--lose", "1=2", "--lose", "1=3"], "--lose names learner 1 twice"),
        (["simulate", "--timing", "--join", "1=-2"], "joins.0.at_s: Input should be greater than or equal to 0"),
        (["simulate", "--timing", "--option", "ma.tau"], "is not STRATEGY.FIELD=VALUE"),
        (["plan"], "give the model by --parameters and --step-s"),
        (["plan", "--measure"], "--measure needs a configuration"),
    ],
)
def test_mistakes_are_told(words, message):
    result = call(*words)
    assert result.exit_code == 1
    assert message in result.output


def test_a_plan():
    model = ["--parameters", 40_000_000, "--step-s", 0.5]
    result = call("plan", *model, "--nodes", 4, "--slow", 10, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["recommendation"]["strategy"] == "adpsgd"
    assert {row["strategy"] for row in found["rows"]} >= {"scpsgd", "d1d", "adpsgd", "bmuf", "asgd"}
    shown = call("plan", *model, "--nodes", 2)
    assert "take" in shown.stdout


def test_a_plan_for_people_fits_80_columns(monkeypatch):
    monkeypatch.setattr("flows.cli.common.out.width", 80, raising=False)
    model = ["--parameters", 43_000_000, "--step-s", 0.5, "--data-hours", 1975]
    shown = call("plan", *model, "--nodes", 2, "--gpus-per-node", 2, "--link-gbit", 1, "--losses-per-day", 3).stdout
    assert "…" not in shown
    assert "h-adpsgd random-ring" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_plan_is_measured_on_the_configured_data_where_they_are_prepared(finished, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(finished.config.model_dump_json(), encoding="utf-8")
    result = call("plan", config, "--measure", "--batch-seconds", 3, "--nodes", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert "prepared training set" in found["measured_on"]
    assert 0 < found["request"]["data_hours"] < 1


def test_a_measured_plan(tmp_path, home):
    config = tmp_path / "tiny.yaml"
    model = {"kind": "conformer", "dim": 16, "layers": 1, "heads": 2, "kernel": 5, "channels": 4}
    document = {
        "name": "tiny",
        "data": {"sources": [{"kind": "synthetic"}], "sample_rate": 8000},
        "model": model,
        "train": {"device": "cpu", "threads": 1},
    }
    config.write_text(json.dumps(document), encoding="utf-8")
    result = call("plan", config, "--measure", "--batch-seconds", 4, "--nodes", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["measured_on"].startswith("noise (the data are not prepared)")
    request = found["request"]
    assert request["step_s"] > 0
    assert request["parameters"] > 1000
