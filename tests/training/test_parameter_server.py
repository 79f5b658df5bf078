"""The parameter server: real servers over TCP, compared with one process."""

import threading

import pytest
import torch
from parameter_servers import ADAMW, SGD, client_of, gradients, network, serving

from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, optimizer_tensors, set_learning_rate
from training.parameter_server.layout import ALIGNMENT, layout

# --- one client is one process


@pytest.mark.parametrize("cfg", [ADAMW, SGD, SGD.model_copy(update={"momentum": 0.0})], ids=["adamw", "sgd", "plain"])
def test_pushes_of_one_client_exactly_match_a_single_process(tmp_path, cfg):
    flat = FlatParameters(network())
    optimizer = build_optimizer(cfg, flat.model)
    with serving(tmp_path, 3, cfg) as addresses, client_of(addresses) as client:
        assert client.init("s", flat.weights, {})
        weights, versions = client.pull()
        assert torch.equal(weights, flat.weights)
        for step, grads in enumerate(gradients(flat, 8)):
            flat.grads.copy_(grads)
            set_learning_rate(optimizer, 0.1 / (step + 1))
            optimizer.step()
            versions, staleness = client.push(grads, versions, 0.1 / (step + 1))
            assert (versions, staleness) == ([step + 1] * 3, 0.0)
        weights, _ = client.pull()
        state, expected = client.state(), optimizer_tensors(optimizer)
    assert torch.equal(weights, flat.weights)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_checkpoint_resumes_with_another_number_of_servers(tmp_path):
    flat = FlatParameters(network())
    halves = gradients(flat, 3), gradients(flat, 3, seed=2)
    optimizer = build_optimizer(ADAMW, flat.model)
    set_learning_rate(optimizer, 0.01)
    for grads in (*halves[0], *halves[1]):
        flat.grads.copy_(grads)
        optimizer.step()
    weights, state = FlatParameters(network()).weights, {}
    for servers, half in zip((3, 2), halves, strict=True):
        folder = tmp_path / str(servers)
        folder.mkdir()
        with serving(folder, servers, ADAMW) as addresses, client_of(addresses) as client:
            client.init("s", weights, state)
            for grads in half:
                client.push(grads, client.pull()[1], 0.01)
            (weights, _), state = client.pull(), client.state()
    assert torch.equal(weights, flat.weights)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 50])
def test_shares_are_disjoint_cover_the_model_and_are_aligned(servers):
    flat = FlatParameters(network())
    parts = [layout(flat, number, servers) for number in range(servers)]
    assert [w for part in parts for w in range(part.start, part.stop)] == list(range(flat.weights.numel()))
    assert sum(part.num_grads for part in parts) == flat.num_parameters
    for part in parts:
        assert part.num_grads == sum(piece.stop - piece.first for piece in part.pieces)
        assert all(piece.first % ALIGNMENT == 0 for piece in part.pieces)
        assert all(piece.stop in (piece.numel, piece.stop // ALIGNMENT * ALIGNMENT) for piece in part.pieces)


# --- several clients


def test_staleness_counts_steps_of_others_between_pull_and_push(tmp_path):
    flat = FlatParameters(network())
    first, second = gradients(flat, 2)
    with serving(tmp_path, 2) as addresses, client_of(addresses) as a, client_of(addresses, "b") as b:
        assert a.init("s", flat.weights, {})
        assert not b.init("s", torch.zeros_like(flat.weights), {})
        assert torch.equal(b.pull()[0], flat.weights)
        pulled_a, pulled_b = a.pull()[1], b.pull()[1]
        assert a.push(first, pulled_a, 0.1) == ([1, 1], 0.0)
        assert b.push(second, pulled_b, 0.1) == ([2, 2], 1.0)
        assert a.push(first, [0, 2], 0.1) == ([3, 3], 1.0)  # the shares count for themselves: 2 and 0
        assert b.push(first, [7, 7], 0.1) == ([4, 4], 0.0)  # versions from before a restart


def test_elastic_average_moves_center_and_learner_by_equal_amounts(tmp_path):
    flat = FlatParameters(network())
    center, x = flat.weights.clone(), torch.randn(flat.weights.shape)
    with serving(tmp_path, 3) as addresses, client_of(addresses) as client:
        client.init("s", center, {})
        drawn = client.elastic(x, 0.3)
        moved, versions = client.pull()
    assert torch.equal(drawn, 0.3 * (x - center))
    assert torch.equal(moved, center + drawn)
    torch.testing.assert_close((x - drawn) + moved, x + center)
    assert versions == [0, 0, 0]


def test_concurrent_pushes_are_not_lost(tmp_path):
    flat = FlatParameters(network())
    grads, plain = torch.ones(flat.num_parameters), SGD.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
    with serving(tmp_path, 2, plain) as addresses:
        with client_of(addresses) as client:
            client.init("s", torch.zeros_like(flat.weights), {})

        def learn(name):
            with client_of(addresses, name) as client:
                for _ in range(20):
                    client.push(grads, client.pull()[1], 2.0**-6)

        threads = [threading.Thread(target=learn, args=(str(number),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        with client_of(addresses) as client:
            weights, versions = client.pull()
    assert versions == [80, 80]
    assert bool((weights[: flat.num_parameters] == -80 * 2.0**-6).all())
    assert not weights[flat.num_parameters :].any()  # averaged buffers have no gradient
