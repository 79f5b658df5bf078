"""Shards of the next leases are prefetched, from a real S3 server."""

import pytest
import torch
from support import wait_until
from tones import Worker, ask_coordinator, serve_coordinator, speak_set

from storage.index import ShardIndex
from storage.objects import ObjectStore
from training.coordinator.messages import StatusRequest
from training.coordinator.node_client import NodeClient
from training.learner.compute import Learner, open_set
from training.node.process_group import NodeGroup
from training.strategies.synchronous import ScpsgdConfig, SingleConfig

SHARDS = 12


@pytest.fixture
def job(corpus, s3_server, tmp_path):
    """A job for two nodes over twelve shards in a bucket."""
    url = f"s3://speech/{tmp_path.name}"
    speak_set(url, 10 * SHARDS, 1, "t")
    member = {"beat_s": 0.05, "dead_after_s": 60.0, "start_patience_s": 60.0}
    options = {"strategy": "adpsgd", "nodes": 2, "max_batch": 8, "epochs": 1, "membership": member}
    return corpus.job(tmp_path, train_url=url, cache_bytes=10**8, **options)


def make_worker(job, address, node):
    folder, cpu = job.journal.parent / f"node-{node:03d}", torch.device("cpu")
    folder.mkdir(parents=True, exist_ok=True)
    client = NodeClient(address, None, node, folder=folder)
    return Worker(job, node, Learner(job, cpu), NodeGroup(0, 1, folder / "meet", cpu), None, client)


def shards_of(worker, batches):
    shard_of, names = worker.data.index.column("shard"), worker.data.index.shards
    return {names[int(shard_of[row])].sha256 for batch in batches for row in batch.rows}


def test_shards_of_a_lease_are_fetched_before_its_first_batch(job):
    """Two nodes share the epoch; one is idle. The other takes no batch of a lease before its shards are here."""
    with serve_coordinator(job) as address:
        idle = NodeClient(address, None, 1, folder=job.journal.parent)
        idle.join(())
        worker = make_worker(job, address, 0)
        client = worker.client
        try:
            worker.join()
            idle.begin(lambda *_: [], worker.draws.shard)
            leases = []
            while len(leases) < 3:
                first = wait_until(lambda: client.peek(1), every_s=0.02)[0]
                batches = [batch for batch in client.peek(100) if batch.lease == first.lease]
                wanted = shards_of(worker, batches)
                wait_until(
                    lambda wanted=wanted: wanted <= {path.stem for path in job.cache.glob("*.tar")}, every_s=0.02
                )
                leases.append(wanted)
                for _ in batches:
                    work = wait_until(client.next, every_s=0.02)
                    counts = {"utterances": len(work.rows), "seconds": 1.0, "tokens": 1, "loss_sum": 1.0}
                    client.trained(work, **counts)
        finally:
            for connection in (client, idle):
                connection.leave()
                connection.close()
            worker.prefetch.close()
    assert 2 <= len(leases[0]) < SHARDS
    assert not leases[0] & leases[1]


def test_epoch_is_prefetched_in_batch_order_within_half_of_the_cache(job):
    index = ShardIndex.read(ObjectStore(job.task.train_url))
    largest = max(record.bytes for record in index.shards)
    dataset = open_set(job.model_copy(update={"cache_bytes": 6 * largest}), "train")
    rows = [5 * 10, 2 * 10 + 3, 5 * 10 + 7, 9 * 10, 0, 10, 7 * 10]
    dataset.prefetch(torch.tensor(rows).numpy())
    wait_until(lambda: dataset.reader._prefetcher is None, every_s=0.02)
    assert {path.stem for path in job.cache.glob("*.tar")} == {index.shards[number].sha256 for number in (5, 2, 9)}


def test_the_whole_training_reads_each_shard_once(job, monkeypatch):
    fetched = []
    fetch = ObjectStore.fetch_into

    def counting(store, name, target):
        fetched.append(store.join(name))
        return fetch(store, name, target)

    monkeypatch.setattr(ObjectStore, "fetch_into", counting)
    train = job.train.model_copy(update={"nodes": 1, "strategy": SingleConfig(), "epochs": 2})
    job = job.model_copy(update={"train": train})
    with serve_coordinator(job) as address:
        worker = make_worker(job, address, 0)
        try:
            assert worker.run() == "done"
        finally:
            worker.client.close()
        totals = ask_coordinator(address, StatusRequest()).totals
    assert totals["utterances"] == 2 * 10 * SHARDS
    assert sorted(name for name in fetched if name.endswith(".tar")) == [
        f"{job.task.train_url}/{number:06d}.tar" for number in range(SHARDS)
    ]


def test_every_machine_of_a_node_prefetches_the_shards(job, tmp_path):
    node = {"strategy": ScpsgdConfig(), "nodes": 1, "learners_per_node": 2, "machines_per_node": 2}
    job = job.model_copy(update={"train": job.train.model_copy(update=node)})
    with serve_coordinator(job) as address:
        worker = make_worker(job, address, 0)
        try:
            worker.join()
            first, second = (wait_until(lambda: next_train_order(worker), every_s=0.02) for _ in range(2))
        finally:
            worker.client.leave()
            worker.client.close()
            worker.prefetch.close()
    assert len(first["fetch"]) == SHARDS
    assert second["fetch"] == []  # they have been sent already
    elsewhere = job.model_copy(update={"cache": tmp_path / "elsewhere"})
    cpu = torch.device("cpu")
    group = NodeGroup(0, 1, tmp_path / "meet", cpu)
    group.rank = 1  # the first learner of the second machine, without a process group
    other = Worker(elsewhere, 0, Learner(job, cpu), group, None, None)
    other._fetch(first["fetch"])
    everything = {shard.sha256 for shard in worker.data.index.shards}
    wait_until(lambda: {path.stem for path in elsewhere.cache.glob("*.tar")} == everything, every_s=0.02)
    other.prefetch.close()


def next_train_order(worker):
    """The next order if it is to train a step, otherwise None."""
    orders = worker.scheduler.decide(0, worker.ring.view.number)
    return orders if orders["do"] == "step" else None
