"""The program that runs the engine's processes: one that knows tasks starts each of them by itself.

The engine's modules are programs, `python -m training.node.rank …`, but know no task by themselves. A program that does
registers them in `training.learner.task.TASKS`, calls `run_by` with its own name, and runs the module that it is given.
All processes are then started by it: `python -m PROGRAM training.node.rank …`.
"""

import sys

_program: list[str] = []


def run_by(module: str) -> None:
    """Start further processes by a program.

    Args:
        module: The program's module; it runs the module that is its first argument.
    """
    _program[:] = [module]


def engine_command(module: str, *words: str) -> list[str]:
    """The command line of one of the engine's processes.

    Args:
        module: The process's module.
        words: Its arguments.
    """
    return [sys.executable, *engine_words(module, *words)]


def engine_words(module: str, *words: str) -> list[str]:
    """As `engine_command`, without the interpreter."""
    return ["-m", *_program, module, *words]
