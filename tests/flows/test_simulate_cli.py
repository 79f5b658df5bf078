"""`starling simulate` and `starling plan` as users type them."""

import json

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from training.strategies.registry import STRATEGIES

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
    printed = json.loads(result.stdout.splitlines()[-1])
    (row,), (curve,) = printed["rows"], printed["curves"]
    assert [set(look) for look in curve] == [{"at_s", "epochs", "consensus"}] * 2
    assert curve[-1]["epochs"] == 1
    assert curve[-1]["at_s"] >= 0.9 * row["epoch_s"]


def test_simulation_prints_a_row_per_strategy():
    simulated = rows("--strategy", "scpsgd", "--strategy", "adpsgd", "--learners", 4, "--learners", 8, "--slow", "3=10")
    assert [(row["strategy"], row["learners"]) for row in simulated] == [
        ("scpsgd", 4),
        ("adpsgd", 4),
        ("scpsgd", 8),
        ("adpsgd", 8),
    ]
    assert all(set(row) == COLUMNS for row in simulated)
    assert simulated[0]["condition"] == "slow 3=10"
    assert simulated[0]["epoch_s"] > 3 * simulated[1]["epoch_s"]
    assert simulated[0]["loss"] is None


def test_options_set_a_strategys_constants():
    often, seldom = (
        rows("--strategy", "ma", "--steps", 100, "--option", f"ma.tau={tau}")[0]["bytes"] for tau in (1, 10)
    )
    assert often == pytest.approx(10 * seldom, rel=0.2)


def test_pipeline_is_simulated_with_its_constants_and_slow_stages():
    words = ["--strategy", "pipeline", "--link-gbit", 1e6, "--link-ms", 0, "--option", "pipeline.micro_batches=12"]
    even, slow, narrow = (rows(*words, *more)[0] for more in ([], ["--slow", "3=10"], ["--border-mb", 16]))
    assert set(even) == COLUMNS
    assert even["epoch_s"] == pytest.approx(20 * 0.1 * (12 + 4 - 1) / 12, rel=1e-3)
    assert slow["epoch_s"] > 9 * 20 * 0.1
    assert (even["staleness"], even["consensus"]) == (0, 0)
    assert narrow["bytes"] == pytest.approx(2 * even["bytes"])


def test_default_is_all_strategies_that_depend_on_the_network():
    assert [row["strategy"] for row in rows()] == [name for name in STRATEGIES if name != "hogwild"]
    # no pipeline was requested by name: the other strategies are simulated
    result = call("simulate", "--timing", "--steps", 20, "--lose", "1=0.9", "--json")
    assert "pipeline" not in {row["strategy"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert "pipeline is left out: a pipeline that loses one of its stages" in " ".join(result.output.split())


def test_losses_and_joins_are_simulated():
    words = ["--strategy", "scpsgd", "--slow", "0=2", "--timeout-s", 0.5]
    calm, disturbed = rows(*words)[0], rows(*words, "--lose", "1=0.9", "--join", "2=0.4")[0]
    assert disturbed["condition"] == "slow 0=2, lost 1=0.9, joined 2=0.4"
    assert disturbed["epoch_s"] > calm["epoch_s"]


@pytest.mark.parametrize("width", [80, 100])
def test_table_fits_the_terminal(monkeypatch, width):
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
        (["simulate", "--timing", "--strategy", "sgd"], "'sgd' is not a strategy"),
        (["simulate", "--timing", "--slow", "three"], "is not RANK=FACTOR"),
        (["simulate", "--timing", "--slow", "9=2"], "there is no learner 9"),
        (["simulate", "--timing", "--lose", "1=soon"], "--lose '1=soon' is not RANK=SECONDS"),
        (["simulate", "--timing", "--lose", "1=2", "--lose", "1=3"], "--lose names learner 1 twice"),
        (["simulate", "--timing", "--join", "1=-2"], "joins.0.at_s: must be at least 0"),
        (["simulate", "--timing", "--option", "ma.tau"], "is not STRATEGY.FIELD=VALUE"),
        (["simulate", "--timing", "--strategy", "pipeline", "--lose", "1=2"], "cannot train"),
        (["plan"], "give the model by --parameters and --step-s"),
        (["plan", "--measure"], "--measure needs a configuration"),
    ],
)
def test_user_errors_are_reported(words, message):
    result = call(*words)
    assert result.exit_code == 1
    assert message in result.output


def test_plan_recommends_a_strategy():
    model = ["--parameters", 40_000_000, "--step-s", 0.5]
    result = call("plan", *model, "--nodes", 4, "--slow", 10, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["recommendation"]["strategy"] == "adpsgd"
    assert {row["strategy"] for row in printed["rows"]} >= {"scpsgd", "d1d", "adpsgd", "bmuf", "asgd"}
    shown = call("plan", *model, "--nodes", 2)
    assert "take" in shown.stdout
    assert "without pipeline: give the model's --layers and --border-mb" in shown.stdout
    shown = call("plan", *model, "--nodes", 2, "--layers", 12, "--border-mb", 8)
    assert "without" not in shown.stdout
    assert "pipeline" in shown.stdout


def test_plan_table_fits_80_columns(monkeypatch):
    monkeypatch.setattr("flows.cli.common.out.width", 80, raising=False)
    model = ["--parameters", 43_000_000, "--step-s", 0.5, "--data-hours", 1975]
    shown = call("plan", *model, "--nodes", 2, "--gpus-per-node", 2, "--link-gbit", 1, "--losses-per-day", 3).stdout
    assert "…" not in shown
    assert "h-adpsgd random-ring" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_plan_is_measured_on_the_prepared_data(finished, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(finished.config.model_dump_json(), encoding="utf-8")
    result = call("plan", config, "--measure", "--batch-seconds", 3, "--nodes", 2, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert "prepared training set" in printed["measured_on"]
    assert 0 < printed["request"]["data_hours"] < 1
    model = finished.config.model
    assert printed["request"]["layers"] == model.layers
    # of about three seconds at the model's frame rate
    width = 2 * model.dim if model.kind == "blstm" else model.dim
    frames = 3 * 1000 / finished.config.features.hop_ms / model.subsampling
    assert printed["request"]["border_mb"] == pytest.approx(4 * frames * width / 1e6, rel=0.5)


def test_measured_plan_without_prepared_data_uses_noise(tmp_path, home):
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
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["measured_on"].startswith("noise (the data are not prepared)")
    request = printed["request"]
    assert request["step_s"] > 0
    assert request["parameters"] > 1000
    assert request["layers"] == 1
    assert printed["left_out"] == {"pipeline": "2 learners need as many layers, and the model has 1"}
