"""Python runs this at its start if PYTHONPATH names this folder: some work then takes longer, without CPU load.

STARLING_TEST_SLOW_SHARD has the seconds that packing some shards takes longer, STARLING_TEST_SLOW_STEP those of a step
of training. Nothing else is changed.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

WORK = {
    "tasks.stages.shard": (("shard_piece",), "STARLING_TEST_SLOW_SHARD"),
    "training.learner.compute": (("Learner", "update"), "STARLING_TEST_SLOW_STEP"),
}


class Slowly(importlib.abc.MetaPathFinder):
    """Finds one module, and adds a pause before one of its functions."""

    def __init__(self, module, path, seconds):
        self.module, self.path, self.seconds = module, path, seconds

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.slow_down(module)

        spec.loader.exec_module = exec_module
        return spec

    def slow_down(self, owner):
        *outer, name = self.path
        for step in outer:
            owner = getattr(owner, step)
        work = getattr(owner, name)

        def slowly(*args, **kwargs):
            time.sleep(self.seconds)
            return work(*args, **kwargs)

        setattr(owner, name, slowly)


for module, (path, variable) in WORK.items():
    if seconds := float(os.environ.get(variable) or 0):
        sys.meta_path.insert(0, Slowly(module, path, seconds))
