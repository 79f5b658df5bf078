"""The ring for any model: its refusals, one learner alone, and learners as processes that join and are killed."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bookkeeping import Clock, join, make_coordinator
from forks import Forkable
from ranks import run_ranks
from support import wait_until
from torch import nn

import training.node.node_exchange as node_exchange_module
import training.ring.folder as folder_module
import training.ring.group as group_module
import training.ring.learner as learner_module
from storage.locks import LockTimeoutError
from storage.objects import ObjectStore
from training.coordinator.admission import HELD_S, NodeNumbers
from training.coordinator.client import CoordinatorClient
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core, Settings
from training.coordinator.epochs import ShardMap
from training.coordinator.membership import Member, View
from training.coordinator.messages import (
    CoordinatorError,
    CoordinatorUnreachableError,
    LeaveRequest,
    NamedData,
    NumberRequest,
)
from training.coordinator.node_client import NodeClient
from training.coordinator.server import open_ledger
from training.exchange.base import ExchangeError, ExchangeStats
from training.processes.identity import ProcessIdentity
from training.processes.keys import RingKey
from training.processes.supervision import SupervisorError
from training.ring.config import RingConfig
from training.ring.folder import RingFolder, ring_job
from training.ring.learner import RingError
from training.ring.leases import PiecePlanner, named_data
from training.ring.ring import Ring

ROOT = Path(__file__).resolve().parents[2]


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


# --- what the coordinator knows of a ring


def coordinator_without_data(folder):
    """The coordinator of a ring, before any learner has named its data."""
    settings, clock = Settings.from_job(ring_job(folder, RingConfig())), Clock()
    return Coordinator(Core(settings, open_ledger(settings), ObjectStore(settings.output_url), clock, clock), True)


def test_first_node_sets_the_data_and_other_data_is_refused(tmp_path):
    coordinator = coordinator_without_data(tmp_path)
    data = {"counts": [4, 6], "epochs": 3}
    assert join(coordinator, 0)["progress"]["size"] == 0
    progress = join(coordinator, 1, data=data)["progress"]
    assert (progress["size"], progress["total"]) == (10, 3)
    assert join(coordinator, 2, data=data)["progress"]["size"] == 10
    with pytest.raises(CoordinatorError, match=r"trains 10 rows in 2 shards for 3 epochs, .* names 9 rows in 2 shards"):
        join(coordinator, 3, data=data | {"counts": [4, 5]})
    assert coordinator.ledger.view().nodes == (0, 1, 2)


def test_named_data_survives_a_restart_of_the_coordinator(tmp_path):
    coordinator = coordinator_without_data(tmp_path)
    join(coordinator, 0, data={"counts": [4, 6], "epochs": 3})
    state = json.loads(json.dumps(coordinator.ledger.to_dict()))
    other = coordinator_without_data(tmp_path)
    other.ledger.load(state)
    assert (other.ledger.size, other.ledger.total, other.ledger.shards.count) == (10, 3, 2)


def test_job_with_an_index_refuses_other_data(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    with pytest.raises(CoordinatorError, match="not on data of its nodes"):
        join(coordinator, 0, data={"counts": [4], "epochs": 1})


def test_processes_get_unique_numbers_and_unused_ones_are_reused(tmp_path):
    clock = Clock()
    coordinator = coordinator_without_data(tmp_path)
    join(coordinator, 1)
    numbers = NodeNumbers(coordinator.ledger, clock)
    given = [numbers.answer(NumberRequest(token=token)).node for token in ("a", "b", "a")]
    assert given == [0, 2, 0]
    clock.now += HELD_S + 1
    assert numbers.answer(NumberRequest(token="c")).node == 0


# --- pieces


def test_pieces_cover_a_lease_and_do_not_cross_shards():
    shards = ShardMap.from_counts([10, 3, 7])
    planner, rows = PiecePlanner(shards, 4, seed=1), np.arange(20)
    pieces = planner(0, rows, "whole")
    assert sorted(np.concatenate(pieces).tolist()) == rows.tolist()
    assert all(len(set(shards.shard_of_row[piece].tolist())) == 1 for piece in pieces)
    assert max(map(len, pieces)) <= 4
    again = [piece.tolist() for piece in planner(0, rows, "whole")]
    assert again == [piece.tolist() for piece in pieces]
    assert again != [piece.tolist() for piece in planner(1, rows, "whole")]


@pytest.mark.parametrize(("counts", "epochs"), [([], 1), ([3, 0], 1), ([3], 0)])
def test_data_without_rows_or_epochs_is_refused(counts, epochs):
    with pytest.raises(ValueError, match="at least 1"):
        named_data(counts, epochs)
    assert named_data([3, 4], 2) == NamedData(counts=(3, 4), epochs=2)


def test_order_of_pieces_depends_on_seed_epoch_and_plan():
    shards, rows = ShardMap.from_counts([4, 4]), np.arange(8)

    def order(seed, epoch, plan):
        return [piece.tolist() for piece in PiecePlanner(shards, 3, seed)(epoch, rows, plan)]

    assert order(1, 2, "3") == [[1, 2], [3, 0], [6, 7], [4, 5]]
    assert len({str(order(*words)) for words in [(1, 2, "3"), (2, 2, "3"), (1, 3, "3"), (1, 2, "4")]}) == 4


# --- refusals


def test_configuration_of_a_ring_is_checked_and_frozen():
    for settings in ({"settle_s": -0.5}, {"settle_s": float("inf")}, {"settle": 1.0}):
        with pytest.raises(ValueError, match="settle"):
            RingConfig.model_validate(settings)
    config = RingConfig.model_validate({"settle_s": 0, "exchange": {"daemons": 2}, "gossip": {"newcomer": "weights"}})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    assert (RingConfig().seed, RingConfig().settle_s, RingConfig().exchange.daemons) == (0, 5.0, 1)


def test_job_of_a_ring_has_no_end_of_its_own_and_no_checkpoints(tmp_path):
    settings = Settings.from_job(ring_job(tmp_path, RingConfig(seed=5)))
    assert (settings.seed, settings.train_url, settings.journal) == (5, "", tmp_path / "journal.jsonl")
    assert (settings.nodes, settings.learners_per_node, settings.epochs) == (1, 1, 1)
    assert (settings.max_minutes, settings.checkpoint_steps, settings.checkpoint_keep) == (0.0, 0, 1)
    assert settings.beat_s == RingConfig().membership.beat_s


def test_a_ring_needs_a_folder_or_an_address(tmp_path):
    for place in ({}, {"folder": tmp_path, "address": "127.0.0.1:1"}):
        with pytest.raises(ValueError, match="either a folder .* or the address"):
            Ring(*make(), **place)


@pytest.mark.parametrize(
    ("exchange", "message"), [({"kind": "cuda"}, "on one machine: use zmq"), ({"daemons": 2}, "use .*daemons=1")]
)
def test_exchange_that_cannot_serve_any_newcomer_is_refused(exchange, message):
    with pytest.raises(ValueError, match=message):
        RingConfig.model_validate({"exchange": exchange})


def test_a_model_without_trainable_parameters_is_refused(tmp_path):
    model, optimizer = make()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="must be on one device; found: none"):
        Ring(model, optimizer, folder=tmp_path)


def test_a_model_on_two_devices_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match="must be on one device; found: cpu and meta"):
        Ring(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)


def test_a_process_group_of_the_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="leave out init_process_group"):
            Ring(*make(), folder=tmp_path)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        assert group_module.torchrun_group(torch.device("cpu")).size == 1  # a single learner does not need its own
    finally:
        torch.distributed.destroy_process_group()


def test_restarted_node_does_not_meet_where_it_met_before(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(group_module, "rendezvous", lambda _: iter([(store, 1, 2)]))
    monkeypatch.setattr(group_module, "NodeGroup", lambda rank, size, place, device: (rank, size, place, device))
    for name, value in {"LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1, "GROUP_RANK": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    for restarts in (0, 3):
        rank, size, place, device = group_module.torchrun_group(torch.device("meta"))
        assert (rank, size, device.type) == (1, 2, "meta")
        place.set("address", "a")
        assert store.check([f"ring-4-{restarts}/address"])
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")


def test_reason_of_a_coordinator_that_cannot_start_is_passed_on(tmp_path):
    (tmp_path / "ring.key").write_text("this is no key")
    with pytest.raises(SupervisorError, match=r"coordinator ended with status 2(.|\n)*ring.key"):
        RingFolder(tmp_path, RingConfig()).enter()


# --- the folder


@contextmanager
def locked(path, how):
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


def note_of(folder, process):
    note = folder / "coordinator" / "coordinator.json"
    note.parent.mkdir(exist_ok=True)
    whole = note.with_suffix(".new")
    whole.write_text(json.dumps(vars(process) | {"address": "127.0.0.1:1"}))
    whole.replace(note)


@pytest.fixture
def lock_of_a_coordinator(tmp_path):
    with locked(tmp_path / "coordinator.lock", fcntl.LOCK_EX):
        yield


@pytest.mark.usefixtures("lock_of_a_coordinator")
def test_coordinator_that_announces_itself_late_is_waited_for(tmp_path, monkeypatch):
    with locked(tmp_path / "learners.lock", fcntl.LOCK_SH), ThreadPoolExecutor(1) as pool:
        note_of(tmp_path, replace(ProcessIdentity.of(os.getpid()), started="1"))  # an earlier one's
        address = pool.submit(RingFolder(tmp_path, RingConfig()).enter)
        time.sleep(0.2)
        assert not address.done()
        note_of(tmp_path, ProcessIdentity.of(os.getpid()))
        assert address.result(240) == "127.0.0.1:1"
        monkeypatch.setattr(folder_module, "ANNOUNCE_S", 0.2)
        note_of(tmp_path, replace(ProcessIdentity.of(os.getpid()), started="1"))
        with pytest.raises(LockTimeoutError, match=r"coordinator.lock is held, but not by .* give the ring another"):
            RingFolder(tmp_path, RingConfig()).enter()


@pytest.mark.usefixtures("lock_of_a_coordinator")
def test_coordinator_of_an_earlier_training_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "END_S", 0.2)
    command = ["sh", "-c", "trap '' TERM; echo deaf; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        note_of(tmp_path, ProcessIdentity.of(process.pid))
        with pytest.raises(LockTimeoutError, match=rf"coordinator that does not end: kill process {process.pid}"):
            RingFolder(tmp_path, RingConfig()).enter()
        process.kill()


def coordinator_of(folder):
    return ProcessIdentity.read(json.loads((folder / "coordinator" / "coordinator.json").read_text()))


def kill_coordinator(folder):
    process = coordinator_of(folder)
    assert process.signal(signal.SIGKILL)
    wait_until(process.gone)
    return process


def seed_of(folder):
    return json.loads((folder / "job.json").read_text())["seed"]


def test_killed_coordinator_is_restarted_with_the_configuration_of_its_training(tmp_path, monkeypatch):
    place = tmp_path / "new" / "ring"
    folder, other = RingFolder(place, RingConfig(seed=7)), RingFolder(place, RingConfig(seed=8))
    address = folder.enter()
    assert other.enter() == address
    killed = kill_coordinator(place)
    other.revive()
    assert coordinator_of(place) != killed
    assert os.getsid(coordinator_of(place).pid) != os.getsid(os.getpid())  # Ctrl-C does not reach it
    assert (seed_of(place), other.enter()) == (7, address)
    monkeypatch.setattr(folder_module, "LOOK_S", 1000.0)
    folder.revive()
    killed = kill_coordinator(place)
    folder.revive()  # it has just looked
    assert coordinator_of(place) == killed
    folder.close()
    other.close()
    other.enter()  # a new training, since all have left the last one
    assert seed_of(place) == 8
    other.close()
    kill_coordinator(place)


# --- one learner


def test_single_learner_trains_every_row_once_and_reruns_start_fresh(tmp_path):
    for _ in range(2):
        model, optimizer = make()
        with Ring(model, optimizer, folder=tmp_path) as ring:
            for call in (ring.before_step, ring.after_step):
                with pytest.raises(RingError, match="do not call it"):
                    call()
            with pytest.raises(ValueError, match="batch is 0"):
                ring.leases([3], batch=0)
            seen = Counter()
            for epoch, shard, rows in ring.leases([3, 5], epochs=2, batch=2):
                assert set(rows.tolist()) <= set(range(3) if shard == 0 else range(3, 8))
                seen.update((epoch, row) for row in rows.tolist())
                optimizer.zero_grad()
                model(torch.ones(1, 3)).square().sum().backward()
                optimizer.step()
            assert seen == Counter((epoch, row) for epoch in range(2) for row in range(8))
            assert ring.steps >= 8
            with pytest.raises(RingError, match="call leases once"):
                ring.leases([3, 5])
        steps = ring.steps
        optimizer.step()  # outside the context, the ring takes no part
        assert ring.steps == steps
    assert (tmp_path / "ring.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "learners.lock").stat().st_mode & 0o111 == 0


def test_ring_works_without_leases(tmp_path):
    model, optimizer = make()
    ring = Ring(model, optimizer, folder=tmp_path)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            ring.before_step()
            optimizer.step()
            ring.after_step()
        assert (ring.steps, ring.members) == (3, (ring.node,))
    finally:
        ring.close()


def test_configuration_reaches_the_coordinator_and_the_exchange(tmp_path, caplog):
    config = RingConfig.model_validate({"seed": 7, "host": "127.0.0.2", "membership": {"start_patience_s": 0.2}})
    model, optimizer = make()
    with Ring(model, optimizer, folder=tmp_path, config=config, learners=3) as ring:
        assert ring._learner.ring.endpoints()[0].startswith("tcp://127.0.0.2:")
        pieces = [len(rows) for _, _, rows in ring.leases([65])]  # alone, as the others do not come in time
    assert (seed_of(tmp_path), sorted(pieces)) == (7, [32, 33])
    with Ring(*make(), folder=tmp_path, config=RingConfig(seed=8)):
        assert seed_of(tmp_path) == 8
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # that it could not sign off


def test_ring_whose_exchange_does_not_start_leaves_its_folder(tmp_path):
    with pytest.raises(ExchangeError):
        Ring(*make(), folder=tmp_path, config=RingConfig(host="192.0.2.1"))
    with locked(tmp_path / "learners.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
        kill_coordinator(tmp_path)


def test_coordinator_that_has_died_since_the_last_step_is_restarted(tmp_path):
    model, optimizer = make()
    with Ring(model, optimizer, folder=tmp_path) as ring:
        killed = kill_coordinator(tmp_path)
        optimizer.step()
        joined = coordinator_of(tmp_path)
        assert joined != killed
        kill_coordinator(tmp_path)
        wait_until(lambda: optimizer.step() or coordinator_of(tmp_path) != joined)
        assert ring.members == (0,)


@pytest.fixture
def silent_coordinator(monkeypatch):
    """Connections to coordinators that do not answer while the list holds addresses to come; returns those tried."""
    tried, silent = [], [True, True]

    class SilentClient(CoordinatorClient):
        def request(self, request, patience_s):
            tried.append(self.address)
            if silent and silent.pop():
                raise CoordinatorUnreachableError("no answer")
            return super().request(request, patience_s)

    monkeypatch.setattr(learner_module, "CoordinatorClient", SilentClient)
    return tried


def test_coordinator_of_a_folder_is_asked_again_and_one_of_an_address_is_not(tmp_path, silent_coordinator):
    with Ring(*make(), folder=tmp_path), (tmp_path / "learners.lock").open() as lock:
        assert len(set(silent_coordinator)) == 3  # one that does not answer is replaced if nobody else uses it
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kill_coordinator(tmp_path)


def test_address_without_a_coordinator_is_an_error(monkeypatch, silent_coordinator):
    monkeypatch.setattr(learner_module, "CONNECT_S", 0.2)
    with pytest.raises(CoordinatorUnreachableError, match="no answer"):
        Ring(*make(), address="127.0.0.1:1")
    assert silent_coordinator == ["127.0.0.1:1"]


SERVE = textwrap.dedent(
    """
    import sys
    from training.ring.config import RingConfig
    from training.ring.ring import Ring

    config = RingConfig.model_validate({"membership": {"coordinator_patience_s": float(sys.argv[3])}})
    Ring.serve("127.0.0.1:0", sys.argv[1], sys.argv[2], config=config)
    """
)


@pytest.fixture
def served_coordinator(tmp_path, request):
    """A coordinator that a process of its own serves: the process, its address and its key's file.

    A test's parameter is the time that learners wait for it.
    """
    key, note = tmp_path / "ring.key", tmp_path / "served_coordinator" / "coordinator.json"
    RingKey.generate().save(key)
    command = [sys.executable, "-c", Forkable(SERVE), str(note.parent), str(key), str(getattr(request, "param", 240.0))]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            wait_until(note.exists)
            yield process, json.loads(note.read_text())["address"], key
        finally:
            process.kill()


def test_a_learner_finds_a_coordinator_by_address_and_key(served_coordinator):
    process, address, key = served_coordinator
    model, optimizer = make()
    with Ring(model, optimizer, address=address, key=key) as ring:
        rows = [row for _, _, part in ring.leases([4, 4], batch=3) for row in part.tolist()]
    assert sorted(rows) == list(range(8))
    process.terminate()
    assert process.wait(240) == 0


@pytest.mark.parametrize("served_coordinator", [6.0], indirect=True)
def test_leases_raise_an_error_if_the_coordinator_stays_down(served_coordinator):
    process, address, key = served_coordinator
    model, optimizer = make()
    with Ring(model, optimizer, address=address, key=key) as ring:
        pieces = ring.leases([4, 4], epochs=100_000, batch=1)
        next(pieces)
        process.kill()
        with pytest.raises(RingError, match="may be untrained"):
            list(pieces)


SERVE_SIMPLY = textwrap.dedent(
    """
    import sys
    from training.ring.ring import Ring

    Ring.serve("127.0.0.1:0", sys.argv[1])
    """
)


def test_a_coordinator_without_a_key_continues_its_training_when_served_again(tmp_path):
    place, seen = tmp_path / "new" / "ring", []

    @contextmanager
    def served():
        command, before = [sys.executable, "-c", Forkable(SERVE_SIMPLY), str(place)], len(seen)
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            try:
                wait_until(lambda: (place / "coordinator.json").exists() and coordinator_pid(place) == process.pid)
                yield json.loads((place / "coordinator.json").read_text())["address"]
            finally:
                process.kill()
        assert len(seen) > before

    with served() as address:
        ring = Ring(*make(), address=address)
        pieces = ring.leases([4, 4], epochs=20, batch=1)
        seen += [next(pieces) for _ in range(20)]
    with served() as again:
        assert again == address
        seen += list(pieces)
        ring.close()
    assert Counter((epoch, int(row)) for epoch, _, rows in seen for row in rows) == Counter(
        (epoch, row) for epoch in range(20) for row in range(8)
    )


def coordinator_pid(place):
    return json.loads((place / "coordinator.json").read_text())["pid"]


def test_coordinator_on_another_machine_needs_a_key(tmp_path):
    with pytest.raises(ValueError, match="can be reached from other machines and there is no key"):
        Ring.serve("0.0.0.0:0", tmp_path)


# --- a node of several learners

NODE = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[4]}
    import torch
    from training.ring.ring import Ring

    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    begin = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Ring(model, optimizer, folder=folder / "ring") as ring:
        for _, _, rows in ring.leases([3], batch=3):
            assert len(rows) == 2 - rank
            joined = model.weight.detach().clone()
            optimizer.zero_grad()
            (model(torch.ones(1, 3)) * (1 + rank)).sum().backward()
            optimizer.step()
    assert torch.equal(joined, begin) == (rank == 0)
    assert torch.allclose(joined - model.weight, torch.tensor(0.05 * (2 * 1 + 1 * 2) / 3))  # rows x gradient
    (folder / f"weights-{rank}").write_text(str(model.weight.tolist()))
    print("fine", flush=True)
    os._exit(0)
    """
)


def test_learners_of_a_node_begin_with_the_weights_of_its_first_one_and_average_gradients_by_rows(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run_ranks(NODE, 2, tmp_path, port)
    first, second = ((tmp_path / f"weights-{rank}").read_text() for rank in range(2))
    assert first == second


# --- several learners in one process


def two_rings(folder, **settings):
    patient = {"membership": {"beat_s": 0.05}, "exchange": {"timeout_s": 60.0}}
    config = RingConfig.model_validate(patient | settings)
    pairs = [make(seed) for seed in range(2)]
    return pairs, [Ring(*pair, folder=folder, config=config) for pair in pairs]


def flat(model):
    return torch.cat([part.detach().flatten() for part in model.parameters()])


def test_learners_without_leases_average_at_steps_and_while_they_wait(tmp_path):
    ((first, _), (second, _)), rings = two_rings(tmp_path, gossip={"newcomer": "weights"})

    def differ():
        return (flat(first) - flat(second)).abs().max() > 0.01

    def steps():
        for ring in rings:
            ring.before_step()
            ring.after_step()
        time.sleep(0.01)

    try:
        steps()
        assert torch.equal(flat(first), flat(second))
        wait_until(lambda: steps() or all(ring.members == (0, 1) for ring in rings))
        for work in (steps, lambda: [ring._learner.idle() for ring in rings]):
            with torch.no_grad():
                second.weight += 1.0
            rings[1].after_step()  # offers them
            assert differ()
            wait_until(lambda work=work: work() or not differ())
    finally:
        for ring in rings:
            ring.close()


def test_newcomer_takes_weights_and_optimizer_state_of_a_training_member(tmp_path):
    ((first, first_optimizer), (second, second_optimizer)), (ring, other) = two_rings(tmp_path)
    data = {"counts": [1000], "epochs": 10, "batch": 1}
    for optimizer in (first_optimizer, second_optimizer):
        optimizer.param_groups[0]["lr"] = 0.0

    def step(pieces):
        next(pieces)
        first_optimizer.zero_grad()
        first(torch.ones(1, 3)).sum().backward()
        first_optimizer.step()

    with ring, other, ThreadPoolExecutor(1) as pool:
        mine = ring.leases(**data)
        for _ in range(3):
            step(mine)
        joined = pool.submit(next, other.leases(**data))
        wait_until(lambda: step(mine) or joined.done())
        assert len(joined.result().rows) == 1
        assert torch.equal(flat(first), flat(second))
        state = second_optimizer.state[second.weight]
        assert 3 <= state["step"] <= ring.steps
        assert state["exp_avg"].min() > 0.2


def test_node_number_of_a_process_that_left_keeps_its_count_of_steps(tmp_path, monkeypatch):
    config, data = RingConfig.model_validate({"gossip": {"newcomer": "weights"}}), {"counts": [1000], "batch": 1}
    with Ring(*make(), folder=tmp_path, config=config) as other:
        next(other.leases(**data))
        monkeypatch.setattr(learner_module, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="again")))
        for steps in (0, 3):
            model, optimizer = make()
            with Ring(model, optimizer, folder=tmp_path, config=config) as ring:
                pieces = ring.leases(**data)
                next(pieces)
                assert (ring.node, ring.steps) == (1, steps)
                for _ in range(3):
                    optimizer.step()
                    next(pieces)


def test_first_gradient_of_a_newcomer_is_not_applied(tmp_path):
    pairs, rings = two_rings(tmp_path, gossip={"newcomer": "weights"})
    with rings[0], rings[1]:
        for model, optimizer in pairs:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()  # joins; its gradient was that of other weights
        assert torch.equal(*(flat(model) for model, _ in pairs))


def test_learner_that_was_dropped_rejoins_with_its_weights(tmp_path):
    model, optimizer = make()
    with Ring(
        model, optimizer, folder=tmp_path, config=RingConfig.model_validate({"membership": {"beat_s": 0.05}})
    ) as ring:
        optimizer.step()
        before, weights, steps = ring._learner.ring.view.find(ring.node), flat(model).clone(), ring.steps
        with CoordinatorClient(ring._learner.client._client.address, RingKey.load(tmp_path / "ring.key")) as client:
            client.request(LeaveRequest(incarnation=before.incarnation))

        def has_rejoined():
            optimizer.step()
            return ring._learner.ring.view.find(ring.node).incarnation != before.incarnation

        wait_until(has_rejoined)
        assert ring.members == (ring.node,)
        assert ring.steps > steps
        assert torch.equal(flat(model), weights)


def test_newcomer_fails_if_no_member_gives_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(node_exchange_module, "FETCH_S", 0.2)
    monkeypatch.setattr(node_exchange_module, "JOIN_S", 0.0)
    config = RingConfig.model_validate({"gossip": {"newcomer": "weights"}})
    model, optimizer = make()
    with Ring(model, optimizer, folder=tmp_path, config=config) as ring:
        address, key = ring._learner.client._client.address, RingKey.load(tmp_path / "ring.key")
        member = NodeClient(address, key, 5, folder=tmp_path)
        member.model = ring._learner._model()
        assert member.join(("tcp://127.0.0.1:1",)).source == "initial"
        with pytest.raises(RingError, match=r"although nodes 5 are in the ring: check that this machine reaches"):
            optimizer.step()
        member.leave()
        member.close()
        optimizer.step()
        assert ring.members == (ring.node,)


def test_learners_wait_for_each_other_at_the_start(tmp_path):
    config = RingConfig.model_validate({"membership": {"beat_s": 0.05}})
    with ThreadPoolExecutor(2) as pool:
        rings = [Ring(*make(seed), folder=tmp_path, config=config, learners=2) for seed in range(2)]
        pieces = [ring.leases([500], epochs=2, batch=1) for ring in rings]
        first = pool.submit(next, pieces[0])
        wait_until(lambda: rings[0]._learner.joined)
        time.sleep(0.3)
        assert not first.done()
        second = pool.submit(next, pieces[1])
        assert len(first.result(240).rows) == len(second.result(240).rows) == 1
        wait_until(lambda: [ring.members for ring in rings] == [(0, 1)] * 2)
        for ring in rings:
            ring.close()


# --- the end


def test_learners_that_do_not_agree_end_after_settle_s(tmp_path):
    (pairs, (ring, other)) = two_rings(tmp_path, settle_s=0.3, gossip={"newcomer": "weights"})
    with ring, other:
        for _, optimizer in pairs:
            optimizer.step()
        wait_until(lambda: pairs[0][1].step() or ring.members == (0, 1))
        ring._learner.settle()
        assert ring.members == (0, 1)


def seen(finished, distance):
    """What the exchange says after a number of exchanges."""
    return ExchangeStats(finished=finished, distance=distance)


FAR, CLOSE = 1.0, 1e-6
SETTLING = [
    # members, what the exchange says at the beginning and at each look, newcomers at each look (0 later)
    ((0,), [None] * 2, [0]),
    ((0,), [None] * 4, [1, 2, 0]),
    (
        (0, 1),
        [None, None, ExchangeStats(), *(seen(n, CLOSE) for n in (1, 2, 2)), seen(3, FAR)]
        + [seen(n, CLOSE) for n in (4, 4, 5, 6)],
        [],
    ),
    ((0, 1), [seen(n, CLOSE) for n in (5, 5, 5, 5, 6, 7, 8)], []),  # what is older than the end counts for nothing
    ((0, 1), [seen(n, CLOSE) for n in (1, 2, 3, 4, 4)], [0, 0, 1]),
    ((0, 1, 2), [seen(n, CLOSE) for n in range(6)], []),
]


def test_learners_settle_once_they_agree_twice_with_each_other_one(tmp_path, monkeypatch):
    model, optimizer = make()
    with Ring(model, optimizer, folder=tmp_path, config=RingConfig(settle_s=1000.0)) as ring:
        optimizer.step()
        learner, progress = ring._learner, ring._learner.client.progress()
        monkeypatch.setattr(learner.ring, "after_step", lambda step: None)
        for members, said, newcomers in SETTLING:
            view = View(learner.ring.view.number, tuple(Member(node, f"n{node}") for node in members))
            figures, waiting, looks = iter(said), iter(newcomers), learner.looks
            monkeypatch.setattr(learner.ring, "view", view)
            monkeypatch.setattr(learner.ring, "stats", lambda figures=figures: next(figures))
            monkeypatch.setattr(
                learner.client, "progress", lambda waiting=waiting: replace(progress, newcomers=next(waiting, 0))
            )
            learner.settle()
            assert list(figures) == []
            assert learner.looks - looks == len(said) - 2  # without the last one
            assert ring.steps == 1


# --- several processes

LEARNER = textwrap.dedent(
    """
    import json, os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from training.ring.config import RingConfig
    from training.ring.ring import Ring

    name, folder, learners, pause = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(int(name))  # every learner has other initial weights
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = lambda rows: nn.functional.mse_loss(model(inputs[rows]), targets[rows])
    every = torch.arange(1000)
    config = RingConfig.model_validate({"membership": {"dead_after_s": 4.0}})
    found = {}
    first = folder / "rows-0.jsonl"
    while int(sys.argv[6]) and len(first.read_text().splitlines()) < int(sys.argv[6]):
        time.sleep(0.02)
    with Ring(model, optimizer, folder=folder, learners=learners, config=config) as ring, (
        folder / f"rows-{name}.jsonl"
    ).open("a") as rows_file:
        for epoch, shard, rows in ring.leases([50] * 20, epochs=int(sys.argv[5]), batch=25):
            if not found:
                state = optimizer.state[next(iter(model.parameters()))]
                found = {"loss": loss(every).item(), "steps": float(state["step"])}
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
            rows_file.write(json.dumps([[epoch, row] for row in rows.tolist()]) + "\\n")
            rows_file.flush()
            time.sleep(pause)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        result = {"start": found, "loss": loss(every).item(), "weights": weights}
    (folder / f"result-{name}.json").write_text(json.dumps(result))
    print("fine", flush=True)
    os._exit(0)
    """
)


def start(name, folder, learners=1, pause=0.01, epochs=3, after=0):
    """Start a learner, which joins once the first one has made `after` steps."""
    words = [str(word) for word in (name, folder, learners, pause, epochs, after)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"log-{name}").open("w") as log:
        command = [sys.executable, "-c", Forkable(LEARNER), *words]
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def rows_of(folder, name):
    path = folder / f"rows-{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(row) for line in lines for row in json.loads(line)]


def results_of(folder, learners):
    """Wait for learners to end; their results by name."""
    for name, process in learners.items():
        assert process.wait(240) == 0, (folder / f"log-{name}").read_text()[-3000:]
    return {name: json.loads((folder / f"result-{name}.json").read_text()) for name in learners}


def check(folder, names, results, epochs):
    """Every row was trained in every epoch, repetitions are counted, and the weights agree."""
    seen = Counter(row for name in names for row in rows_of(folder, name))
    assert set(seen) == {(epoch, row) for epoch in range(epochs) for row in range(1000)}
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    ended = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}
    assert {line["utterances"] for line in ended.values()} == {1000}
    assert len(ended) == epochs
    assert sum(count - 1 for count in seen.values()) <= sum(line["repeated"] for line in ended.values())
    weights = np.array([result["weights"] for result in results.values()])
    assert np.abs(weights - weights.mean(0)).max() < 0.05 * np.abs(weights).max()
    assert max(result["loss"] for result in results.values()) < 0.5


@pytest.mark.slow
def test_four_learners_train_every_row_and_agree_although_one_is_killed(tmp_path):
    learners = {name: start(name, tmp_path, learners=4) for name in range(4)}
    # any of them: in epochs of a second, one may have taken nearly everything before another one begins
    busy = wait_until(lambda: [name for name in learners if len(rows_of(tmp_path, name)) > 150])
    learners.pop(busy[0]).send_signal(signal.SIGKILL)
    results = results_of(tmp_path, learners)
    check(tmp_path, range(4), results, epochs=3)


@pytest.mark.slow
def test_a_newcomer_takes_weights_and_optimizer_state(tmp_path):
    (tmp_path / "rows-0.jsonl").touch()
    learners = {name: start(name, tmp_path, epochs=6, pause=0.05, after=40 * name) for name in range(2)}
    results = results_of(tmp_path, learners)
    check(tmp_path, range(2), results, epochs=6)
    assert results[1]["start"]["steps"] > 30
    assert results[1]["start"]["loss"] < 0.5 * results[0]["start"]["loss"]
    assert rows_of(tmp_path, 1)


@pytest.mark.slow
def test_killed_coordinator_is_restarted_without_losing_rows(tmp_path):
    learners = {name: start(name, tmp_path, learners=2, pause=0.02) for name in range(2)}
    wait_until(lambda: sum(len(rows_of(tmp_path, name)) for name in learners) > 200)
    note = tmp_path / "coordinator" / "coordinator.json"
    before = json.loads(note.read_text())
    os.kill(before["pid"], signal.SIGKILL)
    results = results_of(tmp_path, learners)
    after = json.loads(note.read_text())
    assert after["pid"] != before["pid"]
    assert after["address"] == before["address"]
    check(tmp_path, range(2), results, epochs=3)
