"""Staleness of averages, and when deltas are handed over: the mailbox, without processes."""

import torch
from emulated_exchange import CHUNK, SIZE, Learner, Network


def test_staleness_counts_own_steps_since_the_snapshot_in_use():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    net.exchange(0, 1, 0)
    first.poll()
    for step in range(1, 4):
        first.outside.tick(step)
    first.outside.take()
    assert first.outside.stats().staleness == 4  # at the update of step 4


def test_staleness_counts_from_the_weights_of_the_request():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    net.ask(0, 1, 0)
    first.step = 3
    first.give()
    first.inside.poll()
    net.answer(0)
    net.settle(0)
    first.outside.tick(3)
    first.poll()
    first.take()
    assert first.outside.stats().staleness == 4


def test_deltas_are_held_until_requested_and_then_handed_over_together():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    mailbox = first.outside._mailbox
    assert not mailbox.demand()  # there is nothing to be had
    for chunk in range(3):
        net.exchange(0, 1, chunk)
        first.inside.poll()
        assert not mailbox.delta_waits()
    assert mailbox.demand()
    assert not mailbox.demand()  # once is enough
    assert not mailbox.met()
    first.inside.poll()
    assert mailbox.met()
    first.take()
    assert torch.equal(first.live.double(), (first.exact + second.exact) / 2)
    assert first.outside.stats().staleness == 1


def test_staleness_counts_from_the_oldest_snapshot_that_a_delta_was_computed_from():
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    for chunk, step in ((0, 2), (1, 5), (0, 7)):
        first.step = step
        assert first.give()
        first.inside.poll()
        net.exchange(0, 1, chunk)
    first.outside.tick(9)
    first.poll()
    first.take()
    assert first.outside.stats().staleness == 8
    net.exchange(0, 1, 2)
    first.poll()
    first.take()
    assert first.outside.stats().staleness == 3


def test_delta_has_only_the_chunks_exchanged_for_it():
    """Its memory has held an older one."""
    first, second = Learner(1), Learner(2)
    net = Network([first, second])
    for chunk in (0, 1, 2):
        net.exchange(0, 1, chunk)
        first.poll()
        delta = first.outside.take().clone()
        first.live += delta
        first.outside.release()
        outside = torch.ones(SIZE, dtype=torch.bool)
        outside[chunk * CHUNK : (chunk + 1) * CHUNK] = False
        assert not delta[outside].any()
        assert delta[~outside].all()
    assert torch.equal(first.working(), first.live)
