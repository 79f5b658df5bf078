"""A local shard that was altered after its first use ended the training, or was used for training as it was."""

import shutil

import pytest
from support import load_beside

from recognition.data.dataset import SpeechDataset
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardError, ShardReader


@pytest.fixture
def folder(tmp_path):
    tones = load_beside(__file__, "../training/tones.py")
    tones.speak_set(str(tmp_path / "set"), 20, 3, "u")
    return tmp_path / "set"


def open_set(folder, limit):
    store = ObjectStore(str(folder))
    index = ShardIndex.read(store)
    quarantine = ShardQuarantine(store, len(index), limit)
    return SpeechDataset(index, ShardReader(store, index), quarantine=quarantine), quarantine


def test_altered_shard_is_detected_and_left_out(folder):
    dataset, quarantine = open_set(folder, 0.6)
    before = dataset.batch([0, 1, 10])
    shard = folder / dataset.index.shards[0].name
    content = shard.read_bytes()
    # one bit of the samples: the audio still decodes
    shard.write_bytes(content[:2500] + bytes([content[2500] ^ 1]) + content[2501:])
    after = dataset.batch([0, 1, 10])
    assert (after.ids, after.unreadable) == (["u010"], 2)
    assert [entry.shard for entry in quarantine.entries()] == [shard.name]
    assert before.unreadable == 0


def test_rewritten_shard_is_read_again(folder):
    dataset, quarantine = open_set(folder, 0.0)
    before = dataset.batch([0, 1])
    shard = folder / dataset.index.shards[0].name
    shutil.copy(shard, folder / "copy")
    shard.unlink()
    shutil.copy(folder / "copy", shard)
    assert dataset.batch([0, 1]).inputs.equal(before.inputs)
    assert quarantine.entries() == []


def test_altered_shard_is_an_error_without_quarantine(folder):
    dataset = SpeechDataset(ShardIndex.read(ObjectStore(str(folder))), open_set(folder, 0.0)[0].reader)
    dataset.batch([0])
    shard = folder / dataset.index.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-2000])
    with pytest.raises(ShardError, match="bytes instead of"):
        dataset.batch([1])
