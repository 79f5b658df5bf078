"""Slows the learners of nodes in this process and its children; an interpreter runs this when it starts.

`STARLING_SLOW_NODES` says which: "0:8,2:10" makes node 0 eight times slower and node 2 ten times. The slow learners
sleep after every gradient, in proportion to the CPU time since the last one. See `slow_nodes` in tests/support.py.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

SLOWED = "training.node.worker"
FACTORS = dict(item.split(":") for item in os.environ.get("STARLING_SLOW_NODES", "").split(",") if item)


class Slowing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes the worker's module when it is imported."""

    def find_spec(self, name, *_):
        if name != SLOWED:
            return None
        sys.meta_path.remove(self)
        self.spec = importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, self, origin=self.spec.origin)

    def create_module(self, spec):
        return self.spec.loader.create_module(spec)

    def exec_module(self, module):
        self.spec.loader.exec_module(module)
        make = module.Worker.__init__

        def make_slow(worker, job, node, learner, *others):
            factor = float(FACTORS.get(str(node), 1))
            if factor > 1:
                learner.gradient = slowed(learner.gradient, factor)
            make(worker, job, node, learner, *others)

        module.Worker.__init__ = make_slow


def slowed(gradient, factor):
    """The function, followed by a sleep of (factor - 1) times the thread's CPU time since the last sleep."""
    rested = None

    def wrapped(*arguments):
        nonlocal rested
        outcome = gradient(*arguments)
        if rested is not None:
            time.sleep((time.thread_time() - rested) * (factor - 1))
        rested = time.thread_time()
        return outcome

    return wrapped


if FACTORS:
    sys.meta_path.insert(0, Slowing())
