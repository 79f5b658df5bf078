"""A process that runs stages, and is killed in one of them."""

import json
import os
import re
import signal
import subprocess
import sys


def killed_in(home, document, stage, note, reports=1):
    """Run the stages of a configuration in another process, which SIGKILLs itself while it is in one of them.

    Args:
        home: The data folder; what it has is not made again.
        document: The configuration.
        stage: The stage.
        note: Pattern that a progress report's text contains.
        reports: Number of such reports before the kill.
    """
    command = [sys.executable, __file__, json.dumps([document, stage, note, reports])]
    done = subprocess.run(command, env={**os.environ, "STARLING_HOME": str(home)}, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL


def main():
    from tasks.config.pipeline import parse_config
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages import progress
    from tasks.stages.base import Run

    document, wanted, text, limit = json.loads(sys.argv[1])
    seen = []

    def kill(stage, done, total, note):
        if stage == wanted and re.search(text, note):
            seen.append(note)
        if len(seen) == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    with progress.listening(kill):
        run_plainly(Run(parse_config(document), "killed"), until=wanted)


if __name__ == "__main__":
    main()
