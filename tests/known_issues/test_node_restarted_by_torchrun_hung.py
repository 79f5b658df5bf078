"""The processes that torchrun started again after one had died found the addresses of the earlier ones, and waited."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from support import ROOT

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import torch
    from starling import Ring

    folder, first = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 0
    with Ring(model, optimizer, folder=folder / "ring") as ring:
        for _, _, part in ring.leases([20, 20], batch=2):
            if first and os.environ["LOCAL_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(len(part), 2)).square().sum().backward()
            optimizer.step()
            rows += len(part)
    (folder / f"rows-{os.environ['LOCAL_RANK']}").write_text(str(rows))
    """
)


@pytest.mark.slow
@pytest.mark.real_interpreter
def test_node_restarted_by_torchrun_trains(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*torchrun, "--master-port", "29513", str(tmp_path / "program.py"), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as agent:
        try:
            _, errors = agent.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGTERM)  # torchrun ends its processes
            raise
    assert agent.returncode == 0, errors[-3000:]
    assert sum(int((tmp_path / f"rows-{rank}").read_text()) for rank in range(2)) == 40
