"""Staleness of averages, and when deltas are handed over: the mailbox, without processes."""

import torch
from emulated_exchange import CHUNK, SIZE, Learner, Network


def test_staleness_counts_own_steps_since_the_snapshot_in_use():
    one, two = Learner(1), Learner(2)
    net = Network([one, two])
    net.exchange(0, 1, 0)
    one.poll()
    for step in range(1, 4):
        one.outside.tick(step)
    one.outside.take()
    assert one.outside.stats().staleness == 4  # at the update of step 4


def test_staleness_counts_from_the_weights_of_the_request():
    one, two = Learner(1), Learner(2)
    net = Network([one, two])
    net.ask(0, 1, 0)
    one.step = 3
    one.give()
    one.inside.poll()
    net.answer(0)
    net.settle(0)
    one.outside.tick(3)
    one.poll()
    one.take()
    assert one.outside.stats().staleness == 4


def test_deltas_are_held_until_requested_and_then_handed_over_together():
    one, two = Learner(1), Learner(2)
    net = Network([one, two])
    mailbox = one.outside._mailbox
    assert not mailbox.demand()  # there is nothing to be had
    for chunk in range(3):
        net.exchange(0, 1, chunk)
        one.inside.poll()
        assert not mailbox.delta_waits()
    assert mailbox.demand()
    assert not mailbox.demand()  # once is enough
    assert not mailbox.met()
    one.inside.poll()
    assert mailbox.met()
    one.take()
    assert torch.equal(one.live.double(), (one.exact + two.exact) / 2)
    assert one.outside.stats().staleness == 1


def test_staleness_counts_from_the_oldest_snapshot_that_a_delta_was_computed_from():
    one, two = Learner(1), Learner(2)
    net = Network([one, two])
    for chunk, step in ((0, 2), (1, 5), (0, 7)):
        one.step = step
        assert one.give()
        one.inside.poll()
        net.exchange(0, 1, chunk)
    one.outside.tick(9)
    one.poll()
    one.take()
    assert one.outside.stats().staleness == 8
    net.exchange(0, 1, 2)
    one.poll()
    one.take()
    assert one.outside.stats().staleness == 3


def test_delta_has_only_the_chunks_exchanged_for_it():
    """Its memory has held an older one."""
    one, two = Learner(1), Learner(2)
    net = Network([one, two])
    for chunk in (0, 1, 2):
        net.exchange(0, 1, chunk)
        one.poll()
        delta = one.outside.take().clone()
        one.live += delta
        one.outside.release()
        outside = torch.ones(SIZE, dtype=torch.bool)
        outside[chunk * CHUNK : (chunk + 1) * CHUNK] = False
        assert not delta[outside].any()
        assert delta[~outside].all()
    assert torch.equal(one.working(), one.live)
