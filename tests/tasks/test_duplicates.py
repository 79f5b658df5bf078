import shutil
from collections import Counter

import numpy as np
import pytest
import soundfile
import torch
from support import small_corpus, tone, write_table

from speech.audio import resample
from tasks.config.pipeline import parse_config
from tasks.dataset.duplicates import NEAR, TEXT, DuplicateError, DuplicateGroups, doubles_text, find_doubles
from tasks.dataset.policies import DuplicatesConfig
from tasks.dataset.sets import Sets
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE


def corpus(folder):
    """Ten recordings; one of `train` is also in `test`, padded, resampled and softer; one is in `train` twice."""
    rows = []
    for n in range(10):
        path = folder / "audio" / f"{n}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone(1.5, seed=n), 16000, subtype="PCM_16")
        rows.append((f"u{n}", path, f"text {n}", f"s{n}", "train" if n < 6 else "test" if n < 8 else "valid"))
    wave = torch.from_numpy(soundfile.read(rows[1][1], dtype="float32")[0])
    altered = resample(torch.cat([torch.zeros(5000), wave, torch.zeros(3000)]), 16000, 22050) * 0.2
    soundfile.write(folder / "audio" / "near.flac", altered.numpy(), 22050)
    rows.append(("near", folder / "audio" / "near.flac", "other words", "x", "test"))
    shutil.copy(rows[2][1], folder / "audio" / "again.wav")
    rows.append(("again", folder / "audio" / "again.wav", "text 2", "s2", "train"))
    rows.append(("said", folder / "audio" / "said.wav", "text 3", "s3", "test"))
    soundfile.write(rows[-1][1], tone(1.5, seed=99), 16000)
    return write_table(folder, rows)


def prepare(path, **policies):
    document = {"name": "d", "data": {"sources": [{"kind": "table", "path": str(path)}], "duplicates": policies}}
    return PREPARE.execute(Run(parse_config(document), "r"))


def test_overlap_of_training_and_test_is_refused_by_default(home, tmp_path):
    with pytest.raises(DuplicateError, match=r"u1 \(train\) and near \(test\), near-.*overlap: drop.*duplicates"):
        prepare(corpus(tmp_path))


def test_kept_duplicates_are_listed(home, tmp_path):
    result = prepare(corpus(tmp_path), overlap="keep")
    rows = {row["id"]: row for row in read_table(result.store, "duplicates.parquet")}
    assert {name: (row["kind"], row["where"], row["other_id"]) for name, row in rows.items()} == {
        "u1": ("near-duplicate", "overlap", "near"),
        "again": ("same-audio", "within", "u2"),
        "u3": ("same-text", "overlap", "said"),
    }
    assert 0 < rows["u1"]["bit_errors"] < 0.17
    assert result.record["duplicates"] == {
        "near-duplicate overlap": 1, "same-audio within": 1, "same-text overlap": 1, "same-text within": 1
    }  # fmt: skip
    assert result.counts == {"read": 13, "written": 13, "quarantined": 0}


def test_dropped_duplicates_are_quarantined_and_counts_add_up(home, tmp_path):
    result = prepare(corpus(tmp_path), overlap="drop", within="drop", same_text="drop")
    gone = {row["id"]: row["reason"] for row in read_table(result.store, QUARANTINE)}
    assert gone == {"u1": "near-duplicate", "again": "duplicate", "u3": "same-text"}
    used = read_table(result.store, MANIFEST)
    assert not gone.keys() & {row["id"] for row in used}
    assert Counter(row["set"] for row in used) == {"train": 4, "test": 4, "valid": 2}
    assert result.counts == {"read": 13, "written": 10, "quarantined": 3}
    assert result.record["sets"]["train"]["utterances"] == 4


def test_without_fingerprints_only_equal_samples_count(home, tmp_path):
    result = prepare(corpus(tmp_path), fingerprint=False)
    assert "near-duplicate overlap" not in result.record["duplicates"]
    with pytest.raises(DuplicateError, match=r"are duplicates within one set.*again \(train\) and u2.*within"):
        prepare(tmp_path / "metadata.csv", fingerprint=False, within="refuse")
    with pytest.raises(DuplicateError, match=r"same_text: drop"):
        prepare(tmp_path / "metadata.csv", fingerprint=False, same_text="refuse")


def test_corpus_without_duplicates_reports_none(home, tmp_path):
    assert prepare(small_corpus(tmp_path, speakers=6)).record["duplicates"] == {}


def doubles(labels, sets, kind=NEAR):
    names = sorted(set(sets) - {""})
    codes = np.array([names.index(name) if name else -1 for name in sets])
    relations = find_doubles(
        DuplicateGroups(kind, np.array(labels, dtype=np.int32), "keep", "keep"), Sets(codes, names)
    )
    return np.flatnonzero(relations.again).tolist(), np.flatnonzero(relations.leaked).tolist(), relations.other.tolist()


def test_duplicates_of_test_utterances_in_training_are_leaks():
    again, leaked, other = doubles([0, 0, 0, 0, 4], ["train", "train", "test", "valid", "train"])
    assert (again, leaked) == ([], [0, 1])
    assert other[:2] == [2, 2]


def test_duplicates_across_folds_are_leaks_and_the_first_fold_keeps_them():
    again, leaked, other = doubles([0, 1, 0, 0], ["fold-2", "fold-1", "fold-1", "fold-2"])
    assert (again, leaked) == ([3], [2])
    assert (other[2], other[3]) == (0, 0)


def test_unused_rows_do_not_count_as_duplicates():
    assert doubles([0, 0, 0], ["", "train", "test"], TEXT)[:2] == ([], [1])
    assert doubles([0, 0], ["", "train"])[:2] == ([], [])


def test_report_says_in_sentences_what_was_found_twice():
    keep = DuplicatesConfig()
    assert doubles_text({}, keep) == ["No recording of the training set is in another set."]
    (line,) = doubles_text({}, DuplicatesConfig(fingerprint=False))
    assert line == "No recording of the training set is in another set, as far as exact copies go."
    assert doubles_text({"same-text overlap": 1600, "same-text within": 1}, keep)[1:] == [
        "1,600 training utterances have the words and the speaker of an utterance in another set (kept).",
        "1 more utterance has the words and the speaker of an earlier one in the same set (kept).",
    ]
    counts = {"near-duplicate overlap": 1, "same-audio within": 2, "near-duplicate within": 3, "same-text overlap": 4}
    assert doubles_text(counts, DuplicatesConfig(overlap="drop", within="keep", same_text="drop")) == [
        "1 training utterance is a recording that another set has, too: 0 equal, 1 nearly (left out).",
        "5 utterances are recordings that came earlier in the same set: 2 equal, 3 nearly (kept).",
        "4 training utterances have the words and the speaker of an utterance in another set (left out).",
    ]
