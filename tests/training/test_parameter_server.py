"""The parameter server: real servers over TCP, compared with one process; what is lost, repeated, refused and saved."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from pretending import ROOT, wait_for
from tones import FEATURES, RATE, TINY
from torch import nn

from speech.bundle import BundleSpec
from speech.features import CmvnStats
from speech.tokens import TokenConfig, train_tokenizer
from training.config import AdamWConfig, SgdConfig
from training.coordinator.client import CoordinatorClient
from training.coordinator.requests import JobRequest
from training.job import TrainJob
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, optimizer_tensors, set_learning_rate
from training.node.rank import STOPPED
from training.parameter_server import client as client_module
from training.parameter_server.client import ServerClient, ServerError, ServerUnreachableError
from training.parameter_server.layout import ALIGNMENT, layout
from training.parameter_server.messages import Request, pack, read_answer
from training.parameter_server.server import ShareServer, note_file
from training.parameter_server.service import SavedError, ShareService
from training.parameter_server.share import Share
from training.processes.keys import RingKey
from training.processes.sockets import beside, read_address

ADAMW = AdamWConfig(weight_decay=0.5)
SGD = SgdConfig(weight_decay=0.5, momentum=0.9)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 37), nn.BatchNorm1d(37), nn.Conv1d(5, 7, 3), nn.Linear(37, 23, bias=False))


def gradients(flat, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(flat.num_parameters, generator=generator) * 10 ** (n % 3 - 1) for n in range(count)]


def service(folder, number, servers, cfg=SGD, run="run-1", fresh=False):
    share = Share(layout(FlatParameters(network()), number, servers), cfg)
    return ShareService(share, run, folder / f"server-{number}.safetensors", fresh)


@contextmanager
def serving(folder, servers=1, cfg=SGD, key=None, fresh=False):
    """Servers in threads; their addresses."""
    begun = [
        ShareServer(
            service(folder, number, servers, cfg, fresh=fresh), "tcp://127.0.0.1:0", key, note_file(folder, number)
        )
        for number in range(servers)
    ]
    threads = [threading.Thread(target=server.run, daemon=True) for server in begun]
    for thread in threads:
        thread.start()
    try:
        yield [read_address(note_file(folder, number)) for number in range(servers)]
    finally:
        for server, thread in zip(begun, threads, strict=True):
            server.stop()
            thread.join(10)


def client_of(addresses, name="a", key=None, patience_s=20.0, flat=None):
    size = (flat or FlatParameters(network())).weights.numel()
    return ServerClient(addresses, key, name, size, patience_s)


@contextmanager
def raw_socket(address):
    """A connection without manners."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{address}")
        yield socket


def ask_raw(socket, frames, patience_s=10):
    socket.send_multipart(frames)
    assert socket.poll(1000 * patience_s), "no answer"
    header, *values = socket.recv_multipart(copy=False)
    return read_answer(header), b"".join(value.bytes for value in values)


# --- one client is one process


@pytest.mark.parametrize("cfg", [ADAMW, SGD, SGD.model_copy(update={"momentum": 0.0})], ids=["adamw", "sgd", "plain"])
def test_pushes_of_one_client_give_the_weights_of_one_process_bit_for_bit(tmp_path, cfg):
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


def test_a_checkpoint_goes_on_with_another_number_of_servers(tmp_path):
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
def test_shares_cover_the_model_once_and_cut_parameters_where_vectors_end(servers):
    flat = FlatParameters(network())
    parts = [layout(flat, number, servers) for number in range(servers)]
    assert [w for part in parts for w in range(part.start, part.stop)] == list(range(flat.weights.numel()))
    assert sum(part.num_grads for part in parts) == flat.num_parameters
    for part in parts:
        assert part.num_grads == sum(piece.stop - piece.first for piece in part.pieces)
        assert all(piece.first % ALIGNMENT == 0 for piece in part.pieces)
        assert all(piece.stop in (piece.numel, piece.stop // ALIGNMENT * ALIGNMENT) for piece in part.pieces)


# --- several clients


def test_staleness_is_the_steps_of_others_between_pull_and_push(tmp_path):
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


def test_elastic_moves_the_center_by_what_the_learner_gives_up(tmp_path):
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


def test_many_learners_at_a_time_lose_no_push(tmp_path):
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


# --- repeated, refused, malformed


def test_a_repeated_request_is_applied_once_and_a_late_one_not_at_all(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, client_of(addresses) as client, raw_socket(addresses[0]) as raw:
        client.init("s", flat.weights, {})
        for op, values in (("push", gradients(flat, 1)[0]), ("elastic", torch.ones(flat.weights.shape))):
            before = client.pull()
            request = Request(op=op, name="raw", token=op, number=5, lr=0.1, alpha=0.5)
            answers = [ask_raw(raw, pack(request, [values])) for _ in range(3)]
            once = client.pull()
            assert answers[0] == answers[1] == answers[2]
            assert not torch.equal(once[0], before[0])
            assert once[1][0] == before[1][0] + (op == "push")
            raw.send_multipart(pack(request.model_copy(update={"number": 4}), [values]))
            assert ask_raw(raw, pack(request, [values])) == answers[0]  # the late one was passed over
            assert torch.equal(client.pull()[0], once[0])
        again = request.model_copy(update={"token": "anew", "number": 0})
        assert ask_raw(raw, pack(again, [values]))[1] != answers[0][1]  # a learner that starts anew counts anew


@contextmanager
def losing(address, op):
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
def test_a_client_repeats_what_was_not_answered_and_it_happens_once(tmp_path, monkeypatch, op):
    monkeypatch.setattr(client_module, "REPEAT_S", 0.2)
    monkeypatch.setattr(client_module, "LOOK_S", 0.05)
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, losing(addresses[0], op) as (address, seen), client_of([address]) as client:
        client.init("s", torch.zeros_like(flat.weights), {})
        if op == "push":
            assert client.push(gradients(flat, 1)[0], [0], 0.1) == ([1], 0.0)
        else:
            assert bool((client.elastic(torch.ones_like(flat.weights), 0.5) == 0.5).all())
        weights, versions = client.pull()
    assert seen.count(op) >= 2
    assert versions == [op == "push"]
    assert op == "push" or bool((weights == 0.5).all())


def test_a_wrong_key_and_silence_end_in_an_error_that_names_the_address(tmp_path):
    flat, key = FlatParameters(network()), RingKey.generate()
    with serving(tmp_path, 2, key=key) as addresses:
        with client_of(addresses, key=key) as client:
            assert client.init("s", flat.weights, {})
            assert torch.equal(client.pull()[0], flat.weights)
        with (
            client_of(addresses, key=RingKey.generate(), patience_s=0.7) as stranger,
            pytest.raises(ServerUnreachableError, match=f"0 at {addresses[0]} refused the key: use the key file"),
        ):
            stranger.pull()
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


def test_nodes_elsewhere_reach_the_servers_beside_the_store():
    assert beside("127.0.0.1:7001", "10.0.0.3:7000") == "10.0.0.3:7001"
    assert beside("10.0.0.9:7001", "10.0.0.3:7000") == "10.0.0.9:7001"
    assert beside("[::1]:7001", "[fe80::1]:7000") == "[fe80::1]:7001"


def test_other_models_and_other_orders_are_refused(tmp_path):
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


def test_a_session_that_is_over_has_no_say(tmp_path):
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


def test_what_is_not_finite_changes_nothing(tmp_path):
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


def test_malformed_messages_are_answered_and_harm_nobody(tmp_path):
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


# --- saved


def test_a_stopped_server_goes_on_with_everything(tmp_path):
    flat = FlatParameters(network())
    one, two = gradients(flat, 2)
    with serving(tmp_path, 2, ADAMW) as addresses, client_of(addresses) as client:
        client.init("s", flat.weights, {})
        client.push(one, [0, 0], 0.1)
        (weights, _), state = client.pull(), client.state()
        with raw_socket(addresses[0]) as raw:
            request = Request(op="push", name="raw", token="t", number=1, version=1, lr=0.0)
            values = torch.zeros(layout(flat, 0, 2).num_grads)
            answer = ask_raw(raw, pack(request, [values]))
    with serving(tmp_path, 2, ADAMW) as addresses, client_of(addresses) as client, raw_socket(addresses[0]) as raw:
        assert client.pull()[1] == [2, 1]
        assert ask_raw(raw, pack(request, [values])) == answer  # answered before: not applied again
        assert not client.init("s", torch.zeros_like(flat.weights), {})
        assert client.pull()[1] == [2, 1]
        assert client.push(two, [1, 1], 0.1) == ([3, 2], 0.5)
    with serving(tmp_path, 2, ADAMW, fresh=True) as addresses, client_of(addresses) as client:
        with pytest.raises(ServerError, match="no weights yet"):
            client.pull()
        assert client.init("s", weights, state)


def test_what_another_training_saved_is_not_used_and_damage_is_named(tmp_path):
    flat = FlatParameters(network())
    with serving(tmp_path) as addresses, client_of(addresses) as client:
        client.init("s", flat.weights, {})
    assert service(tmp_path, 0, 1).share.session == "s"
    assert service(tmp_path, 0, 1, run="run-2").share.session == ""
    assert service(tmp_path, 0, 2).share.session == ""
    path = tmp_path / "server-0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SavedError, match=r"server-0.safetensors cannot be read.*remove it"):
        service(tmp_path, 0, 1)


# --- processes


def make_job(folder):
    tokenizer = train_tokenizer(TokenConfig(kind="words"), ["ba ce di"])
    stats = CmvnStats(FEATURES.num_mels)
    stats.add(torch.randn(1, 50, FEATURES.num_mels), torch.tensor([50]))
    spec = BundleSpec(
        sample_rate=RATE,
        features=FEATURES,
        stats=stats.to_dict(),
        tokenizer=tokenizer.to_dict(),
        model=TINY["conformer"],
    )
    values = {"run": "r", "seed": 1, "train": {"strategy": "asgd", "nodes": 2}, "spec": spec}
    values |= {"train_url": "t", "valid_url": "v", "output_url": "o"}
    return TrainJob.model_validate(values | {"journal": folder / "journal.jsonl", "cache": folder / "cache"})


class Process:
    """A server's process."""

    def __init__(self, folder, number, servers):
        self.folder, self.number, self.servers = folder, number, servers
        (folder / "job.json").write_text(make_job(folder).model_dump_json())

    def words(self, *more):
        words = ["--job", self.folder / "job.json", "--folder", self.folder / "servers", "--parent", os.getpid()]
        words += ["--number", self.number, "--servers", self.servers, *more]
        return [sys.executable, "-m", "training.parameter_server.server", *map(str, words)]

    def start(self, *more):
        self.process = subprocess.Popen(self.words(*more), cwd=ROOT, stderr=subprocess.DEVNULL)
        note = note_file(self.folder / "servers", self.number)
        wait_for(lambda: note.exists() and json.loads(note.read_text())["pid"] == self.process.pid, 60)
        self.address = read_address(note)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_a_killed_server_goes_on_at_its_address_with_what_it_saved(tmp_path):
    flat = FlatParameters(make_job(tmp_path).spec.build_model())
    optimizer = build_optimizer(AdamWConfig(), flat.model)
    processes = [Process(tmp_path, number, 2) for number in range(2)]
    saved = tmp_path / "servers" / "server-0.safetensors"
    try:
        for process in processes:
            process.start("--fresh")
        addresses = [process.address for process in processes]
        with client_of(addresses, patience_s=60, flat=flat) as client:
            client.init("s", flat.weights, {})
            begun = saved.stat().st_mtime_ns
            one, two = gradients(flat, 2)
            flat.grads.copy_(one)
            set_learning_rate(optimizer, 0.1)
            optimizer.step()
            client.push(one, [0, 0], 0.1)
            wait_for(lambda: saved.stat().st_mtime_ns != begun, 30)
            processes[0].kill()
            with ThreadPoolExecutor(1) as pool:
                pushed = pool.submit(client.push, two, [1, 1], 0.1)  # waits for the restarted one
                processes[0].start()
                assert pushed.result(60) == ([2, 2], 0.0)
            assert processes[0].address == addresses[0]
            flat.grads.copy_(two)
            optimizer.step()
            assert torch.equal(client.pull()[0], flat.weights)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "more", "message"),
    [(2, [], "--number is 2 of 2"), (0, ["--listen", "0.0.0.0:0"], "key"), (0, ["--listen", "x"], "HOST:PORT")],
)
def test_a_server_that_cannot_work_says_why(tmp_path, number, more, message):
    words = Process(tmp_path, number, 2).words(*more)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_training_starts_its_servers_tells_their_addresses_and_restarts_them(corpus, tmp_path):
    launch = {"kind": "external"}
    job = corpus.job(tmp_path, strategy={"kind": "easgd", "servers": 2}, nodes=2, launch=launch)
    flat = FlatParameters(job.spec.build_model())
    (tmp_path / "job.json").write_text(job.model_dump_json())
    words = [sys.executable, "-m", "training.launch.supervisor", str(tmp_path / "job.json"), str(os.getpid())]
    supervisor = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    note = tmp_path / "servers" / "server-1.json"
    try:
        store = wait_for(lambda: read_address(tmp_path / "coordinator.json"), 120)
        key = RingKey.load(tmp_path / "ring.key")
        with CoordinatorClient(store, key) as client:
            addresses = client.request(JobRequest()).job["servers"]
        assert addresses == [read_address(note_file(tmp_path / "servers", number)) for number in range(2)]
        with client_of(addresses, key=key, patience_s=60, flat=flat) as client:
            assert client.init("s", flat.weights, {})
            before = json.loads(note.read_text())
            os.kill(before["pid"], signal.SIGKILL)
            after = wait_for(lambda: (found := json.loads(note.read_text()))["pid"] != before["pid"] and found, 60)
            assert after["address"] == before["address"]
            assert torch.equal(client.pull()[0], flat.weights)
        supervisor.terminate()
        assert supervisor.wait(60) == STOPPED
        assert not Path(f"/proc/{after['pid']}").exists()
    finally:
        supervisor.kill()
        supervisor.wait()
