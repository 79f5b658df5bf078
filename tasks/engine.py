"""Runs a process of the training engine that knows what Starling trains: `python -m tasks.engine training.node.rank …`.

It needs neither Prefect nor MLflow.
"""

import runpy
import sys
from collections.abc import Mapping

from pydantic import BaseModel

from training.learner import task
from training.processes.children import run_by

_ENGINE = "training."


def know_tasks() -> None:
    """Make this process know Starling's tasks, and all processes of the engine that it starts."""
    task.know_tasks(_configs)
    run_by("tasks.engine")


def _configs() -> Mapping[str, type[BaseModel]]:
    from recognition.systems import TASK_CONFIGS

    return TASK_CONFIGS


def main() -> None:
    """Run the module that the first argument names, with the others as its own."""
    module = sys.argv[1] if len(sys.argv) > 1 else ""
    if not module.startswith(_ENGINE):
        raise SystemExit(f"tasks.engine runs the modules of the training engine, and {module!r} is none of them")
    know_tasks()
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
