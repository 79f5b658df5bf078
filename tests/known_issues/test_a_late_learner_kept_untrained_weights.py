"""Learners of a ring that come after the others: they take the trained weights, or fail; they never keep their own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forks
import pytest
import torch
from support import load_beside
from torch import nn

from storage.objects import ObjectStore
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core, Settings
from training.coordinator.messages import CoordinatorError, LeaveRequest
from training.coordinator.server import open_ledger
from training.ring.config import RingConfig
from training.ring.folder import ring_job
from training.ring.learner import RingError
from training.ring.ring import Ring

books = load_beside(__file__, "../training/bookkeeping.py")
join, beat = books.join, books.beat
DATA = {"counts": [4], "epochs": 1}


def ring_coordinator(folder):
    settings, clock = Settings.from_job(ring_job(folder, RingConfig())), books.Clock()
    return Coordinator(
        Core(settings, open_ledger(settings), ObjectStore(settings.output_url), clock, clock), True
    ), clock


def trained_to_the_end(coordinator, *nodes):
    """Nodes join and train everything; returns the coordinator."""
    for node in nodes:
        join(coordinator, node, data=DATA)
        beat(coordinator, node)
    beat(coordinator, nodes[0], reports=[books.report(1, [0, 1, 2, 3])], snapshots=[1])
    assert beat(coordinator, nodes[0])["finish"] == "done"


# --- whom the coordinator sends to whom


def test_starting_learners_take_the_weights_of_the_first_one(tmp_path):
    coordinator, clock = ring_coordinator(tmp_path)
    assert join(coordinator, 1, data=DATA)["source"] == "initial"
    assert join(coordinator, 0, data=DATA)["source"] == "neighbour"
    assert join(coordinator, 2, data=DATA)["source"] == "neighbour"
    for _ in range(3):
        clock.now += 4
        beat(coordinator, 0, ready=False)
        beat(coordinator, 2, ready=False)
    # the first one is lost before anybody has its weights: exactly one of the others begins
    assert coordinator.ledger.view().nodes == (0, 2)
    assert join(coordinator, 0, incarnation="again", data=DATA)["source"] == "initial"
    assert join(coordinator, 2, incarnation="again-2", data=DATA)["source"] == "neighbour"


def test_a_learner_that_comes_at_the_end_takes_the_final_weights(tmp_path):
    coordinator, _ = ring_coordinator(tmp_path)
    trained_to_the_end(coordinator, 0, 1)
    late = join(coordinator, 2, data=DATA)
    assert (late["finish"], late["source"]) == ("done", "neighbour")
    assert beat(coordinator, 0)["progress"]["newcomers"] == 1
    beat(coordinator, 2)
    assert beat(coordinator, 0)["progress"]["newcomers"] == 0
    for node in range(3):
        coordinator.handle(leave(node))
    assert join(coordinator, 3, data=DATA)["source"] == "initial"
    assert join(coordinator, 0, incarnation="back", kept="n0", data=DATA)["source"] == "own"


def leave(node):
    return LeaveRequest(incarnation=f"n{node}")


MODEL = {"weights": 1200, "shapes": "a", "learners": 1, "wire": "fp32", "chunk_kb": 1024}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"weights": 900}, "this learner's model has 900 weights, the ring's model 1,200"),
        ({"shapes": "b"}, "1,200 weights as the ring's, in other shapes"),
        ({"learners": 2}, "node has 2 learners, the ring's nodes have 1: .* --nproc-per-node"),
        ({"wire": "bf16"}, "exchange.wire is bf16 at this learner and fp32 in the ring"),
        ({"chunk_kb": 64}, "exchange.chunk_kb is 64 at this learner and 1024 in the ring"),
    ],
)
def test_a_learner_that_cannot_average_with_the_others_is_refused(tmp_path, other, message):
    coordinator, _ = ring_coordinator(tmp_path)
    join(coordinator, 0, model=MODEL)
    with pytest.raises(CoordinatorError, match=message):
        join(coordinator, 1, model=MODEL | other)
    assert coordinator.ledger.view().nodes == (0,)
    join(coordinator, 1, model=MODEL)
    coordinator.handle(leave(1))
    coordinator.handle(leave(0))
    join(coordinator, 1, model=MODEL | other)  # nobody is left whose model it would have to fit


def test_a_learner_that_asks_for_no_rows_is_refused_where_rows_are_leased(tmp_path):
    coordinator, _ = ring_coordinator(tmp_path)
    join(coordinator, 0, data=DATA)
    with pytest.raises(CoordinatorError, match=r"leases 4 rows, .* call ring.leases with the same counts"):
        join(coordinator, 1)


# --- learners


def make(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(ring, model, optimizer, counts=(4, 4), target=0.0, pause=0.0):
    """Train on the ring's rows; returns the number of pieces."""
    pieces = 0
    for _ in ring.leases(counts, epochs=5, batch=1):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) - target).square().sum().backward()
        optimizer.step()
        pieces += 1
        time.sleep(pause)
    return pieces


def weights(model):
    return torch.cat([part.detach().flatten() for part in model.parameters()])


def test_a_second_learner_begins_with_the_weights_of_the_first_one(tmp_path):
    (first, optimizer), (second, other_optimizer) = make(0), make(1)
    with Ring(first, optimizer, folder=tmp_path), Ring(second, other_optimizer, folder=tmp_path):
        optimizer.step()
        begin = weights(first).clone()
        assert not torch.equal(weights(second), begin)
        other_optimizer.step()  # a step without a gradient, before which it joins
        assert torch.equal(weights(second), begin)


def test_late_learners_have_the_final_weights_or_fail(tmp_path):
    (first, optimizer), (late, late_optimizer), (too_late, too_late_optimizer) = map(make, range(3))
    with Ring(first, optimizer, folder=tmp_path) as ring, Ring(late, late_optimizer, folder=tmp_path) as other:
        left = Ring(too_late, too_late_optimizer, folder=tmp_path)
        with left:
            assert train(ring, first, optimizer) == 40
            assert train(other, late, late_optimizer) == 0
            assert torch.equal(weights(late), weights(first))
            ring.close()
            other.close()
            with pytest.raises(
                RingError, match=r"training has ended \(done\), and no learner with its weights is left"
            ):
                train(left, too_late, too_late_optimizer)


def test_a_learner_that_trains_hears_of_newcomers(tmp_path):
    config = RingConfig.model_validate({"gossip": {"newcomer": "weights"}, "membership": {"beat_s": 0.05}})
    (first, optimizer), (second, other_optimizer) = make(0), make(1)
    data = {"counts": [1] * 40, "epochs": 50, "batch": 1}
    with (
        Ring(first, optimizer, folder=tmp_path, config=config) as ring,
        Ring(second, other_optimizer, folder=tmp_path, config=config) as other,
    ):
        pieces = ring.leases(**data)
        next(pieces)
        assert ring.members == (ring.node,)
        next(other.leases(**data))
        for _ in pieces:  # they last for minutes
            optimizer.step()
            if len(ring.members) == 2:
                break
            time.sleep(0.05)
        assert ring.members == other.members == (0, 1)


def test_models_of_two_sizes_do_not_meet(tmp_path):
    model, optimizer = make(0)
    other = nn.Linear(5, 1)
    with Ring(model, optimizer, folder=tmp_path) as ring:
        pieces = ring.leases([4, 4])
        next(pieces)
        with (
            Ring(other, torch.optim.SGD(other.parameters(), lr=0.1), folder=tmp_path) as second,
            pytest.raises(ValueError, match="this learner's model has 6 weights, the ring's model 4: give all"),
        ):
            next(second.leases([4, 4]))


def test_learners_agree_at_the_end(tmp_path):
    """Their losses pull their weights apart until the last step."""

    def learn(number):
        forks.THREADS.add(threading.current_thread())  # it waits until its coordinator has ended
        model, optimizer = make(number)
        config = RingConfig.model_validate({"membership": {"beat_s": 0.05}, "settle_s": 60.0})
        with Ring(model, optimizer, folder=tmp_path, learners=2, config=config) as ring:
            assert train(ring, model, optimizer, counts=[1] * 12, target=10.0 * number, pause=0.01) > 0
        return weights(model)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(learn, range(2))
    assert (first - second).abs().max() < 1e-2 * first.abs().max()
