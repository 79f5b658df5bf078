"""Sets of segments: cut from stored features, trained on like utterances."""

import io

import numpy as np
import pytest
import tones
import torch

from recognition.data.dataset import SpeechDataset
from recognition.data.segments import SegmentConfig, cut_set, segments_of
from recognition.data.state_targets import StateTargets
from recognition.systems import SYSTEMS
from speech.alignments import Alignment, AlignmentInfo, AlignmentTable, Span, write_alignments
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardError, ShardReader
from storage.shards import Sample, build_index, write_shard
from tasks.config.training import AcousticTrainConfig, check_system

FRAMES = {"a@b": 50, "c": 21, "d": 5}
STATES = 60


def features(name):
    """Frame number, and number of the utterance."""
    count = FRAMES[name]
    place = np.full(count, list(FRAMES).index(name))
    return np.stack([np.arange(count), place], axis=1).astype(np.float32)


def write_features(folder):
    """One shard an utterance."""
    store, parts = ObjectStore(str(folder)), []
    for number, name in enumerate(FRAMES):
        data = io.BytesIO()
        np.save(data, features(name))
        row = {"duration": FRAMES[name] / 100, "num_frames": FRAMES[name], "sample_rate": 8000, "speaker": f"s{number}"}
        parts.append(write_shard(store, f"{number}.tar", [Sample(name, {"npy": data.getvalue()}, row)], "npy"))
    build_index(parts, {}).write(store)
    return store


def alignments(folder):
    """State i at frame i, for all utterances but c."""
    made = [
        Alignment(name, (), (Span("SIL", 0, FRAMES[name]),), pdfs=np.arange(FRAMES[name], dtype=np.int32))
        for name in ("a@b", "d")
    ]
    write_alignments(folder / "train.parquet", AlignmentInfo(10.0, STATES, "ab"), made)
    return AlignmentTable.read(folder / "train.parquet")


def dataset(store, table):
    index = ShardIndex.read(store)
    return SpeechDataset(index, ShardReader(store, index), targets=StateTargets(table, 1, segments_of(index)))


@pytest.fixture
def source(tmp_path):
    return write_features(tmp_path / "features")


def cut(source, tmp_path, **options):
    target = ObjectStore(str(tmp_path / "segments"))
    return target, cut_set(source, target, SegmentConfig(**options), 0.01, tmp_path / "cache")


def test_segments_do_not_overlap_and_cover_each_utterance(source, tmp_path):
    target, index = cut(source, tmp_path)
    assert index.column("id") == ["a@b@0", "a@b@1", "a@b@2", "c@0", "d@0"]
    assert index.column("num_frames").tolist() == [21, 21, 8, 21, 5]
    assert index.column("duration").tolist() == pytest.approx([0.21, 0.21, 0.08, 0.21, 0.05])
    assert index.column("speaker") == ["s0", "s0", "s0", "s1", "s2"]
    batch = dataset(target, alignments(tmp_path)).batch([0, 1, 2])
    seen = torch.cat([frames[:length] for frames, length in zip(batch.inputs, batch.lengths, strict=True)])
    assert torch.equal(seen, torch.from_numpy(features("a@b")))


def test_targets_cover_only_the_segments_own_frames(source, tmp_path):
    target, _ = cut(source, tmp_path, frames=20, context=4)
    batch = dataset(target, alignments(tmp_path)).batch(range(5))
    assert batch.ids == ["a@b@0", "a@b@1", "a@b@2", "c@0", "c@1"]
    assert batch.lengths.tolist() == [24, 28, 14, 21, 5]
    assert batch.state_lengths.tolist() == [24, 28, 14, 0, 0]
    for row in range(3):
        states, inputs = batch.states[row, : batch.lengths[row]], batch.inputs[row, : batch.lengths[row], 0]
        counted = states >= 0
        assert torch.equal(states[counted].float(), inputs[counted])
        assert states[counted].tolist() == list(range(20 * row, min(20 * row + 20, 50)))


def test_finished_shards_are_kept(source, tmp_path):
    target, index = cut(source, tmp_path)
    before = {name: (tmp_path / "segments" / name).stat().st_mtime_ns for name in ("0.tar", "2.tar")}
    (tmp_path / "segments" / "1.tar").unlink()
    again = cut(source, tmp_path)[1]
    assert again.digest == index.digest
    assert {name: (tmp_path / "segments" / name).stat().st_mtime_ns for name in before} == before
    assert target.exists("1.tar")


def test_damaged_shard_is_quarantined(source, tmp_path):
    path = tmp_path / "features" / "1.tar"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ShardError):
        cut(source, tmp_path)
    target = ObjectStore(str(tmp_path / "others"))
    quarantine = ShardQuarantine(target, 3, 0.5)
    index = cut_set(source, target, SegmentConfig(), 0.01, tmp_path / "cache", quarantine)
    assert index.column("id") == ["a@b@0", "a@b@1", "a@b@2", "d@0"]
    assert [(entry.shard, entry.ids) for entry in quarantine.entries()] == [("1.tar", ("c",))]


def test_sets_of_audio_are_refused(tmp_path):
    tones.speak_set(str(tmp_path / "audio"), 2, 1, "t")
    with pytest.raises(ValueError, match=r"has audio, but segments are cut from features: set features\.stored=true"):
        cut(ObjectStore(str(tmp_path / "audio")), tmp_path)


def test_segments_need_an_objective_of_frames():
    with pytest.raises(ValueError, match="segments have no transcripts, which a recognizer of kind ctc needs"):
        check_system(SYSTEMS["ctc"](), AcousticTrainConfig.model_validate({"segments": {}}))
    config = AcousticTrainConfig.model_validate({"segments": {}, "objective": "frame_cross_entropy"})
    check_system(SYSTEMS["hybrid"](), config)
    assert config.segments == SegmentConfig(frames=21, context=0)
