"""The scaling benchmark's machinery: a tiny run with real processes, its arithmetic, and its network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import netns, scaling
from benchmarks.scaling_probes import descendants, running
from benchmarks.scaling_scenario import Measured, Scenario

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--params", "2000", "--step-s", "0.03", "--slow-params", "2000", "--slow-step-s", "0.03", "--seconds", "0.8"]
COMMAND = [sys.executable, "-m", "benchmarks.scaling", "--json", "--learners", "2", "--disturbed", "2", *TINY]
FIELDS = {
    "strategy": str,
    "learners": int,
    "condition": str,
    "params": int,
    "step_s": float,
    "steps_per_s": float,
    "speedup": float,
    "epoch_ratio": float,
    "cpu_share": float,
}


def start(*words: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def measured(rates: list[float], **changes: object) -> Measured:
    common = {"epoch_s": None, "closings": 0, "index": 80, "accounted": True, "cpu_share": 0.5, "own_share": 0.4}
    return Measured(rates, sum(rates) * 8, **{**common, **changes})


@pytest.mark.slow
def test_tiny_run_has_all_fields_and_its_counts_add_up(tmp_path: Path) -> None:
    words = ["--conditions", "homogeneous", "slow 2x", "--strategies", "adpsgd", "scpsgd", "--closings", "3"]
    child = start(*words, "--epoch-s", "1", "--limit-s", "30", folder=tmp_path)
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    document = json.loads(out)
    rows = document["rows"]
    runs = [(row["strategy"], row["learners"], row["condition"]) for row in rows]
    assert runs == [
        ("single", 1, "homogeneous"),
        *[(name, 2, condition) for condition in ("homogeneous", "slow 2x") for name in ("adpsgd", "scpsgd")],
    ]
    for row in rows:
        assert {name: type(row[name]) for name in FIELDS} == FIELDS
        assert row["accounted"] in ((True,) if row["epochs"] else (None,))
        assert row["steps_per_s"] > 0
    slowed = rows[3]
    assert slowed["epochs"] >= 3
    assert slowed["accounted"]
    assert slowed["failed"] == 0
    assert rows[1]["exchanges_per_step"] > 0
    assert not document["skipped"]
    assert not document["failures"]
    assert not list(tmp_path.iterdir())
    scaling.show(document)


@pytest.mark.slow
def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    child = start("--conditions", "homogeneous", "--strategies", "adpsgd", "--seconds", "60", folder=tmp_path)
    deadline = time.monotonic() + 60
    family: set[int] = set()
    while len(family) < 3 and time.monotonic() < deadline:  # the run's process, the coordinator, a learner
        family |= descendants(child.pid)
        time.sleep(0.05)
    assert len(family) >= 3
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=240)
    while any(map(running, family)) and time.monotonic() < deadline + 30:
        time.sleep(0.05)
    assert not [number for number in family if running(number)]


def test_rows_have_ratios_to_the_reference_runs() -> None:
    alone = scaling.Result(Scenario("single", 1), measured([3.0]))
    base = scaling.Result(Scenario("adpsgd", 4), measured([3.0, 3.0, 3.0, 2.7]))
    slow = scaling.Result(
        Scenario("adpsgd", 4, condition="slow 10x", slow=10.0),
        measured([3.0, 3.0, 3.0, 0.3], epoch_s=1.2, closings=4, cpu_share=0.95, own_share=0.9),
    )
    row = scaling.to_row(base, [alone, base])
    assert (row["speedup"], row["epoch_ratio"], row["note"]) == (3.9, 1.0, "")
    row = scaling.to_row(slow, [alone, base, slow])
    assert row["steps_per_s"] == 3.0  # the slow learner is not one of the others
    assert row["epoch_ratio"] == pytest.approx(1.2 / 80 * 11.7 * 8, abs=1e-3)
    assert row["throughput_ratio"] == pytest.approx(11.7 / 9.3, abs=1e-3)
    assert row["note"] == "the cores are the limit"
    few = replace(slow, measured=replace(slow.measured, closings=2))
    assert scaling.to_row(few, [alone, base, few])["epoch_ratio"] == pytest.approx(11.7 / 9.3, abs=1e-3)


def test_plan_measures_reference_scenarios_first() -> None:
    scenarios = list(scaling.plan(scaling.parse(["--learners", "2", "4"])))
    for number, scenario in enumerate(scenarios):
        before = [scaling.Result(scenario, measured([1.0] * scenario.learners)) for scenario in scenarios[: number + 1]]
        row = scaling.to_row(before[-1], before)
        assert row["speedup"] is not None, scenario
        assert row["epoch_ratio"] is not None, scenario
        assert scenario.strategy != "h-adpsgd" or scenario.nodes > 1
    assert {scenario.condition for scenario in scenarios} == set(scaling.CONDITIONS)


def test_namespaces_are_connected_and_removed_afterwards() -> None:
    if reason := netns.why_not():
        pytest.skip(f"no network namespaces: {reason}")
    # in a child process: the switch moves its thread into another namespace
    script = (
        "import socket, subprocess\n"
        "from benchmarks import netns\n"
        "switch = netns.Switch(2, '100mbit')\n"
        "netns.enter(switch.machines[0])\n"
        "server = socket.create_server((netns.address(0), 0))\n"
        "netns.enter(switch.machines[1])\n"
        "socket.create_connection(server.getsockname(), timeout=10)\n"
        "print(subprocess.run(['tc', 'qdisc', 'show'], capture_output=True, text=True).stdout)\n"
    )
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "tbf" in done.stdout
    assert "100Mbit" in done.stdout
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout == before
