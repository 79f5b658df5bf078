"""The process of one rank, started by `training.node.agent`: joins its node, ring and coordinator, and trains."""

import os
import signal
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from training.processes import logs
from training.processes.children import end_with_parent, exit_at_once
from training.processes.exit_reason import leave_reason, run_with_reason

STOPPED, DIVERGED = 75, 3
START = "STARLING_START"
"""Environment variable: token that the learners of a machine share, unique to this start of the node."""
GAVE_UP = "gave-up.txt"
"""File in a node's folder that says why a restart would not help: torchrun hides the ranks' exit statuses."""
WAS_STOPPED = "stopped"
"""What it says if the ranks were stopped."""


class NodeSetup(BaseModel):
    """What the ranks of a node need to know besides the job; the node's agent writes it as a JSON file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: int
    coordinator: str
    """HOST:PORT of the coordinator."""
    key_file: Path | None
    folder: Path
    bind_host: str = "127.0.0.1"
    advertise_host: str = ""
    machine: int = 0
    """Number of this machine within the node."""
    machines: int = 1
    """Machines of the node."""
    first_gpu: int = 0
    """Number of the GPU of this machine's first learner, where several nodes share a machine."""
    learners_here: int = 0
    """Learners on this machine, which share its cores; 0 means those of this node only."""
    shared_files: str = ""
    """Name prefix of the files that all nodes of this machine share (hogwild's weights); local nodes only."""


def main(argv: list[str]) -> int:
    """Run one rank.

    Args:
        argv: File of the setup, and PID of the process to exit with.

    Returns:
        0 when training is over, 75 if it was stopped, 3 if a restart would not help: training diverged, too many shards
        are damaged, the GPU is too small, or the model cannot be split as configured.
    """
    setup_file, parent = Path(argv[0]), int(argv[1])
    # torchrun counts the ranks of this machine only
    number, here = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun's agent is between a rank and its node: when that agent is gone, nothing else ends the rank
    end_with_parent(parent if here == 1 else os.getppid(), signal.SIGKILL)
    setup = NodeSetup.model_validate_json(setup_file.read_bytes())
    rank = setup.machine * here + number
    logs.setup(f"[rank {rank}]", rank=str(rank))
    from training.job import TrainJob
    from training.node.rendezvous import RankPlacement
    from training.node.run_rank import run_rank

    job = TrainJob.model_validate_json((setup.folder / "job.json").read_bytes())
    status = run_rank(job, setup, RankPlacement(rank, here * setup.machines, os.environ[START]), here)
    return status if here == 1 else status_below_torchrun(status, setup.folder)


def status_below_torchrun(status: int, folder: Path) -> int:
    """The exit status of one of several ranks, for torchrun.

    Any other than 0 is a failure to it: it would end the other ranks, although they write their last checkpoint. That
    they were stopped is left in a file for the node's agent.

    Args:
        status: The rank's own status.
        folder: The node's folder.
    """
    if status != STOPPED:
        return status
    leave_reason(WAS_STOPPED, folder / GAVE_UP)
    return 0


if __name__ == "__main__":
    exit_at_once(run_with_reason(lambda: main(sys.argv[1:]), DIVERGED))
