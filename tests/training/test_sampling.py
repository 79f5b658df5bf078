"""Which utterances an epoch draws, when corpora, domains or languages are balanced."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from storage.index import SCHEMA, ShardIndex, ShardRecord
from training.learner.sampling import Draws, SamplingConfig, SamplingError, apportion


def make_index(sizes, shards=4):
    """An index without audio: `sizes` utterances by corpus, distributed over the shards in turn."""
    corpora = [name for name, size in sizes.items() for _ in range(size)]
    count = len(corpora)
    shard = np.sort(np.arange(count) % shards).astype(np.int32)
    columns = {
        "id": [f"u{i}" for i in range(count)],
        "shard": shard,
        "offset": np.zeros(count, np.int64),
        "length": np.zeros(count, np.int64),
        "duration": np.ones(count),
        "num_frames": np.ones(count, np.int64),
        "sample_rate": np.full(count, 8000, np.int32),
        "corpus": corpora,
        **{name: [""] * count for name in ("text", "speaker", "domain", "language")},
    }
    table = pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names})
    sizes_of = np.bincount(shard, minlength=shards)
    records = tuple(ShardRecord(f"s{k}.tar", int(n), float(n), 1, "0") for k, n in enumerate(sizes_of))
    return ShardIndex(table, records, {"payload": "flac"})


def drawn(index, cfg, epochs, seed=3):
    draws = Draws(index, cfg, seed)
    return [draws.rows(epoch, np.arange(len(draws))) for epoch in range(epochs)], draws


def shares(index, rows):
    corpora = index.column("corpus")
    counts = Counter(corpora[row] for row in rows)
    return {name: count / len(rows) for name, count in counts.items()}


INDEX = make_index({"big": 300, "small": 40, "tiny": 7})


def test_proportional_is_every_utterance_once():
    epochs, draws = drawn(INDEX, SamplingConfig(), 2)
    assert len(draws) == len(INDEX)
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(len(INDEX)))


def test_temperature_one_keeps_the_proportions_of_groups():
    epochs, _ = drawn(INDEX, SamplingConfig(kind="temperature", temperature=1.0), 2)
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(len(INDEX)))


@pytest.mark.parametrize("temperature", [2.0, 5.0, 1e6])
def test_temperature_shares_follow_the_formula(temperature):
    (rows,), _ = drawn(INDEX, SamplingConfig(kind="temperature", temperature=temperature), 1)
    sizes = np.array([300, 40, 7]) / 347
    expected = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
    assert len(rows) == 347
    got = shares(INDEX, rows)
    for name, share in zip(["big", "small", "tiny"], expected, strict=True):
        assert got[name] == pytest.approx(share, abs=1 / 347)


def test_weights_are_shares_and_zero_excludes_a_group():
    weights = {"big": 1.0, "small": 3.0, "tiny": 0.0}
    (rows,), _ = drawn(INDEX, SamplingConfig(kind="weights", weights=weights), 1)
    assert shares(INDEX, rows) == pytest.approx({"big": 0.25, "small": 0.75}, abs=1 / 347)


def test_utterances_repeat_only_after_all_of_their_shard_and_group():
    cfg = SamplingConfig(kind="weights", weights={"big": 1, "small": 1, "tiny": 1})
    epochs, _ = drawn(INDEX, cfg, 12)
    counts = np.bincount(np.concatenate(epochs), minlength=len(INDEX))
    shard, corpora = INDEX.column("shard"), np.array(INDEX.column("corpus"))
    for number in range(4):
        for corpus in ("big", "small", "tiny"):
            cell = counts[(shard == number) & (corpora == corpus)]
            if len(cell):
                assert cell.max() - cell.min() <= 1
    assert (counts > 0).all()  # the downsampled corpus too, in 12 epochs


def test_a_draw_stays_in_its_shard_and_depends_on_seed_and_epoch_only():
    cfg = SamplingConfig(kind="temperature", temperature=3.0)
    epochs, draws = drawn(INDEX, cfg, 3)
    shard = INDEX.column("shard")
    for rows in epochs:
        assert (shard[rows] == draws.shard).all()
    again = Draws(INDEX, cfg, 3)
    backwards = [again.rows(epoch, np.arange(len(again))) for epoch in (2, 1, 0)][::-1]
    assert all((rows == other).all() for rows, other in zip(epochs, backwards, strict=True))
    assert (epochs[0] != epochs[1]).any()
    other_seed, _ = drawn(INDEX, cfg, 1, seed=4)
    assert (other_seed[0] != epochs[0]).any()


def test_weights_must_name_exactly_the_groups():
    with pytest.raises(SamplingError, match="no weight for 'tiny'"):
        Draws(INDEX, SamplingConfig(kind="weights", weights={"big": 1, "small": 1}), 0)
    with pytest.raises(SamplingError, match="a weight for 'huge'.*'big', 'small', 'tiny'"):
        Draws(INDEX, SamplingConfig(kind="weights", weights={"big": 1, "small": 1, "tiny": 1, "huge": 1}), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "weights"},
        {"weights": {"a": 1.0}},
        {"kind": "weights", "weights": {"a": -1.0}},
        {"kind": "weights", "weights": {"a": 0.0}},
        {"kind": "temperature", "temperature": 0.5},
    ],
)
def test_invalid_sampling_configurations_are_refused(fields):
    with pytest.raises(ValidationError):
        SamplingConfig(**fields)


def test_apportioned_counts_add_up_to_the_total():
    for total in (0, 1, 7, 100):
        assert apportion(np.array([1.0, 2.0, 3.5]), total).sum() == total
