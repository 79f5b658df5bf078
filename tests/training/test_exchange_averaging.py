"""The half-difference rule and the mailbox, without processes: nothing is lost in any order of events."""

import random
import time

import numpy as np
import pytest
import torch
from emulated_exchange import SIZE, BareDevice, Learner, Network
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wait_until

from training.exchange.messages import Wire

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["gradient", "take", "give", "poll", "want", "ask", "ask", "answer", "answer", "settle"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    ),
    min_size=60,
    max_size=160,
)


@settings(max_examples=25)
@given(count=st.integers(2, 5), wire=st.sampled_from(["fp32", "bf16"]), events=EVENTS)
def test_sum_of_weights_is_conserved_in_any_interleaving(count, wire, events):
    learners = [Learner(i, wire) for i in range(count)]
    net = Network(learners)
    for kind, a, b in events:
        learner = learners[a % count]
        if kind in ("gradient", "take", "give"):
            getattr(learner, kind)()
        elif kind == "poll":
            learner.inside.poll()
            learner.check()
        elif kind == "want":
            learner.outside._mailbox.demand()
        elif kind == "ask" and count > 1:
            net.ask(a % count, (a + 1 + b % (count - 1)) % count, b % learner.inside.chunks)
        elif kind == "answer" and net.requests:
            net.answer(b)
        elif kind == "settle" and net.replies:
            net.settle(b)
    net.quiesce()
    live = sum(learner.live.double() for learner in learners)
    exact = sum(learner.exact for learner in learners)
    assert torch.allclose(live, exact, rtol=0, atol=1e-2)
    for learner in learners:
        assert learner.give()
        learner.inside.poll()
        assert torch.equal(learner.working(), learner.live)
        learner.close()


@pytest.mark.parametrize("seed", range(3))
def test_device_receives_every_average_once_during_asynchronous_copies(seed):
    chance = random.Random(seed)
    learners = [Learner(number, outside=BareDevice) for number in range(3)]
    net = Network(learners)
    for _ in range(600):
        learner, other = chance.sample(range(3), 2)
        event = chance.choice(["gradient", "take", "give", "poll", "poll", "ask", "ask", "answer", "settle", "pass"])
        if event == "poll":
            learners[learner].inside.poll()
            learners[learner].check()
        elif event == "ask":
            net.ask(learner, other, chance.randrange(3))
        elif event in ("answer", "settle"):
            if waiting := net.requests if event == "answer" else net.replies:
                getattr(net, event)(chance.randrange(len(waiting)))
        elif event == "pass":
            time.sleep(0.001)
        else:
            getattr(learners[learner], event)()

    def at_rest():
        net.quiesce()
        for learner in learners:
            learner.inside.use()  # a newer snapshot is welcome
            learner.give()
        return all(torch.equal(learner.working(), learner.live) for learner in learners)

    wait_until(at_rest, every_s=0.002)
    live, exact = sum(learner.live.double() for learner in learners), sum(learner.exact for learner in learners)
    assert torch.allclose(live, exact, rtol=0, atol=1e-2)
    for learner in learners:
        learner.close()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_both_sides_add_exactly_opposite_deltas(wire):
    first, second = Learner(1, wire), Learner(2, wire)
    for learner in (first, second):
        learner.live.copy_(torch.randn(SIZE))
        learner.give()
        learner.inside.poll()
    net = Network([first, second])
    for chunk in range(first.inside.chunks):
        net.ask(0, 1, chunk)
        net.answer(0)
        net.settle(0)
    deltas = []
    for learner in (first, second):
        learner.poll()
        deltas.append(learner.outside.take().clone())
    assert torch.equal(deltas[0], -deltas[1])
    assert deltas[0].abs().min() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_chunk_with_nan_or_inf_is_skipped_by_both_sides(bad, side, wire):
    learners = [Learner(1, wire), Learner(2, wire)]
    learners[side].live[5] = bad  # in the second of three chunks
    net = Network(learners)
    for learner in learners:
        learner.give()
        learner.inside.poll()
    for chunk in range(3):
        net.ask(0, 1, chunk)
        net.answer(0)
        net.settle(0)
    assert [learner.inside.skipped for learner in learners] == [1, 1]
    for learner in learners:
        learner.poll()
        delta = learner.outside.take()
        assert torch.all(delta[4:8] == 0)
        assert torch.isfinite(delta).all()
        assert delta[:4].abs().sum() > 0


def test_differences_that_overflow_fp32_are_skipped_by_both_sides():
    learners = [Learner(1), Learner(2)]
    for learner, value in zip(learners, (3e38, -3e38), strict=True):
        learner.live[:] = value
        learner.give()
        learner.inside.poll()
    net = Network(learners)
    net.exchange(0, 1, 0)
    assert [learner.inside.skipped for learner in learners] == [1, 1]


def test_large_finite_differences_are_averaged_although_their_squares_overflow():
    learners = [Learner(1), Learner(2)]
    for learner, value in zip(learners, (1e30, -1e30), strict=True):
        learner.live[:] = value
        learner.give()
        learner.inside.poll()
    net = Network(learners)
    net.ask(0, 1, 0)
    net.quiesce()
    assert learners[0].live[0] == learners[1].live[0] == 0


def test_delta_missing_in_the_snapshot_stays_in_the_working_copy():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    for chunk in range(3):
        net.ask(0, 1, chunk)
    for _ in range(3):
        net.answer(0)
        net.settle(0)
    mean = (first.exact + second.exact) / 2
    first.poll()  # the delta is offered, not taken
    assert first.give()  # a snapshot without it
    first.inside.poll()
    for chunk in range(3):
        assert np.allclose(first.inside.weights(chunk), mean[chunk * 4 : chunk * 4 + 4])
    first.take()
    assert first.give()  # now it has it
    first.inside.poll()
    for chunk in range(3):
        assert np.allclose(first.inside.weights(chunk), mean[chunk * 4 : chunk * 4 + 4])


def test_delta_taken_while_an_older_snapshot_waits_is_kept():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    net.exchange(0, 1, 0)
    first.poll()
    first.give()  # waits, without the delta
    first.take()
    net.exchange(0, 1, 1)  # the next delta is gathered meanwhile
    first.inside.poll()
    mean = (first.exact + second.exact) / 2
    assert np.allclose(first.inside.weights(0), mean[:4])
    assert np.allclose(first.inside.weights(1), mean[4:8])


def test_new_weights_discard_pending_and_gathered_deltas():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    net.exchange(0, 1, 0)
    first.poll()
    net.exchange(0, 1, 1)
    fresh = torch.arange(SIZE, dtype=torch.float32)
    first.outside.start(fresh, 5)
    first.poll()
    assert not first.outside.ready()
    assert np.array_equal(np.concatenate([first.inside.weights(c) for c in range(3)]), fresh.numpy())
    first.poll()
    assert not first.outside.ready()


def test_reset_while_the_slot_is_full_takes_effect_with_the_next_snapshot():
    learner = Learner(1)
    assert learner.give()
    assert not learner.give()  # full
    fresh = torch.zeros(SIZE)
    learner.outside.start(fresh, 0)
    learner.inside.poll()
    before = learner.inside.generation
    assert learner.outside.give(fresh, 1)
    learner.inside.poll()
    assert learner.inside.generation == before + 1
    assert not learner.inside.weights(0).any()


def test_delta_taken_during_a_poll_stays_in_the_working_copy():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    net.exchange(0, 1, 0)
    first.poll()  # offers the first delta
    net.exchange(0, 1, 1)  # the second one is gathered
    load = first.inside._load

    def load_then_train():
        loaded = load()
        assert first.give()  # a snapshot that lacks the first delta
        first.take()
        return loaded

    first.inside._load = load_then_train
    first.poll()
    first.inside._load = load
    net.exchange(1, 0, 2)  # where the first delta was, if that memory were free by now
    mean = (first.exact + second.exact) / 2
    first.inside.poll()
    assert torch.equal(first.working().double(), mean)
    first.drain()
    assert torch.equal(first.live.double(), mean)


def test_delta_of_old_weights_is_not_added_to_new_weights():
    first, second = Learner(1), Learner(2)
    Network([first, second]).exchange(0, 1, 0)
    first.poll()  # offered, and not taken
    fresh = torch.arange(SIZE, dtype=torch.float32)
    first.outside.start(fresh, 5)
    first.inside.poll()
    for step in (6, 7):
        assert first.outside.give(fresh, step)  # still without a look at what waits
        first.inside.poll()
        assert torch.equal(first.working(), fresh)
    assert not first.outside.ready()


@given(values=st.lists(st.floats(width=32, allow_nan=True), min_size=20, max_size=80))
@settings(max_examples=20)
def test_bf16_is_rounded_to_nearest_and_keeps_nan_and_inf(values):
    array = np.array(values, np.float32)
    wire = Wire("bf16", len(array))
    raw = bytearray(2 * len(array))
    wire.encode(array, raw)
    ours, theirs = wire.decode(raw), torch.from_numpy(array).bfloat16().float().numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(array))
    known = ~np.isnan(array)
    with np.errstate(invalid="ignore"):
        step = np.abs(np.nextafter(theirs[known], np.inf) - theirs[known]) * 2**16
        same = (ours[known] == theirs[known]) | (np.abs(ours[known] - theirs[known]) <= step)  # ties may differ
    assert same.all()


def test_weights_of_another_shape_or_type_are_refused():
    learner = Learner(1)
    for wrong in (torch.zeros(SIZE + 1), torch.zeros(SIZE).double(), torch.zeros(2, 5), torch.zeros(2 * SIZE)[::2]):
        with pytest.raises(ValueError, match="contiguous fp32"):
            learner.outside.give(wrong, 0)
