"""A stage that waited for another run with the same output said that its own work had taken all that time."""

import threading

import pytest
from support import tiny_document

from tasks.config.pipeline import parse_config
from tasks.locking import slots
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import machine_lock, training_slot, waits_counted
from tasks.stages import base
from tasks.stages.base import Run, Stage, StageResult, lock_path


@pytest.fixture
def now(clock):
    """The time, which the test sets."""
    return clock(base, slots)


def test_waiting_for_the_lock_is_said_apart(home, now):
    run = Run(parse_config(tiny_document()), "mine")

    def work(run, output):
        now[0] += 2.0
        with training_slot(run.config, run.holder):  # a free one
            now[0] += 1.0
        return {"counts": {"things": 3}}

    stage = Stage("prepare", 1, lambda run: ({"x": 1}, {}), work)
    path = lock_path("prepare", stage.output(run).key)
    free, held = threading.Event(), threading.Event()

    def other():
        with machine_lock([path], "the output", run.config.slots, LockOwner.here("other")):
            held.set()
            free.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(60)

    def say(stage, text):
        if "waiting for run other" in text:
            now[0] += 40.0
            free.set()

    with base.progress.following(say):
        result = stage.execute(run)
    thread.join(60)
    assert (result.seconds, result.waited_s) == (3.0, 40.0)
    assert result.line == "3 things (3.0 s, after waiting 40 s)"


def test_short_waits_are_not_mentioned():
    result = StageResult("prepare", "k", "memory://x", 2.0, True, {"things": 1}, {}, waited_s=0.02)
    assert result.line == "1 thing (cached)"


def test_waiting_of_another_block_is_not_counted(home, now):
    config = parse_config(tiny_document())
    with waits_counted() as outer, waits_counted() as inner:
        pass
    with training_slot(config, LockOwner.here("mine")):  # outside of all blocks
        now[0] += 5.0
    assert (outer.seconds, inner.seconds) == (0.0, 0.0)
