"""Objects that a node writes: each once, valid ones are not overwritten, and checkpoints are atomic."""

import time
from types import SimpleNamespace

import pytest
import torch

from storage.objects import ObjectStore
from training.coordinator.messages import replica_name
from training.learner.checkpoint import (
    ReplicaState,
    digests,
    evaluation_name,
    load_replica,
    read_weights,
    write_weights,
)
from training.node import replica_writer
from training.node.replica_writer import ReplicaWriter, Wanted

NODE = 3


class FakeClient:
    """The part of a node's client that the replica writer uses."""

    def __init__(self):
        self.epoch = self.checkpoint = None
        self.seq, self.snapshots, self.records = 7, [], []

    def snapshot_wanted(self):
        return self.epoch

    def checkpoint_wanted(self):
        return self.checkpoint

    def snapshot_written(self, epoch):
        self.snapshots.append(epoch)

    def checkpoint_done(self, number, record):
        self.records.append((number, record))


@pytest.fixture
def make(tmp_path):
    def make(value=1.0, apart=False, client=None, rank=0, others=()):
        weights = {"w": torch.full((4,), value)}
        stepper = SimpleNamespace(
            state_per_rank=apart, model=lambda: weights, keep=lambda: ReplicaState(weights, {"m": torch.zeros(2)}, {})
        )
        group = SimpleNamespace(rank=rank, gather_text=lambda text: [text, *others])
        return ReplicaWriter(NODE, stepper, group, ObjectStore(str(tmp_path)), client)

    return make


def test_requests_are_served_once_and_again_after_rejoining(make):
    client = FakeClient()
    traced = make(client=client)
    assert not traced.wanted()
    client.epoch, client.checkpoint = 2, 2
    assert traced.wanted() == Wanted(2, 2)
    assert not traced.wanted()
    assert not traced.end_of(2)
    client.checkpoint = 3
    assert traced.wanted() == Wanted(None, 3)
    assert traced.end_of(3) == Wanted(3)
    client.epoch = 3
    assert not traced.wanted()
    traced.joined(2)
    assert traced.wanted() == Wanted(3, 3)
    traced.close()


def test_replicas_of_epochs_before_joining_are_not_overwritten(make):
    client = FakeClient()
    traced = make(value=5.0, client=client)
    store = traced.output
    for epoch in (1, 2, 4):
        write_weights(store, replica_name(epoch, NODE), {"w": torch.zeros(4)})
    store.write_json(evaluation_name(3), {})  # evaluated, its replicas are gone
    traced.leave(Wanted(epoch=1), 1, [])  # written in this incarnation, so newer than the stored one
    traced.joined(4)
    for epoch in (2, 3, 4, 5):
        traced.leave(Wanted(epoch=epoch), 1, [])
    traced.close()
    assert client.snapshots == [1, 2, 3, 4, 5]
    names = {epoch: replica_name(epoch, NODE) for epoch in range(1, 6)}
    values = {n: float(read_weights(store, name)["w"][0]) for n, name in names.items() if store.exists(name)}
    assert values == {1: 5.0, 2: 0.0, 4: 0.0, 5: 5.0}


def test_missing_replica_of_an_earlier_epoch_is_written_after_joining(make):
    client = FakeClient()
    traced = make(value=5.0, client=client)
    traced.joined(4)
    traced.leave(Wanted(epoch=4), 1, [])
    traced.close()
    assert float(read_weights(traced.output, replica_name(4, NODE))["w"][0]) == 5.0


def test_a_checkpoint_names_its_files_and_the_reports_that_it_contains(make):
    client = FakeClient()
    traced = make(value=2.0, client=client)
    traced.leave(Wanted(checkpoint=4), 11, [{"seconds": 1.5}])
    client.seq = 8  # trained on meanwhile
    traced.close()
    ((number, record),) = client.records
    assert (number, record["node"], record["step"], record["seq"]) == (4, NODE, 11, 7)
    assert record["totals"] == [{"seconds": 1.5}]
    assert {name.rsplit("/", 1)[0] for name in record["files"]} == {"checkpoints/000004/node-003"}
    assert float(load_replica(traced.output, record["files"]).weights["w"][0]) == 2.0


def test_checkpoint_waits_for_the_parts_of_all_ranks(make, monkeypatch):
    client, other = FakeClient(), "checkpoints/000001/node-003/rank-01/model.safetensors"
    data = {other: b"part"}
    listed = f'[["{other}", "{digests(data)[other]}"]]'
    traced = make(apart=True, client=client, others=[listed])
    pauses = []

    def pause(seconds):
        assert not client.records
        pauses.append(seconds)
        traced.output.write(other, data[other])

    # not that of other threads, too
    monkeypatch.setattr(replica_writer, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    traced.leave(Wanted(checkpoint=1), 1, [])
    traced.close()
    assert pauses == [replica_writer.PAUSE_S]
    ((number, record),) = client.records
    assert (number, record["seq"]) == (1, 7)
    assert record["files"][other] == digests(data)[other]
    assert all(traced.output.exists(name) for name in record["files"])
    assert len(record["files"]) == 3


def test_checkpoint_with_missing_parts_is_abandoned(make, monkeypatch):
    monkeypatch.setattr(replica_writer, "PATIENCE_S", 0.0)
    monkeypatch.setattr(replica_writer, "PAUSE_S", 0.001)
    client = FakeClient()
    traced = make(apart=True, client=client, others=['[["checkpoints/000001/node-003/rank-01/x", "0"]]'])
    traced.leave(Wanted(checkpoint=1), 1, [])
    traced.close()
    assert client.records == []


def test_other_rank_writes_only_its_part_and_reports_nothing(make):
    traced = make(apart=True, rank=1)
    traced.leave(Wanted(epoch=1, checkpoint=1), 1, [])
    traced.close()
    assert {name.rsplit("/", 1)[0] for name in traced.output.list("checkpoints")} == {
        "checkpoints/000001/node-003/rank-01"
    }
    assert not list(traced.output.list("replicas"))


def test_failing_storage_loses_a_checkpoint_but_not_the_training(make, monkeypatch):
    client = FakeClient()
    traced = make(client=client)
    monkeypatch.setattr(replica_writer, "write_objects", lambda *_: 1 / 0)
    traced.leave(Wanted(checkpoint=1), 1, [])
    traced.leave(Wanted(epoch=1), 1, [])
    traced.close()
    assert (client.records, client.snapshots) == ([], [1])
