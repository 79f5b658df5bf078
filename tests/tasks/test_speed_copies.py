"""Copies of training utterances at other speeds: in the shards, in alignments, and not where words are counted."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from safetensors.torch import load_file
from support import environment, load_beside, tiny_document, write_table

from speech.alignments import AlignmentTable
from speech.audio import decode_audio
from storage.index import ShardIndex
from storage.reading import ShardReader
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.speeds import copy_name, is_copy, is_lone
from tasks.stages import align, shard
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD, set_texts

aligning = load_beside(__file__, "aligning.py")
SPEEDS = [0.8, 1.25]


def tones(folder, speakers=6, each=3):
    """A table of tones with different pitches."""
    rows, times = [], np.arange(8000) / 16000
    for number in range(speakers * each):
        path = folder / f"{number}.wav"
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.5 * np.sin(2 * np.pi * (400 + 70 * number) * times), 16000)
        rows.append((f"u{number}", path.name, f"word number {number}", f"s{number % speakers}"))
    return write_table(folder, rows)


def prepared(corpus, **data):
    document = {
        "name": "s",
        "data": {"sources": [{"kind": "table", "path": str(corpus)}], "sample_rate": 8000, "max_quarantined": 0.5}
        | data,
        "storage": {"shard_seconds": 1.5, "workers": 2},
    }
    run = Run(parse_config(document), "r")
    PREPARE.execute(run)
    return run


def sharded(corpus, **data):
    run = prepared(corpus, **data)
    SHARD.execute(run)
    return run


def audio(store, index, folder):
    """Waveform of each utterance."""
    reader = ShardReader(store, index, folder)
    return {name: decode_audio(reader.payload(row))[0] for row, name in enumerate(index.column("id"))}


def pitch(wave):
    """The strongest frequency in Hz."""
    return int(np.abs(np.fft.rfft(wave.numpy())).argmax()) * 8000 / len(wave)


@pytest.mark.parametrize("rows_at_once", [3, 1000])
def test_training_set_has_every_utterance_at_every_speed(home, tmp_path, monkeypatch, rows_at_once):
    monkeypatch.setattr(shard, "_PARTITION_ROWS", rows_at_once)
    corpus = tones(tmp_path / "corpus")
    plain, run = sharded(corpus), sharded(corpus, speeds=SPEEDS)
    assert run.result("prepare").key == plain.result("prepare").key
    assert run.result("shard").key != plain.result("shard").key
    before, after = (ShardIndex.read(pipeline.result("shard").store.child("train")) for pipeline in (plain, run))
    own = before.column("id")
    assert Counter(after.column("id")) == Counter(
        copy_name(original, speed) for original in own for speed in (1, *SPEEDS)
    )
    counts, sets = run.result("shard").counts, run.result("shard").record["sets"]
    assert counts["copies"] == 2 * len(own)
    assert counts["written"] == counts["read"] + counts["copies"] == sum(entry["utterances"] for entry in sets.values())
    assert Counter(set_texts(run, "train")) == Counter(set_texts(plain, "train"))
    for name in ("valid", "test"):
        indexes = [ShardIndex.read(pipeline.result("shard").store.child(name)) for pipeline in (plain, run)]
        assert indexes[0].digest == indexes[1].digest
    waves = audio(run.result("shard").store.child("train"), after, tmp_path / "cache")
    rows = {row["id"]: row for row in map(after.row, range(len(after)))}
    for original in own:
        for speed in SPEEDS:
            copy = copy_name(original, speed)
            assert is_copy(copy, SPEEDS)
            assert not is_copy(copy, [0.9])
            assert len(waves[copy]) == pytest.approx(len(waves[original]) / speed, abs=1)
            assert pitch(waves[copy]) == pytest.approx(speed * pitch(waves[original]), rel=0.02)
            assert rows[copy]["speaker"] == copy_name(rows[original]["speaker"], speed) != rows[original]["speaker"]
            assert rows[copy]["duration"] == len(waves[copy]) / 8000
            assert rows[copy]["text"] == rows[original]["text"]


def test_share_of_copies_have_speakers_of_their_own(home, tmp_path):
    corpus = tones(tmp_path / "corpus")
    together, run = (sharded(corpus, speeds=SPEEDS, lone_copies=share) for share in (0.0, 0.5))
    assert run.result("shard").key != together.result("shard").key
    apart, before = (ShardIndex.read(pipeline.result("shard").store.child("train")) for pipeline in (run, together))
    speakers = dict(zip(before.column("id"), before.column("speaker"), strict=True))
    copies = [utterance for utterance in speakers if is_copy(utterance, SPEEDS)]
    lone = {utterance for utterance in copies if is_lone(utterance, 0.5)}
    assert 0.2 * len(copies) < len(lone) < 0.8 * len(copies)
    for utterance, who in zip(apart.column("id"), apart.column("speaker"), strict=True):
        assert who == (utterance if utterance in lone else speakers[utterance])
    assert not any(is_lone(utterance, 0.0) for utterance in copies)
    assert all(is_lone(utterance, 1.0) for utterance in copies)


def test_copies_of_utterances_that_can_no_longer_be_read_are_counted_as_well(home, tmp_path):
    corpus = tones(tmp_path / "corpus")
    run = prepared(corpus, speeds=SPEEDS, valid_share=0.0, test_share=0.0, max_quarantined=0.5)
    (tmp_path / "corpus" / "7.wav").unlink()
    counts = SHARD.execute(run).counts
    assert (counts["read"], counts["copies"], counts["quarantined"]) == (18, 36, 3)
    assert counts["written"] == 18 + 36 - 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"speeds": [0.4]}, "data.speeds: 0.4 is not between 0.5 and 2"),
        ({"speeds": [1.1, 1]}, "data.speeds: 1 is the speed of the utterances themselves"),
        ({"speeds": [0.9, 0.9]}, "data.speeds: two speeds are the same"),
        ({"lone_copies": 0.5}, "lone_copies is a share of the copies at other speeds"),
        ({"speeds": [0.9], "folds": 3}, "folds are tested on, too, so they have no copies at other speeds"),
    ],
)
def test_speeds_are_checked(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"name": "s", "data": {"sources": [{"kind": "table", "path": "t.csv"}], **data}})


class CapturedError(Exception):
    """Ends a training before it begins."""


def trained_on(monkeypatch, run):
    """Ids of the utterances that the Gaussians would be trained on."""
    trained = []

    def captured(utterances, *_):
        trained.extend(utterance.id for utterance in utterances)
        raise CapturedError

    with monkeypatch.context() as patch:
        patch.setattr(align, "Trainer", captured)
        with pytest.raises(CapturedError):
            align.ALIGN.execute(run)
    return trained


def test_copies_are_aligned_and_adapted_like_speakers_of_their_own(tmp_path, monkeypatch):
    with environment(STARLING_HOME=tmp_path / "home", MLFLOW_TRACKING_URI=None):
        data = tiny_document()["data"] | {"speeds": [0.8]}
        data["sources"][0]["synthesis"] |= {"train": 16, "valid": 2, "test": 2}
        run = aligning.aligned_run(tmp_path / "home", data=data)
        index = ShardIndex.read(run.result("shard").store.child("train"))
        own = [original for original in index.column("id") if not is_copy(original, [0.8])]
        assert len(own) == len(index) / 2
        with_copies = run.config.align.model_copy(update={"copies": True})
        every = replace(run, config=run.config.model_copy(update={"align": with_copies}))
        assert sorted(trained_on(monkeypatch, every)) == sorted(index.column("id"))
        assert sorted(trained_on(monkeypatch, run)) == sorted(own)
        output = align.ALIGN.execute(run).output
        table = AlignmentTable.read(output.fetch("alignments/train.parquet", tmp_path))
        pairs = [
            (original, copy_name(original, 0.8))
            for original in own
            if original in table and copy_name(original, 0.8) in table
        ]
        assert len(pairs) > 0.8 * len(own)
        for original, copy in pairs:
            assert len(table.pdfs(copy)) == pytest.approx(len(table.pdfs(original)) / 0.8, abs=3)
        transforms = load_file(output.fetch("speakers.safetensors", tmp_path))
        speakers = set(index.column("speaker"))
        assert {who.removeprefix("train/") for who in transforms if who.startswith("train/")} == speakers
        assert sum(is_copy(who, [0.8]) for who in speakers) == len(speakers) / 2
