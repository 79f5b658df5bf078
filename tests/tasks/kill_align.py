"""A process that aligns, and is killed after some iterations."""

import json
import os
import signal
import subprocess
import sys


def killed_after(home, document, iterations):
    """Run the stage align of a configuration in another process, which SIGKILLs itself after some iterations."""
    command = [sys.executable, __file__, json.dumps(document), str(iterations)]
    done = subprocess.run(command, env={**os.environ, "STARLING_HOME": str(home)}, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL


def main():
    from tasks.config.pipeline import parse_config
    from tasks.stages import progress
    from tasks.stages.align import ALIGN
    from tasks.stages.base import Run
    from tasks.stages.prepare import PREPARE
    from tasks.stages.shard import SHARD

    document, limit = json.loads(sys.argv[1]), int(sys.argv[2])
    seen = []

    def kill(stage, done, total, note):
        seen.append(note) if "log-likelihood" in note else None
        if len(seen) == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    run = Run(parse_config(document), "killed")
    for stage in (PREPARE, SHARD):
        stage.execute(run)
    with progress.listening(kill):
        ALIGN.execute(run)


if __name__ == "__main__":
    main()
