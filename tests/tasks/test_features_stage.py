import io
import shutil

import numpy as np
import pytest
import torch
from support import environment, small_corpus

from speech.audio import decode_audio
from speech.features import build_features
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from storage.index import ShardIndex
from storage.reading import ShardReader
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.stages import feature_shards, features
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.run_sets import set_digest, set_url
from tasks.stages.shard import SHARD


def executed(corpus, stages, **features):
    document = {
        "name": "f",
        "data": {"sources": [{"kind": "table", "path": str(corpus / "metadata.csv")}], "sample_rate": 8000},
        "storage": {"shard_seconds": 1.5, "workers": 2},
        "features": {"num_mels": 20} | features,
    }
    run = Run(parse_config(document), "r")
    for stage in stages:
        stage.execute(run)
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    small_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(corpus, tmp_path_factory):
    """A data folder with the corpus in shards."""
    folder = tmp_path_factory.mktemp("sharded")
    with environment(STARLING_HOME=folder, MLFLOW_TRACKING_URI=None):
        executed(corpus, (PREPARE, SHARD))
    return folder


@pytest.fixture
def extracted(home, corpus, sharded):
    """Features of the corpus, extracted in a data folder of the test's own."""
    shutil.copytree(sharded, home)

    def extract(**features):
        run = executed(corpus, (PREPARE, SHARD, FEATURES), **features)
        return run.result("features"), run

    return extract


def all_features(run, name):
    """Features of a set, computed one by one, by speaker."""
    store = run.result("shard").store.child(name)
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    extract = build_features(run.config.features, 8000)
    by_speaker = {}
    for i in range(len(index)):
        wave, _ = decode_audio(reader.payload(i))
        feats, frames = extract(wave[None], torch.tensor([len(wave)]))
        by_speaker.setdefault(index.row(i)["speaker"], []).append(feats[0, : int(frames[0])])
    return {who: torch.cat(parts).double() for who, parts in by_speaker.items()}


def test_global_statistics_are_computed_over_the_training_set(extracted):
    result, run = extracted()
    everything = torch.cat(list(all_features(run, "train").values()))
    stats = CmvnStats.from_dict(result.record["stats"])
    assert stats.count == len(everything) == result.counts["frames"]
    np.testing.assert_allclose(stats.mean, everything.mean(dim=0), atol=1e-4)
    np.testing.assert_allclose(stats.std, everything.std(dim=0, correction=0), rtol=1e-3)
    assert result.record["speakers"] == {}
    assert result.counts["dimensions"] == 20


def test_speaker_statistics_cover_every_speaker_of_every_set(extracted):
    result, run = extracted(cmvn="speaker")
    assert set(result.record["speakers"]) == {"s0", "s1", "s2", "s3"}
    for name in ("train", "valid", "test"):
        for who, feats in all_features(run, name).items():
            stats = CmvnStats.from_dict(result.record["speakers"][who])
            np.testing.assert_allclose(stats.mean, feats.mean(dim=0), atol=1e-4)
    assert result.record["stats"] is None


@pytest.mark.parametrize("cmvn", ["utterance", "none"])
def test_without_statistics_no_audio_is_read(extracted, cmvn, monkeypatch):
    monkeypatch.setattr(features, "features_of_set", None)
    result, _ = extracted(cmvn=cmvn)
    assert result.counts == {"frames": 0, "dimensions": 20}
    assert (result.record["stats"], result.record["speakers"]) == (None, {})


@pytest.mark.parametrize(("kind", "dim"), [("logmel", 20), ("mfcc", 13)])
def test_stored_features_equal_those_computed_on_the_fly(extracted, kind, dim):
    result, run = extracted(stored=True, kind=kind)
    assert result.counts["stored"] == 12
    for name in ("train", "valid", "test"):
        store = result.store.child(name)
        index = ShardIndex.read(store)
        reader = ShardReader(store, index)
        stored = [np.load(io.BytesIO(reader.payload(i)), allow_pickle=False) for i in range(len(index))]
        assert index.metadata["payload"] == "npy"
        assert [len(feats) for feats in stored] == list(index.column("num_frames"))
        assert stored[0].shape[1] == dim
        speakers = index.column("speaker")
        for who, feats in all_features(run, name).items():
            mine = np.concatenate([f for f, s in zip(stored, speakers, strict=True) if s == who])
            np.testing.assert_allclose(np.sort(mine, axis=0), np.sort(feats.float().numpy(), axis=0), atol=1e-5)


def test_training_reads_stored_features_if_there_are_any(extracted):
    _, fly = extracted()
    _, stored = extracted(stored=True)
    assert set_url(fly, "train") == fly.result("shard").store.child("train").url
    assert set_url(stored, "train") == stored.result("features").store.child("train").url
    assert set_digest(fly, "train") != set_digest(stored, "train")


def test_restarted_stage_reuses_finished_shards(extracted, monkeypatch):
    work, calls = feature_shards.Extractor.features, []

    def failing(self, payload):
        calls.append(payload)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return work(self, payload)

    monkeypatch.setattr(feature_shards.Extractor, "features", failing)
    with pytest.raises(KeyboardInterrupt):
        extracted(stored=True)
    result, _ = extracted(stored=True)
    assert len(calls) < 5 + 12
    whole, _ = extracted(stored=True, cmvn="speaker")  # a different address, computed without interruption
    assert result.record["sets"] == whole.record["sets"]


@pytest.mark.parametrize(
    "given",
    [
        {"delta_order": 2, "splice_left": 3, "splice_right": 3, "stride": 3},
        {"kind": "fber", "cmvn": "sliding", "cmvn_window": 20, "delta_order": 1},
        {"kind": "mfcc", "use_energy": True, "cmvn": "speaker", "cmvn_variance": False, "splice_left": 1},
    ],
)
def test_stored_features_are_neither_normalized_nor_expanded(extracted, given):
    result, run = extracted(stored=True, **given)
    cfg = run.config.features
    stats = CmvnStats.from_dict(result.record["stats"]) if result.record["stats"] else None
    speakers = {who: CmvnStats.from_dict(value) for who, value in result.record["speakers"].items()}
    frontend = FrontEnd(cfg, 8000, stats, speakers)
    assert result.counts["dimensions"] == frontend.dim == frontend.extract.dim * cfg.frame_factor
    stored, audio = (
        ShardIndex.read(result.store.child("train")),
        ShardIndex.read(run.result("shard").store.child("train")),
    )
    rows = {stored.row(i)["id"]: i for i in range(len(stored))}
    reader = ShardReader(result.store.child("train"), stored)
    waves = ShardReader(run.result("shard").store.child("train"), audio)
    for i in range(len(audio)):
        row = audio.row(i)
        wave, _ = decode_audio(waves.payload(i))
        feats = np.load(io.BytesIO(reader.payload(rows[row["id"]])), allow_pickle=False)
        assert feats.shape[1] == frontend.extract.dim
        expected, frames = frontend(wave[None], torch.tensor([len(wave)]), [row["speaker"]])
        computed, same = frontend(torch.from_numpy(feats)[None], torch.tensor([len(feats)]), [row["speaker"]])
        assert frames.tolist() == same.tolist()
        torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)


def test_waveform_augmentation_is_refused_with_stored_features(tmp_path):
    def document(**augment):
        sources = [{"kind": "table", "path": "x.csv"}]
        return {"name": "f", "data": {"sources": sources}, "features": {"stored": True}, "train": {"augment": augment}}

    with pytest.raises(ConfigError, match=r"features\.stored leaves no waveforms.*speed_factors, reverb"):
        parse_config(document(speed_factors=[0.9, 1.1], reverb={}))
    parse_config(document(time_warp_frames=5))
    parse_config(document(speed_factors=[0.9], enabled=False))


def test_noise_files_are_relative_to_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISES", "/srv/noises")
    text = """
name: f
data: {sources: [{kind: table, path: x.csv}]}
train: {augment: {noise: {files: [noise, $NOISES/b]}, reverb: {files: [../rirs]}}}
"""
    (tmp_path / "c.yaml").write_text(text)
    augment = load_config(tmp_path / "c.yaml").train.augment
    assert augment.file_lists() == [str(tmp_path / "noise"), "/srv/noises/b", str(tmp_path.parent / "rirs")]


def test_feature_kind_is_part_of_the_address(extracted):
    others = ({"num_mels": 21}, {"cmvn": "none"}, {"kind": "mfcc"}, {"delta_order": 1}, {"kind": "fbank"})
    keys = {extracted(**given)[0].key for given in ({}, *others)}
    assert len(keys) == 6
    same = {extracted(**given)[0].key for given in ({}, {"delta_order": 0}, {"cmvn_window": 600})}
    assert len(same) == 1
