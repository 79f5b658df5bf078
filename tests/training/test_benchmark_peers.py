"""The comparison with other systems: its arithmetic, its emulation, missing systems, and tiny runs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.board import Board
from benchmarks.peers import __main__ as peers
from benchmarks.peers.base import OURS, SYSTEMS, MissingError, System, find
from benchmarks.peers.emulation import SAMPLES, EmulatedModel, sample
from benchmarks.peers.pair import Figures, Measured, Times, advance, longest_pause, progress
from benchmarks.peers.report import ahead, behind, table, to_row
from benchmarks.peers.side import Scenario
from benchmarks.scaling_probes import descendants, running

ROOT = Path(__file__).resolve().parents[2]
FOUR = Scenario("4 learners", 4, 1000, 0.3)
KILL = Scenario("4, one killed", 4, 1000, 0.3, kills=True)
TINY = [
    "--systems",
    "ddp",
    "--learners",
    "2",
    "--params",
    "5000",
    "--step-s",
    "0.05",
    "--windows",
    "1",
    "--warm-s",
    "1",
]


def measured(ours: Figures, theirs: Figures, cpu_share: float = 0.5) -> Measured:
    return Measured(ours, theirs, cpu_share)


def test_each_system_has_a_title_and_starling_is_the_reference():
    titles = [find(name).title for name in SYSTEMS]
    assert len(set(titles)) == len(SYSTEMS)
    assert OURS not in peers.OTHERS
    assert all(issubclass(find(name), System) for name in SYSTEMS)


def test_ratios_say_how_many_times_starling_is_better():
    assert ahead(3.0, 2.0, more_is_better=True) == 1.5
    assert ahead(20.0, 30.0, more_is_better=False) == 1.5
    assert ahead(3.0, 0.0, more_is_better=True) is None
    assert ahead(None, 2.0, more_is_better=False) is None


def test_speeds_are_compared_window_by_window():
    # a busy moment meets both: each window's ratio is 1.2, the medians' is not
    ours = Figures(steps_per_s=[3.0, 1.2, 2.4], cpu_ms=[20.0, 24.0, 22.0], mb=[12.0], distance=0.8)
    theirs = Figures(steps_per_s=[2.5, 1.0, 2.0], cpu_ms=[11.0], mb=[], distance=0.0)
    row = to_row(FOUR, "ddp", [measured(ours, theirs)])
    assert row["starling"]["steps_per_s"] == 2.4
    assert row["ahead"]["steps_per_s"] == pytest.approx(1.2)
    assert row["ahead"]["cpu_ms"] == 0.5
    assert row["theirs"]["mb"] is None
    assert row["ahead"]["mb"] is None
    assert row["note"] == ""
    assert behind([row]) == [
        "4 learners, DDP: CPU ms/step x 0.50",
        "4 learners, DDP: its replicas are equal after each step",
    ]


def test_system_without_steps_has_no_ratio():
    row = to_row(FOUR, "ddp", [measured(Figures([3.0, 3.0], [20.0]), Figures([0.0, 0.0]))])
    assert row["theirs"]["steps_per_s"] == 0
    assert row["ahead"]["steps_per_s"] is None
    assert row["ahead"]["cpu_ms"] is None


def test_repetitions_are_medians_over_all_their_windows():
    runs = [measured(Figures([pace], [10.0]), Figures([1.0], [10.0]), 0.95) for pace in (1.0, 2.0, 5.0)]
    row = to_row(FOUR, "adpsgd", runs)
    assert row["starling"]["steps_per_s"] == 2.0
    assert row["ahead"]["steps_per_s"] == 2.0
    assert row["note"] == "the cores were busy"


@pytest.mark.parametrize(
    ("name", "kept", "ended", "said"),
    [
        ("adpsgd", 0.0, 0, "its survivors stopped, and none of them ended; learners cannot join"),
        ("ddp", 0.0, 3, "its survivors ended; learners cannot join"),
        ("torchft", 0.9, 0, ""),
    ],
)
def test_row_describes_the_effect_of_a_kill(name, kept, ended, said):
    ours = Figures([3.0], [20.0], kept=1.0, pause_s=0.3)
    theirs = Figures([3.0], [20.0], kept=kept, pause_s=12.0, ended=ended)
    row = to_row(KILL, name, [measured(ours, theirs)])
    assert row["note"] == said
    assert row["ahead"]["pause_s"] == 40.0
    assert row["ahead"]["kept"] == (None if not kept else pytest.approx(1 / kept, abs=1e-3))


def test_tables_are_of_training_and_of_failures():
    calm = to_row(FOUR, "ddp", [measured(Figures([3.0], [20.0], [8.0], 0.5), Figures([2.0], [10.0], [4.0], 0.0))])
    killed = to_row(KILL, "adpsgd", [measured(Figures([3.0], kept=1.0, pause_s=0.3), Figures([3.0], kept=0.0))])
    text = table([calm, killed])
    assert (
        "| 4 learners | DDP | 3.00 / 2.00 (x 1.50) | 20.0 / 10.0 (x 0.50) | 8.00 / 4.00 (x 0.50) | 0.50 / 0.00 |"
        in text
    )
    assert "| 4, one killed | SGP AD-PSGD | 1.00 / 0.00 | 0.30 / – | – / – | – / – |" in text
    assert text.count("| condition |") == 2


def test_progress_counts_fractions_of_steps_except_of_hanging_ones():
    stamps = np.array([1.0, 2.0, 3.0, 5.0])
    assert progress(stamps, 0.5) == 0
    assert progress(stamps, 2.5) == pytest.approx(2.5)
    assert progress(stamps, 4.0) == pytest.approx(3.5)
    assert progress(stamps, 6.0) == pytest.approx(4.5)  # half of a step as long as the last one
    assert progress(stamps, 50.0) == 4
    assert progress(np.array([]), 1.0) == 0


def test_step_longer_than_a_window_gives_no_negative_progress():
    stamps = np.array([1.0, 2.0, 30.0])
    assert advance(stamps, 3.0, 4.0) == pytest.approx(1 / 28)
    assert advance(stamps[:2], 2.5, 20.0) == 0  # its share was guessed when the window began
    assert advance(stamps, 0.0, 2.0) == 2


def test_longest_pause_includes_the_time_after_the_last_step():
    assert longest_pause([1.0, 1.5, 2.0], began=1.2, ended=2.2) == pytest.approx(0.5)
    assert longest_pause([1.0, 1.5, 2.0], began=1.2, ended=9.0) == pytest.approx(7.0)
    assert longest_pause([], began=1.0, ended=4.0) == pytest.approx(3.0)


def test_windows_hold_some_steps_of_the_slow_learner():
    times = Times(window_s=3.0, windows=3)
    assert times.fit(FOUR) == times
    slow = times.fit(Scenario("slow", 4, 1000, 0.05, slow=100.0))
    assert slow.window_s == pytest.approx(20.0)
    assert slow.windows == 1


def test_options_make_scenarios():
    options = peers.parse(["--conditions", "kill", "8", "large", "--learners", "3", "--exchange", "per_step=1"])
    assert [(scenario.name, scenario.learners, scenario.kills) for scenario in peers.scenarios(options)] == [
        ("6 learners", 6, False),
        ("3, 43 M", 3, False),
        ("3, one killed", 3, True),
    ]
    assert options.exchange == {"per_step": "1"}


@pytest.mark.parametrize("words", [["--exchange", "per_stp=1"], ["--learners", "1"], ["--step-s", "0"]])
def test_invalid_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        peers.parse(words)
    assert words[0] in capsys.readouterr().err


def test_missing_system_is_reported_with_how_to_install_it(tmp_path, monkeypatch):
    for module in ("hivemind", "torchft"):
        monkeypatch.setitem(sys.modules, module, None)
    before = torch.Tensor.cuda
    remedies = {"adpsgd": "--sgp", "pushsum": "--sgp", "hivemind": "--peers-python", "torchft": "--peers-python"}
    for name, remedy in remedies.items():
        with pytest.raises(MissingError, match=remedy):
            find(name).prepare(None)
    with pytest.raises(MissingError, match="has no gossip"):
        find("adpsgd").prepare(tmp_path)
    assert torch.Tensor.cuda is before  # nothing pretends to be a GPU here


def test_emulated_gradients_take_the_configured_time_and_differ():
    models = [EmulatedModel(3000, 0.05, seed) for seed in (0, 1)]
    began = time.monotonic()
    for model in models:
        model(None).backward()
    assert time.monotonic() - began >= 0.1
    grads = [torch.cat([part.grad for part in model.parts]) for model in models]
    assert all(grad.numel() == 3000 for grad in grads)
    assert all(0.9 < float(grad.var()) < 1.1 for grad in grads)
    assert float((grads[0] - grads[1]).abs().mean()) > 0.5
    first = grads[0].clone()
    models[0].zero_grad()
    models[0](None).backward()
    assert not torch.equal(torch.cat([part.grad for part in models[0].parts]), first)


@pytest.mark.parametrize("sizes", [[5], [700, 700, 3], [1_000_000] * 8])
def test_number_of_sampled_weights_is_the_same_for_any_model(sizes):
    sampled = sample([torch.full((size,), float(number + 1)) for number, size in enumerate(sizes)])
    assert sampled.shape == (SAMPLES,)
    assert set(sampled.tolist()) - {0.0} == {float(number + 1) for number in range(len(sizes))}


def test_board_in_a_file_is_shared_by_all_that_open_it(tmp_path):
    ours, theirs = (Board(tmp_path / "board", extra=3) for _ in range(2))
    assert not ours.ready
    theirs.set_ready()
    theirs.step()
    theirs.step()
    theirs.extra[2] = 7.0
    assert ours.ready
    assert len(ours.stamps()) == 2
    assert np.all(np.diff(ours.stamps()) >= 0)
    assert ours.extra.tolist() == [0.0, 0.0, 7.0]


def start(*words: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers", "--json", *TINY, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tiny_pair_trains_concurrently_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = peers.run(peers.parse([*TINY, "--conditions", "4", "--window-s", "0.5"]))
    assert json.loads(json.dumps(document)) == document
    assert not document["failures"]
    assert not document["skipped"]
    (row,) = document["rows"]
    assert (row["condition"], row["peer"], row["learners"]) == ("2 learners", "ddp", 2)
    for side in ("starling", "theirs"):
        assert row[side]["steps_per_s"] > 0
        assert row[side]["cpu_ms"] is not None
        assert (row[side]["mb"] is not None) == document["own_network"]
    assert row["starling"]["distance"] > 0
    assert row["theirs"]["distance"] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_starling_continues_after_a_kill_and_ddp_ends(tmp_path):
    child = start("--conditions", "kill", "--window-s", "2", "--kill-s", "6", "--learners", "3", folder=tmp_path)
    out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["note"].endswith("its survivors ended; learners cannot join")
    assert row["starling"]["kept"] > 0
    assert row["theirs"]["kept"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_process(number, tmp_path):
    child = start("--conditions", "4", "--window-s", "600", folder=tmp_path)
    deadline = time.monotonic() + 240
    family: set[int] = set()
    while len(family) < 9 and time.monotonic() < deadline:  # two stages, coordinator, its parent, daemons, learners
        family |= descendants(child.pid)
        time.sleep(0.05)
    assert len(family) >= 9
    child.send_signal(number)
    child.communicate(timeout=120)
    while any(map(running, family)) and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert not [pid for pid in family if running(pid)]
