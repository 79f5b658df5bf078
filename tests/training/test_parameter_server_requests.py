"""Requests to a parameter server that are lost, repeated, refused or malformed."""

import json
import threading
from contextlib import contextmanager

import pytest
import torch
import zmq
from parameter_servers import ADAMW, ask_raw, client_of, gradients, network, raw_socket, serving
from support import wait_until

from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, optimizer_tensors
from training.parameter_server import client as client_module
from training.parameter_server.client import ServerClient, ServerError, ServerUnreachableError
from training.parameter_server.messages import ServerRequest, pack
from training.processes.keys import RingKey
from training.processes.sockets import beside


def test_repeated_request_is_applied_once_and_outdated_request_ignored(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, client_of(addresses) as client, raw_socket(addresses[0]) as raw:
        client.init("s", flat.weights, {})
        for op, values in (("push", gradients(flat, 1)[0]), ("elastic", torch.ones(flat.weights.shape))):
            before = client.pull()
            request = ServerRequest(op=op, name="raw", token=op, number=5, lr=0.1, alpha=0.5)
            answers = [ask_raw(raw, pack(request, [values])) for _ in range(3)]
            once = client.pull()
            assert answers[0] == answers[1] == answers[2]
            assert not torch.equal(once[0], before[0])
            assert once[1][0] == before[1][0] + (op == "push")
            raw.send_multipart(pack(request.model_copy(update={"number": 4}), [values]))
            assert ask_raw(raw, pack(request, [values])) == answers[0]  # the late one was passed over
            assert torch.equal(client.pull()[0], once[0])
        again = request.model_copy(update={"token": "anew", "number": 0})
        assert ask_raw(raw, pack(again, [values]))[1] != answers[0][1]  # a learner that restarts counts from 0


@contextmanager
def lossy_relay(address, op):
    """A relay before a server that loses the first answer to `op`. Yields its address, and the requests' kinds."""
    stop, seen = threading.Event(), []
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(f"tcp://{address}")

    def relay():
        lost = False
        while not stop.is_set():
            if front.poll(10):
                identity, *frames = front.recv_multipart()
                seen.append(json.loads(frames[0])["op"])
                back.send_multipart(frames)
            while back.poll(0):
                frames = back.recv_multipart()
                if lost or seen[-1] != op:
                    front.send_multipart([identity, *frames])
                else:
                    lost = True
        front.close(0)
        back.close(0)

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        stop.set()
        thread.join()
        context.term()


@pytest.mark.parametrize("op", ["push", "elastic"])
def test_client_repeats_unanswered_requests_which_are_applied_once(tmp_path, monkeypatch, op):
    monkeypatch.setattr(client_module, "REPEAT_S", 0.2)
    monkeypatch.setattr(client_module, "LOOK_S", 0.05)
    flat = FlatParameters(network())
    with (
        serving(tmp_path) as addresses,
        lossy_relay(addresses[0], op) as (address, seen),
        client_of([address]) as client,
    ):
        client.init("s", torch.zeros_like(flat.weights), {})
        if op == "push":
            assert client.push(gradients(flat, 1)[0], [0], 0.1) == ([1], 0.0)
        else:
            assert bool((client.elastic(torch.ones_like(flat.weights), 0.5) == 0.5).all())
        weights, versions = client.pull()
    assert seen.count(op) >= 2
    assert versions == [op == "push"]
    assert op == "push" or bool((weights == 0.5).all())


def answer_to_a_stranger(addresses):
    with (
        client_of(addresses, key=RingKey.generate(), patience_s=0.7) as stranger,
        pytest.raises(ServerUnreachableError) as refused,
    ):
        stranger.pull()
    return str(refused.value)


def test_wrong_key_or_silent_server_is_an_error_with_its_address(tmp_path):
    flat, key = FlatParameters(network()), RingKey.generate()
    with serving(tmp_path, 2, key=key) as addresses:
        with client_of(addresses, key=key) as client:
            assert client.init("s", flat.weights, {})
            assert torch.equal(client.pull()[0], flat.weights)
        refusal = f"0 at {addresses[0]} refused the key: use the key file"
        wait_until(lambda: refusal in answer_to_a_stranger(addresses))  # not before the server has refused it
        with client_of(addresses, patience_s=0.4) as stranger, pytest.raises(ServerUnreachableError):
            stranger.pull()
    with (
        client_of(addresses, key=key, patience_s=0.3) as client,
        pytest.raises(ServerUnreachableError, match=f"{addresses[0]} has not answered for 0.3 s"),
    ):
        client.pull()


@pytest.mark.parametrize(("addresses", "message"), [((), "servers"), (("nowhere",), "PORT"), (("10.0.0.1:5",), "key")])
def test_addresses_that_cannot_be_used_are_refused(addresses, message):
    with pytest.raises(ValueError, match=message):
        ServerClient(addresses, None, "a", 5, 1.0)


def test_loopback_servers_are_reached_at_the_coordinators_host():
    assert beside("127.0.0.1:7001", "10.0.0.3:7000") == "10.0.0.3:7001"
    assert beside("10.0.0.9:7001", "10.0.0.3:7000") == "10.0.0.9:7001"
    assert beside("[::1]:7001", "[fe80::1]:7000") == "[fe80::1]:7001"


def test_other_models_and_wrong_order_of_servers_are_refused(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path, 2) as addresses:
        with client_of(addresses[::-1]) as client, pytest.raises(ServerError, match="not server 0 of 2: give all"):
            client.pull()
        with client_of(addresses[:1]) as client, pytest.raises(ServerError, match="not server 0 of 1"):
            client.pull()
        other = ServerClient(addresses, None, "a", 10, 5.0)
        with other, pytest.raises(ServerError, match=f"model of {flat.weights.numel()} weights, this one has 10"):
            other.pull()
        with client_of(addresses) as client:
            with pytest.raises(ServerError, match="no weights yet: send init first"):
                client.pull()
            with pytest.raises(ServerError, match=r"0\.exp_avg has 3 values"):
                client.init("s", flat.weights, {"0.exp_avg": torch.zeros(3)})
            adam = optimizer_tensors(stepped(ADAMW))
            with pytest.raises(ServerError, match=r"missing or unknown.*kind=sgd"):
                client.init("s", flat.weights, adam)
            with pytest.raises(ServerError, match="5 gradients where"):
                client.push(torch.zeros(5), [0, 0], 0.1)


def stepped(cfg):
    flat = FlatParameters(network())
    optimizer = build_optimizer(cfg, flat.model)
    optimizer.step()
    return optimizer


def test_pushes_of_an_ended_session_are_refused(tmp_path):
    flat = FlatParameters(network())
    grads = gradients(flat, 1)[0]
    with serving(tmp_path, 2) as addresses, client_of(addresses) as old, client_of(addresses, "b") as new:
        old.init("one", flat.weights, {})
        old.push(grads, [0, 0], 0.1)
        assert new.init("two", torch.ones_like(flat.weights), {})
        with pytest.raises(ServerError, match="session 'one' is over"):
            old.push(grads, [1, 1], 0.1)
        weights, versions = new.pull()
    assert bool((weights == 1).all())
    assert versions == [0, 0]


def test_gradients_that_are_not_finite_change_nothing(tmp_path):
    flat = FlatParameters(network())
    grads = torch.zeros(flat.num_parameters)
    grads[0] = float("nan")
    with serving(tmp_path) as addresses, client_of(addresses) as client:
        client.init("s", flat.weights, {})
        with pytest.raises(ServerError, match="gradients of parameter server 0's share are not finite"):
            client.push(grads, [0], 0.1)
        with pytest.raises(ServerError, match="weights of .* not finite"):
            client.elastic(torch.full_like(flat.weights, float("inf")), 0.5)
        assert torch.equal(client.pull()[0], flat.weights)
        assert client.pull()[1] == [0]


HEAD = {"name": "x", "token": "t", "number": 1}
NONSENSE = [
    [],
    [b""],
    [b"\xff\x00"],
    [b"[" * 5000],
    [b"null"],
    [json.dumps(HEAD).encode()],
    [json.dumps(HEAD | {"op": "dance"}).encode()],
    [json.dumps(HEAD | {"op": "push", "number": -3}).encode()],
    [json.dumps(HEAD | {"op": "push", "lr": float("nan")}).encode(), b"1234"],
    [json.dumps(HEAD | {"op": "push", "lr": 0.1}).encode(), b"123"],
    [json.dumps(HEAD | {"op": "push", "lr": 0.1, "more": 1}).encode()],
    [json.dumps(HEAD | {"op": "elastic", "alpha": 7.0}).encode()],
    [json.dumps(HEAD | {"op": "init", "session": "s2", "tensors": [["0.step", -5]]}).encode(), b"1234"],
    [json.dumps(HEAD | {"op": "init", "session": "s2", "tensors": [["x", 10**15]]}).encode(), b"1234"],
    [json.dumps(HEAD | {"op": "init", "session": ""}).encode()],
    [json.dumps(HEAD | {"op": "pull", "session": "other"}).encode()],
    [json.dumps(HEAD | {"op": "pull", "name": "y" * 1000}).encode()],
]


def test_malformed_messages_get_an_error_and_change_nothing(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, client_of(addresses) as client, raw_socket(addresses[0]) as raw:
        client.init("s", flat.weights, {})
        for frames in NONSENSE[1:]:
            answer, values = ask_raw(raw, frames)
            assert answer.error
            assert not values
        with raw_socket(addresses[0]) as flood:
            flood.send(b"x" * 5_000_000)  # more than a frame may have: the connection is closed
        assert torch.equal(client.pull()[0], flat.weights)
        assert client.pull()[1] == [0]
