"""The examples run, and their learners train every row."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support import ROOT

EXAMPLE = str(ROOT / "examples" / "tabular.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
ONE_JOB = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "table", "--rdzv-endpoint", "127.0.0.1:29514"]
ONE_JOB += ["--local-addr", "127.0.0.1"]
LINE = re.compile(r"node (\d+): (\d+) rows in (\d+) steps, loss ([\d.]+)")


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def epochs_of(folder):
    lines = map(json.loads, (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["epoch"]: line for line in lines if line["kind"] == "epoch"}


@pytest.mark.slow
@pytest.mark.real_interpreter
def test_four_processes_train_every_row_although_one_is_killed(tmp_path):
    process = run(EXAMPLE, str(tmp_path), "--processes", "4", "--kill", "--epochs", "6")
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    assert "one process is killed" in out
    assert re.search(r"^node \d was lost after \d+ s: no heartbeat for 3 s$", out, re.MULTILINE), out[-3000:]
    repeated = sum(line["repeated"] for line in epochs_of(tmp_path).values())
    assert f"{repeated} rows were repeated" in out
    lines = LINE.findall(out)
    assert len(lines) == 3, out[-3000:]
    assert max(float(loss) for *_, loss in lines) < 0.2
    assert {line["utterances"] for line in epochs_of(tmp_path).values()} == {2000}
    assert len(epochs_of(tmp_path)) == 6


@pytest.mark.slow
@pytest.mark.real_interpreter
@pytest.mark.parametrize(
    "options",
    [
        [["--master-port", "29511"], ["--master-port", "29512"]],
        [[*ONE_JOB, "--node-rank", rank] for rank in "01"],
    ],
    ids=["two jobs", "one job"],
)
def test_two_nodes_of_two_ranks_under_torchrun_train_every_row(tmp_path, options):
    agents = [run(*TORCHRUN, *words, EXAMPLE, str(tmp_path), "--nodes", "2", "--epochs", "4") for words in options]
    outs = [agent.communicate(timeout=500)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outs)[-6000:]
    printed = [LINE.findall(out) for out in outs]
    assert [len(lines) for lines in printed] == [2, 2], "\n".join(outs)[-6000:]
    rows = sum(int(rows) for lines in printed for _, rows, *_ in lines)
    assert rows == 4 * 2000
    assert {node for lines in printed for node, *_ in lines} == {"0", "1"}
    for lines in printed:  # the learners of a node have the same weights
        assert len({loss for *_, loss in lines}) == 1
        assert float(lines[0][-1]) < 0.3
    assert sum(line["repeated"] for line in epochs_of(tmp_path).values()) == 0


@pytest.mark.slow
@pytest.mark.real_interpreter
def test_other_node_trains_every_row_after_a_rank_is_killed(tmp_path):
    words = [EXAMPLE, str(tmp_path), "--nodes", "2", "--epochs", "8"]
    agents = [run(*TORCHRUN, "--master-port", port, *words) for port in ("29515", "29516")]
    deadline = time.monotonic() + 300
    journal = tmp_path / "journal.jsonl"
    while not (journal.exists() and '"kind": "epoch"' in journal.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline, "no epoch was trained"
        time.sleep(0.05)
    learner = next(child for child in psutil.Process(agents[1].pid).children() if EXAMPLE in child.cmdline())
    learner.send_signal(signal.SIGKILL)
    outs = [agent.communicate(timeout=500)[0] for agent in agents]
    assert (agents[0].returncode, agents[1].returncode != 0) == (0, True), "\n".join(outs)[-6000:]
    lines = LINE.findall(outs[0])
    assert len(lines) == 2, outs[0][-3000:]
    assert len({loss for *_, loss in lines}) == 1
    assert float(lines[0][-1]) < 0.2
    assert {line["utterances"] for line in epochs_of(tmp_path).values()} == {2000}
    assert len(epochs_of(tmp_path)) == 8
