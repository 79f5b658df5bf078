"""`make gpu-report`: what cannot run is said, a failed or endless step does not stop the others."""

import json
import sys

import numpy as np
import pytest
import soundfile
import yaml

from benchmarks import gpu
from benchmarks.gpu import Place


@pytest.fixture
def place(tmp_path):
    return Place("cpu", tmp_path / "pack", tmp_path / "report")


@pytest.mark.slow
def test_steps_run_as_processes_and_leave_a_report(place, capsys):
    gpu.run(place, ["libri", "probe"], 120.0)
    text = (place.output / "report.md").read_text()
    assert "- libri: not run, no speech in" in text
    assert "- probe: status 0 after" in text
    rows = [json.loads(line) for line in (place.output / "results.jsonl").read_text().splitlines()]
    assert rows[0]["what"] == "machine"
    assert [row["type"] for row in rows[1:]] == ["bf16", "tf32", "fp32"]
    assert "=== probe" in (place.output / "run.log").read_text()
    assert text in capsys.readouterr().out


def test_what_does_not_fit_into_the_time_is_not_run(place):
    gpu.run(place, ["probe"], 14.0)
    assert "- probe: not run, no time left of 14 s" in (place.output / "report.md").read_text()


@pytest.mark.parametrize(
    ("program", "said"), [("time.sleep(60)", "ended by its time limit"), ("sys.exit(3)", "status 3")]
)
def test_a_step_that_hangs_or_fails_is_reported(place, monkeypatch, program, said):
    place.output.mkdir()
    real = gpu.subprocess.Popen
    command = [sys.executable, "-c", f"import sys, time; {program}"]
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda words, **fields: real(command, **fields))
    with (place.output / "run.log").open("wb") as log:
        assert said in gpu._run_step(place, "probe", 1.0 if "sleep" in program else 240.0, {}, log)


def test_one_failed_measurement_is_a_row_and_does_not_stop_the_rest(place):
    place.output.mkdir()
    with place.guarded("a model"):
        raise RuntimeError("no such kernel")
    place.result(what="a model", way="other", step_ms=3.14159265)
    lines = gpu.report(place.output, ["models: status 0 after 1 s"]).splitlines()
    assert lines[2:7] == [
        "a model:",
        "",
        "| error | way | step_ms |",
        "|---|---|---|",
        "| RuntimeError: no such kernel |  |  |",
    ]
    assert lines[7] == "|  | other | 3.1416 |"
    assert lines[-1] == "- models: status 0 after 1 s"


@pytest.mark.parametrize(
    ("step", "strategy", "nodes", "per_node", "named"),
    [("fsdd", "single", 1, 1, 1), ("fsdd4", "adpsgd", 4, 1, 4), ("fsdd2x2", "h-adpsgd", 2, 2, "2 x 2")],
)
def test_a_training_step_has_the_learners_of_its_name(place, monkeypatch, step, strategy, nodes, per_node, named):
    place.output.mkdir()
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, (4, 4000))
    for number, wave in enumerate(noise):
        soundfile.write(place.output / f"{number}.flac", wave, 8000)
    rows = [(f"u{number}", place.output / f"{number}.flac", "one two", "s") for number in range(4)]
    sets = {part: gpu._shards(place.pack / "fsdd" / part, rows, "flac") for part in ("train", "valid")}
    document = yaml.safe_load((gpu.ROOT / "configs/fsdd.yaml").read_text())
    gpu._job(place.pack, "fsdd", sets, document, document["model"])
    jobs = []
    monkeypatch.setattr("training.launch.training_process.run_training", lambda job, *rest: jobs.append(job))
    gpu.STEPS[step][2](place)
    ((cfg,), (row,)) = [[job.train for job in jobs], (place.output / "results.jsonl").read_text().splitlines()]
    assert (cfg.strategy.kind, cfg.nodes, cfg.learners_per_node) == (strategy, nodes, per_node)
    assert json.loads(row)["learners"] == named
    assert "error" not in row


def test_wheels_are_pinned():
    """Each package of the wheels has a version in constraints.txt."""
    pins = {line.partition("==")[0].lower() for line in (gpu.ROOT / "constraints.txt").read_text().splitlines()}
    assert {name.lower() for name in gpu.WHEELS} <= pins
