"""A corpus' own split silently overrode the configuration.

`valid_share` had no effect, and the error of the stage `train` recommended what the user had already done. The
obvious way to hold two speakers out for the test put 200 recordings of the training's speakers into the test set.
"""

import io
import json

import pytest
from rich.console import Console
from support import small_corpus, write_table, write_tone

from flows.summary import print_summary, summarize
from tasks.config.pipeline import parse_config
from tasks.dataset.manifest import MANIFEST
from tasks.dataset.speakers import overlap_warnings, set_rows
from tasks.dataset.splits import SplitError
from tasks.dataset.tables import read_table
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, StageError
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN

SPEAKERS = ("ann", "bea", "cid", "dan", "eve", "fay")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """FSDD's layout: eight takes of two digits by six speakers, of which the first five are the official test set."""
    folder = tmp_path_factory.mktemp("digits")
    for number, speaker in enumerate(SPEAKERS):
        for take in range(8):
            for digit in (0, 1):
                path = folder / "recordings" / f"{digit}_{speaker}_{take}.wav"
                write_tone(path, rate=8000, seconds=0.3, seed=100 * number + 10 * take + digit)
    return str(folder)


def prepared(sources, **data):
    data = {"sources": sources, "duplicates": {"fingerprint": False}} | data
    run = Run(parse_config({"name": "p", "data": data}), "r")
    PREPARE.execute(run)
    return run


def speakers(run):
    """Set to speakers."""
    by_set = {}
    for row in read_table(run.result("prepare").store, MANIFEST):
        by_set.setdefault(row["set"], set()).add(row["speaker"])
    return by_set


def warnings(run):
    return overlap_warnings(run.result("prepare").record, run.config.data)


def test_valid_share_applies_to_a_corpus_with_its_own_split(home, digits):
    run = prepared([{"kind": "fsdd", "path": digits}], valid_share=0.2)
    sets = run.result("prepare").record["sets"]
    assert {name: entry["utterances"] for name, entry in sets.items()} == {"test": 60, "train": 30, "valid": 6}
    heard = speakers(run)
    assert not heard["valid"] & heard["train"]
    assert heard["test"] == set(SPEAKERS)
    assert not prepared([{"kind": "fsdd", "path": digits}], valid_share=0).result("prepare").record["sets"].get("valid")


def test_training_set_named_by_a_source_is_not_divided(home, tmp_path):
    path = small_corpus(tmp_path, speakers=6)
    sets = prepared([{"kind": "table", "path": str(path), "set": "train"}]).result("prepare").record["sets"]
    assert sets.keys() == {"train"}


def test_remedy_for_missing_validation_set_works(home, digits, tmp_path):
    sources = [{"kind": "table", "path": str(small_corpus(tmp_path, speakers=6)), "set": "train"}]
    run = prepared(sources, valid_share=0)
    SHARD.execute(run)
    words = r"remove `set: train` from one and set data\.valid_share above 0 \(it is 0\)"
    with pytest.raises(StageError, match=words):
        TRAIN.inputs(run)
    for source in ({"kind": "table", "path": sources[0]["path"]}, {"kind": "fsdd", "path": digits}):
        assert "valid" in speakers(prepared([source], valid_share=0.1))
    assert "valid" in speakers(prepared([sources[0] | {"set": "valid"}]))


def test_remedy_divides_training_speech_of_one_speaker(home, digits):
    source = {"kind": "fsdd", "path": digits, "speakers": ["ann"]}
    with pytest.raises(
        SplitError, match=r"1 speaker.*into train, valid: name the sets .*or use data\.split_by: utterance"
    ):
        prepared([source])
    assert speakers(prepared([source], split_by="utterance")).keys() == {"train", "valid", "test"}
    named = [source | {"set": "train"}, {"kind": "fsdd", "path": digits, "speakers": ["bea"], "set": "valid"}]
    assert speakers(prepared(named)) == {"train": {"ann"}, "valid": {"bea"}}


def held_out(digits, **fields):
    """Four speakers for training, two for the test."""
    return [
        {"kind": "fsdd", "path": digits, "exclude_speakers": ["ann", "bea"]} | fields,
        {"kind": "fsdd", "path": digits, "speakers": ["ann", "bea"], "set": "test"},
    ]


def test_test_set_contains_only_the_held_out_speakers(home, digits):
    words = (
        r"data\.sources\.1 defines the set 'test', but data\.sources\.0 is divided by its corpus' own split, which "
        r"adds \d+ utterance\(s\) of \d speakers \(.*dan.*\).*Set data\.sources\.0\.own_split: false to train on "
        r"them, or data\.speaker_overlap: allow to test on them"
    )
    with pytest.raises(SplitError, match=words):
        prepared(held_out(digits))
    run = prepared(held_out(digits, own_split=False))
    heard = speakers(run)
    assert heard["test"] == {"ann", "bea"}
    assert heard["train"] | heard["valid"] == {"cid", "dan", "eve", "fay"}
    assert not heard["train"] & heard["valid"]
    assert run.result("prepare").record["sets"]["test"]["utterances"] == 32
    assert not warnings(run)
    meant = prepared(held_out(digits), speaker_overlap="allow")
    assert speakers(meant)["test"] == set(SPEAKERS)
    assert not warnings(meant)


def test_second_corpus_in_the_test_set_is_accepted(home, digits, tmp_path):
    other = {"kind": "table", "path": str(small_corpus(tmp_path)), "set": "test"}
    run = prepared([{"kind": "fsdd", "path": digits}, other])
    (warning,) = warnings(run)
    assert "of the training set are also in 'test': 50 of its 72 utterances" in warning


def test_speakers_in_training_and_test_are_reported_unless_intended(home, digits):
    source = {"kind": "fsdd", "path": digits}
    run = prepared([source])
    (warning,) = warnings(run)
    trained = sorted(speakers(run)["train"])
    assert warning.startswith(f"{len(trained)} speakers ({', '.join(trained)}) of the training set are also in 'test'")
    # each remedy of the message
    assert not warnings(prepared([source], speaker_overlap="allow"))
    apart = [
        {"kind": "fsdd", "path": digits, "exclude_speakers": ["ann"], "own_split": False},
        {"kind": "fsdd", "path": digits, "speakers": ["ann"], "set": "test"},
    ]
    assert not warnings(prepared(apart))
    assert not warnings(prepared([source], split_by="utterance"))
    with pytest.raises(SplitError, match=r"are also in 'test', and data\.speaker_overlap is refuse"):
        prepared([source], speaker_overlap="refuse", split_by="utterance")
    assert speakers(prepared(apart, speaker_overlap="refuse"))["test"] == {"ann"}


def test_unknown_speakers_and_namesakes_do_not_count_as_overlap(home, tmp_path):
    for name, seed in (("one", 0), ("two", 10)):
        files = [write_tone(tmp_path / name / f"{seed + n}.wav", seed=seed + n) for n in range(4)]
        rows = [(f"{name}{n}", file, "some words", "s1" if n < 2 else "") for n, file in enumerate(files)]
        write_table(tmp_path / name, rows)
    sources = [
        {"kind": "table", "path": str(tmp_path / "one"), "set": "train"},
        {"kind": "table", "path": str(tmp_path / "two"), "set": "test"},
    ]
    run = prepared(sources)
    assert not warnings(run)
    assert [row["speakers"] for row in set_rows(run.result("prepare").record)] == [1, 1]
    named = [source | {"corpus": "same"} for source in sources]
    (warning,) = warnings(prepared(named))
    assert warning.startswith("1 speaker (s1) of the training set are also in 'test': 2 of its 4 utterances")
    assert warning.endswith("remove them from one of the sets with data.sources.*.exclude_speakers")
    for number in (0, 1):
        mended = [dict(source) for source in named]
        mended[number]["exclude_speakers"] = ["s1"]
        assert not warnings(prepared(mended))


def test_sets_are_shown_with_hours_and_speakers(home, digits):
    run = prepared([{"kind": "fsdd", "path": digits}], valid_share=0.2)
    summary = json.loads(json.dumps(summarize(run)))
    assert summary["data"]["warnings"] == warnings(run)
    rows = {row["set"]: row for row in summary["data"]["sets"]}
    assert rows["train"] == {"set": "train", "utterances": 30, "hours": 0.003, "speakers": 5, "trained_on": 5}
    assert (rows["test"]["speakers"], rows["test"]["trained_on"], rows["valid"]["trained_on"]) == (6, 5, 0)
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=300))
    assert "speakers" in text.getvalue()
    assert "warning 5 speakers" in text.getvalue()


def test_log_reports_overlap_before_training(home, digits, caplog):
    run = Run(parse_config({"name": "p", "data": {"sources": [{"kind": "fsdd", "path": digits}]}}), "r")
    with caplog.at_level("INFO"):
        run_plainly(run, until="prepare")
    assert "of the training set are also in 'test'" in caplog.text
    assert "test 60 utterances, 0.01 h, 6 speakers" in caplog.text
