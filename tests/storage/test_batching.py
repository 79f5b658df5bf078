"""The batcher: every utterance once an epoch, bounded, and the same for all learners."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from forks import Forkable
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.batching import BatchError, derive_seed, plan_epoch

seconds = st.floats(0.01, 40.0)
durations = st.lists(seconds, min_size=1, max_size=3) | st.lists(seconds, min_size=40, max_size=120)
epochs = st.none() | st.integers(0, 50)
limits = {"batch_seconds": st.floats(1.0, 200.0), "max_batch": st.integers(1, 40), "bucket_batches": st.integers(1, 8)}


@settings(max_examples=40)
@given(durations=durations, epoch=epochs, seed=st.integers(0, 9), **limits)
def test_each_utterance_is_in_exactly_one_batch(durations, epoch, seed, **limits):
    plan = plan_epoch(durations, seed=seed, epoch=epoch, **limits)
    assert all(len(batch) for batch in plan)
    assert np.sort(np.concatenate(plan)).tolist() == list(range(len(durations)))


@settings(max_examples=40)
@given(durations=durations, epoch=epochs, **limits)
def test_batches_stay_within_their_bounds(durations, epoch, **limits):
    seconds = np.asarray(durations)
    for batch in plan_epoch(durations, epoch=epoch, **limits):
        assert len(batch) <= limits["max_batch"]
        assert len(batch) == 1 or seconds[batch].max() * len(batch) <= limits["batch_seconds"]


@settings(max_examples=20)
@given(durations=durations, epoch=epochs, seed=st.integers(0, 9), **limits)
def test_same_arguments_give_the_same_plan(durations, epoch, seed, **limits):
    first = plan_epoch(durations, seed=seed, epoch=epoch, **limits)
    np.random.seed(seed)  # the plan must not depend on a global generator
    again = plan_epoch(np.asarray(durations), seed=seed, epoch=epoch, **limits)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in again]


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed, epoch):
    durations = np.random.default_rng(0).uniform(1, 10, 200)

    def plan(seed, epoch):
        return [b.tolist() for b in plan_epoch(durations, batch_seconds=40, max_batch=8, seed=seed, epoch=epoch)]

    assert plan(seed, epoch) != plan(seed, epoch + 1)
    assert plan(seed, epoch) != plan(seed + 1, epoch)
    # which utterances form a batch changes, too, not only the order of the batches
    assert {tuple(sorted(b)) for b in plan(seed, epoch)} != {tuple(sorted(b)) for b in plan(seed, epoch + 1)}


def test_a_plan_is_the_same_in_another_process():
    """Python's hash is salted per process: it must not reach the seed."""
    code = (
        "import numpy as np; from storage.batching import plan_epoch;"
        "d = np.linspace(1, 9, 50);"
        "print([b.tolist() for b in plan_epoch(d, batch_seconds=30, max_batch=8, seed=3, epoch=4)])"
    )
    output = subprocess.run([sys.executable, "-c", Forkable(code)], capture_output=True, text=True, check=True).stdout
    here = plan_epoch(np.linspace(1, 9, 50), batch_seconds=30, max_batch=8, seed=3, epoch=4)
    assert output.strip() == str([batch.tolist() for batch in here])


def test_seeds_do_not_change_between_versions():
    """A change here would break the resume of every run under way."""
    digest = hashlib.sha256(b"batches/0/0").digest()
    assert derive_seed("batches", 0, 0) == int.from_bytes(digest[:8], "little") >> 1
    assert derive_seed("step", 1, 23) != derive_seed("step", 12, 3)
    assert 0 <= derive_seed("x") < 2**63


def test_without_an_epoch_batches_are_sorted_by_duration():
    durations = np.random.default_rng(1).uniform(1, 10, 60)
    order = np.concatenate(plan_epoch(durations, batch_seconds=30, max_batch=8))
    assert (np.diff(durations[order]) >= 0).all()


def test_buckets_keep_padding_low():
    durations = np.random.default_rng(2).uniform(1, 20, 2000)
    plan = plan_epoch(durations, batch_seconds=160, max_batch=64, seed=0, epoch=0)
    padded = sum(durations[batch].max() * len(batch) for batch in plan)
    assert durations.sum() / padded > 0.9


def test_long_utterance_forms_a_batch_alone():
    plan = plan_epoch([1.0, 500.0, 1.0], batch_seconds=10, max_batch=8, seed=0, epoch=0)
    assert sorted(sorted(batch.tolist()) for batch in plan) == [[0, 2], [1]]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(bad):
    with pytest.raises(BatchError, match="number 1"):
        plan_epoch([1.0, bad], batch_seconds=10, max_batch=8, epoch=0)


def test_an_empty_set_is_refused():
    with pytest.raises(BatchError, match="empty"):
        plan_epoch([], batch_seconds=10, max_batch=8)
