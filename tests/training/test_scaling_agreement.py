"""The comparison of simulated with real scaling: its arithmetic, on rows whose answer is known."""

import json

import pytest

from benchmarks import scaling_agreement
from benchmarks.scaling_scenario import PER_NODE


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(scaling_agreement, "STEPS", 32)


def row(strategy, learners, condition, each, **changes):
    """A row of a benchmark in which every learner makes `each` steps a second, next to one alone that makes 4."""
    values = {"params": 1000, "step_s": 0.2, "cpu_share": 0.1, "epoch_ratio": 1.0, "speedup": learners * each / 4.0}
    return {"strategy": strategy, "learners": learners, "condition": condition, "steps_per_s": each} | values | changes


ALONE = row("single", 1, "homogeneous", 4.0)  # 0.05 s of a step are no gradient


def compare(*rows):
    return scaling_agreement.compare([ALONE, *rows])


@pytest.mark.parametrize("strategy", ["adpsgd", "scpsgd", "h-adpsgd"])
def test_step_overhead_is_taken_from_the_run_with_one_learner(strategy):
    (agreed,) = compare(row(strategy, 4, "homogeneous", 4.0))
    assert agreed["overhead_s"] == pytest.approx(0.05)
    assert agreed["real"] == 16.0
    assert agreed["simulated"] == pytest.approx(16.0, rel=0.03)
    assert agreed["agrees"]


def test_slow_learner_delays_the_same_strategies_as_in_the_benchmark():
    base = [row(name, 4, "homogeneous", 4.0) for name in ("adpsgd", "scpsgd")]
    slow_step = 1 / (2 * 0.2 + 0.05)
    uneven = row("adpsgd", 4, "slow 2x", 4.0, speedup=(3 * 4 + slow_step) / 4, epoch_ratio=1.12)
    waiting = row("scpsgd", 4, "slow 2x", slow_step)
    free, held = compare(*base, uneven, waiting)[2:]
    assert free["difference"] == pytest.approx(0, abs=0.03)
    assert held["difference"] == pytest.approx(0, abs=0.03)
    assert free["real_ratio"] == 1.12
    assert free["simulated_ratio"] == pytest.approx(16 / (12 + slow_step), rel=0.03)


def test_only_the_calibrated_column_matches_a_slower_homogeneous_run():
    slower = row("scpsgd", 4, "homogeneous", 2.0)
    (agreed,) = compare(slower)
    assert agreed["difference"] == pytest.approx(1.0, abs=0.05)
    assert agreed["calibrated_difference"] == pytest.approx(0, abs=0.01)
    assert not agreed["agrees"]
    shown = scaling_agreement.show([agreed])
    assert "within 15%: 0 of 1 rows" in shown
    assert "apart: scpsgd, homogeneous (+" in shown


def test_narrow_link_slows_only_synchronous_strategies():
    """Three links carry 2 · 3/4 of 4 MB each: 0.48 s at 100 Mbit/s."""
    wide, narrow = (row(name, 4, "100 Mbit/s", 4.0, params=1_000_000) for name in ("adpsgd", "scpsgd"))
    alone = ALONE | {"params": 1_000_000}
    free, held = scaling_agreement.compare([alone, wide, narrow])
    assert free["simulated"] == pytest.approx(16.0, rel=0.03)
    assert held["simulated"] == pytest.approx(4 / (0.25 + 0.48), rel=0.03)


def test_learners_per_machine_match_the_benchmark():
    machines = {
        (name, condition): scaling_agreement.cluster(row(name, 4, condition, 4.0), 0.0).per_machine
        for name in ("scpsgd", "h-adpsgd")
        for condition in ("homogeneous", "1 Gbit/s")
    }
    assert machines == {
        ("scpsgd", "homogeneous"): 4,
        ("scpsgd", "1 Gbit/s"): 1,
        ("h-adpsgd", "homogeneous"): PER_NODE,
        ("h-adpsgd", "1 Gbit/s"): PER_NODE,
    }


def test_rows_without_a_matching_single_learner_run_are_refused():
    with pytest.raises(ValueError, match=r"no run of one learner with 1000 weights and steps of 0.3 s"):
        compare(row("adpsgd", 4, "homogeneous", 4.0, step_s=0.3))


def test_rows_of_an_earlier_run_are_read_from_a_file(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [ALONE, row("adpsgd", 4, "homogeneous", 4.0)], "skipped": []}))
    assert scaling_agreement.main(["--rows", str(file), "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)["rows"]
    assert (printed["strategy"], printed["agrees"]) == ("adpsgd", True)
