"""The benchmark of a coordinator's load counts what the coordinator counts."""

from benchmarks.coordinator_load import WARM_TURNS, Options, measure


def test_all_nodes_join_and_every_report_arrives():
    row = measure(Options(nodes=6, utterances=3000, per_shard=100, per_batch=50, seconds=1.0, clients=2))
    assert row["members"] == 6
    assert row["beats_per_s"] == row["beats"] / 1.0
    # a turn trains one batch at most
    assert 6 < row["batches"] <= row["beats"] + 6 * WARM_TURNS
    assert row["leases"] >= 6
    # the last turn of each node reports what it trained in that turn
    assert row["reported"] == 50 * row["batches"]
    assert row["cpu_ms_per_beat"] > 0
    assert row["memory_mb"] > 10
