"""The ring for any model: its refusals, one learner alone, and learners as processes that join and are killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from bookkeeping import Clock, join, make_coordinator
from forks import Forkable
from ranks import run_ranks
from torch import nn

from storage.objects import ObjectStore
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core
from training.coordinator.epochs import ShardMap
from training.coordinator.messages import CoordinatorError, NamedData
from training.coordinator.numbers import HELD_S, NodeNumbers
from training.coordinator.requests import NumberRequest
from training.coordinator.server import open_ledger
from training.coordinator.settings import Settings
from training.launch.managed import SupervisorError
from training.processes.keys import RingKey
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
    found = [numbers.answer(NumberRequest(token=token)).node for token in ("a", "b", "a")]
    assert found == [0, 2, 0]
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


# --- refusals


def test_a_ring_needs_a_folder_or_an_address(tmp_path):
    for place in ({}, {"folder": tmp_path, "address": "127.0.0.1:1"}):
        with pytest.raises(ValueError, match="either a folder .* or the address"):
            Ring(*make(), **place)


@pytest.mark.parametrize(
    ("exchange", "message"), [({"kind": "gloo"}, "cannot join or leave: use zmq"), ({"daemons": 2}, "use .*daemons=1")]
)
def test_exchange_that_cannot_admit_newcomers_is_refused(exchange, message):
    with pytest.raises(ValueError, match=message):
        RingConfig.model_validate({"exchange": exchange})


def test_a_model_without_trainable_parameters_is_refused(tmp_path):
    model, optimizer = make()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="must be on one device; found: none"):
        Ring(model, optimizer, folder=tmp_path)


def test_a_process_group_of_the_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="leave out init_process_group"):
            Ring(*make(), folder=tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def test_reason_of_a_coordinator_that_cannot_start_is_passed_on(tmp_path):
    (tmp_path / "ring.key").write_text("this is no key")
    with pytest.raises(SupervisorError, match=r"coordinator ended with status 2(.|\n)*ring.key"):
        RingFolder(tmp_path, RingConfig()).enter()


# --- one learner


def test_single_learner_trains_every_row_once_and_reruns_start_fresh(tmp_path):
    for _ in range(2):
        model, optimizer = make()
        with Ring(model, optimizer, folder=tmp_path) as ring:
            with pytest.raises(RingError, match="do not call it"):
                ring.before_step()
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


SERVE = textwrap.dedent(
    """
    import sys
    from training.ring.config import RingConfig
    from training.ring.ring import Ring

    config = RingConfig.model_validate({"membership": {"coordinator_patience_s": 1.0}})
    Ring.serve("127.0.0.1:0", sys.argv[1], sys.argv[2], config=config)
    """
)


@pytest.fixture
def served_coordinator(tmp_path):
    """A coordinator that a process of its own serves: the process, its address and its key's file."""
    key, note = tmp_path / "ring.key", tmp_path / "served_coordinator" / "coordinator.json"
    RingKey.generate().save(key)
    command = [sys.executable, "-c", Forkable(SERVE), str(note.parent), str(key)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            wait_for(note.exists)
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
    assert process.wait(60) == 0


def test_leases_raise_an_error_if_the_coordinator_stays_down(served_coordinator):
    process, address, key = served_coordinator
    model, optimizer = make()
    with Ring(model, optimizer, address=address, key=key) as ring:
        pieces = ring.leases([4, 4], epochs=100_000, batch=1)
        next(pieces)
        process.kill()
        with pytest.raises(RingError, match="may be untrained"):
            list(pieces)


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
    with Ring(model, optimizer, folder=folder / "ring"):
        optimizer.step()  # without a gradient
    assert torch.equal(model.weight, begin) == (rank == 0)
    (folder / f"weights-{rank}").write_text(str(model.weight.tolist()))
    print("fine", flush=True)
    os._exit(0)
    """
)


def test_learners_of_a_node_begin_with_the_weights_of_its_first_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run_ranks(NODE, 2, tmp_path, port)
    first, second = ((tmp_path / f"weights-{rank}").read_text() for rank in range(2))
    assert first == second


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
    return [tuple(one) for line in lines for one in json.loads(line)]


def wait_for(condition, patience_s=240.0):
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


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
    wait_for(lambda: len(rows_of(tmp_path, 1)) > 150)
    learners.pop(1).send_signal(signal.SIGKILL)
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
    wait_for(lambda: len(rows_of(tmp_path, 0)) > 200)
    note = tmp_path / "coordinator" / "coordinator.json"
    before = json.loads(note.read_text())
    os.kill(before["pid"], signal.SIGKILL)
    results = results_of(tmp_path, learners)
    after = json.loads(note.read_text())
    assert after["pid"] != before["pid"]
    assert after["address"] == before["address"]
    check(tmp_path, range(2), results, epochs=3)
