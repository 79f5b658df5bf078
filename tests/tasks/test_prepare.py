import csv
import json
from collections import Counter

import numpy as np
import pytest
import soundfile
from support import small_corpus, tone, write_table, write_tone

from storage.locks import LockTimeoutError, file_lock
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.sources import SourceConfig
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, StageError
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE
from tasks.stages.quarantined import QuarantineError
from tasks.stages.sources import open_source, select

GOOD = {
    "wav-16k": {"name": "a.wav"},
    "flac-44k": {"name": "b.flac", "rate": 44100},
    "ogg-22k": {"name": "c.ogg", "rate": 22050},
    "opus-48k": {"name": "d.opus", "rate": 48000},
    "mp3-32k": {"name": "e.mp3", "rate": 32000},
    "stereo-8k": {"name": "f.wav", "rate": 8000, "channels": 2},
    "six channels": {"name": "g.flac", "channels": 6},
}


def bad_corpus(folder):
    """A table with seven good utterances and one of every kind of bad one; returns it and the expected reasons."""
    rows, reasons = [], {}
    for n, (name, given) in enumerate(GOOD.items()):
        options = dict(given)
        path = write_tone(folder / "audio" / options.pop("name"), seconds=0.6, seed=n, **options)
        rows.append((name, path.relative_to(folder), f"Good, number {n}!", f"speaker{n}"))

    def bad(name, reason, text="fine text", audio=None, path=None):
        if path is None:
            path = folder / "audio" / f"{len(rows)}.wav"
            soundfile.write(path, tone() if audio is None else audio, 16000)
        rows.append((name, path, text, "bad"))
        reasons[name] = reason

    noise = folder / "audio" / "noise.wav"
    noise.write_bytes(b"this is no audio file at all" * 20)
    cut = folder / "audio" / "cut.flac"
    cut.write_bytes(write_tone(folder / "audio" / "whole.flac", seconds=2).read_bytes()[:20000])
    bad("garbage", "unreadable", path=noise)
    bad("truncated", "unreadable", path=cut)
    bad("not-there", "missing-audio", path=folder / "audio" / "none.wav")
    bad("no samples", "empty", audio=np.zeros(0))
    bad("silence", "silent", audio=np.zeros(8000))
    bad("whisper", "silent", audio=tone(level=1e-5))
    bad("blip", "too-short", audio=tone(0.05))
    bad("epic", "too-long", audio=tone(31))
    bad("no words", "empty-text", text="")
    bad("only marks", "empty-text", text="... ?!")
    bad("greek", "outside-alphabet", text="καλημέρα")
    bad("x" * 300, "bad-id")
    bad("wav-16k", "duplicate-id")
    reasons.pop("wav-16k")
    return write_table(folder, rows), reasons


def prepared(home, path, **data):
    document = {"name": "p", "data": {"sources": [{"kind": "table", "path": str(path)}], "max_quarantined": 1} | data}
    run = Run(parse_config(document), "r")
    result = PREPARE.execute(run)
    return result, read_table(result.store, MANIFEST), read_table(result.store, QUARANTINE)


def test_every_kind_of_bad_utterance_is_quarantined_and_counted(home, tmp_path):
    path, reasons = bad_corpus(tmp_path / "corpus")
    result, used, refused = prepared(home, path)
    assert {row["id"] for row in used} == set(GOOD)
    reasons_of = {row["id"]: row["reason"] for row in refused}
    assert reasons_of.pop("wav-16k") == "duplicate-id"
    assert reasons_of == reasons
    assert all(row["detail"] and row["stage"] in ("read", "prepare") and row["corpus"] for row in refused)
    lines = len(path.read_text().splitlines()) - 1
    assert result.counts == {"read": lines, "written": len(used), "quarantined": len(refused)}
    assert result.record["reasons"] == Counter(row["reason"] for row in refused)
    assert sum(entry["utterances"] for entry in result.record["sets"].values()) == len(used)


def test_manifest_describes_any_format_rate_and_channel_count(home, tmp_path):
    path, _ = bad_corpus(tmp_path / "corpus")
    _, used, _ = prepared(home, path)
    for row in used:
        assert row["sample_rate"] == GOOD[row["id"]].get("rate", 16000)
        assert row["duration"] == pytest.approx(0.6, abs=0.1)
        if row["audio"].endswith((".wav", ".flac")):
            assert row["duration"] == int(0.6 * row["sample_rate"]) / row["sample_rate"]
        assert row["text"].startswith("good number ")
        assert row["raw_text"].endswith("!")


def test_too_many_bad_utterances_stop_the_run_with_reasons(home, tmp_path):
    path, _ = bad_corpus(tmp_path / "corpus")
    with pytest.raises(
        QuarantineError, match=r"13 of 20 .*max_quarantined \(5 %\).*quarantine\.parquet.*raise the limit"
    ):
        prepared(home, path, max_quarantined=0.05)
    assert not list(home.rglob("done.json"))
    share = 13 / 20
    assert prepared(home, path, max_quarantined=share)[0].counts["quarantined"] == 13


def test_non_speech_is_counted_and_does_not_stop_the_run(home, tmp_path):
    write_tone(tmp_path / "swb" / "sw02001.wav", seconds=6.0, rate=8000, channels=2)
    audio, rate = soundfile.read(tmp_path / "swb" / "sw02001.wav")
    soundfile.write(tmp_path / "swb" / "sw02001.sph", audio, rate, format="NIST", subtype="ULAW")
    table = tmp_path / "swb" / "swb_ms98_transcriptions" / "20" / "2001" / "sw2001A-ms98-a-trans.text"
    table.parent.mkdir(parents=True)
    words = ("[silence]", "yes", "[noise]", "[laughter-no] uh-huh", "[silence]")
    lines = [f"sw2001A-ms98-a-{n:04d} {n}.0 {n}.9 {text}\n" for n, text in enumerate(words)]
    table.write_text("".join(lines))
    sources = [{"kind": "switchboard", "path": str(tmp_path / "swb"), "set": "train"}]
    limit = {"sources": sources, "max_quarantined": 0.05, "sample_rate": 8000}
    result, used, refused = prepared(home, tmp_path, **limit)
    assert result.counts == {"read": 5, "written": 2, "quarantined": 3}
    assert [row["text"] for row in used] == ["yes", "no uh huh"]
    assert {row["reason"] for row in refused} == {"no-words"}
    table.write_text("".join([*lines, "sw2001A-ms98-a-0009 5 4 wrong\n"]))
    with pytest.raises(QuarantineError, match=r"4 of 6 .*3 no-words, 1 bad-line.*max_quarantined \(5 %\)"):
        prepared(home, tmp_path, **limit)


def test_corpus_without_good_utterances_stops_at_any_limit(home, tmp_path):
    bad = tmp_path / "corpus" / "x.wav"
    path = write_table(tmp_path / "corpus", [("a", bad, "text", "s")])
    with pytest.raises(QuarantineError):
        prepared(home, path)
    with pytest.raises(StageError, match="have no utterance"):
        prepared(home, write_table(tmp_path / "empty", []))


def test_lone_surrogates_in_jsonl_lose_one_utterance_only(home, tmp_path):
    audio = [str(write_tone(tmp_path / f"{n}.wav", seed=n)) for n in range(6)]
    lines = [{"id": f"u{n}", "audio": audio[n], "text": "word", "speaker": f"s{n}"} for n in range(6)]
    lines[0]["id"] = "broken\ud800"
    lines[1]["text"] = "broken\ud800"
    lines[2]["speaker"] = "broken\ud800"
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, used, refused = prepared(home, path)
    assert [row["id"] for row in used] == ["u3", "u4", "u5"]
    assert result.counts == {"read": 6, "written": 3, "quarantined": 3}
    assert {row["reason"] for row in refused} == {"bad-id", "bad-text"}


def test_split_is_speaker_disjoint_and_deterministic(home, tmp_path):
    path = small_corpus(tmp_path / "corpus", speakers=8, each=2)
    _, used, _ = prepared(home, path)
    speakers = {name: {row["speaker"] for row in used if row["set"] == name} for name in ("train", "valid", "test")}
    assert all(speakers.values())
    assert not speakers["train"] & (speakers["valid"] | speakers["test"])
    assert not speakers["valid"] & speakers["test"]
    again = prepared(home, path, max_seconds=29)[1]
    assert {row["id"]: row["set"] for row in again} == {row["id"]: row["set"] for row in used}


def test_second_run_is_cached_unless_the_corpus_changed(home, tmp_path):
    path = small_corpus(tmp_path / "corpus")
    first = prepared(home, path)[0]
    second = prepared(home, path)[0]
    assert (first.cached, second.cached) == (False, True)
    assert first.record == second.record
    write_tone(tmp_path / "corpus" / "audio" / "s0-0.wav", seconds=0.9)
    third = prepared(home, path)[0]
    assert not third.cached
    assert third.record["digest"] != first.record["digest"]


def test_moved_corpus_keeps_its_digest(home, tmp_path):
    small_corpus(tmp_path / "corpus")
    first = prepared(home, tmp_path / "corpus" / "metadata.csv")[0]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus").rename(tmp_path / "elsewhere" / "corpus")
    second = prepared(home, tmp_path / "elsewhere" / "corpus" / "metadata.csv")[0]
    assert not second.cached
    assert second.record["digest"] == first.record["digest"]


def test_the_number_of_threads_does_not_change_the_result(home, tmp_path):
    path, _ = bad_corpus(tmp_path / "corpus")
    records = []
    for workers in (1, 4):
        document = {
            "name": f"p{workers}",
            "seed": 7,
            "storage": {"url": str(tmp_path / f"objects{workers}"), "workers": workers},
            "data": {"sources": [{"kind": "table", "path": str(path)}], "max_quarantined": 1},
        }
        records.append(PREPARE.execute(Run(parse_config(document), "r")).record)
    assert records[0] == records[1]


def test_sources_select_by_speaker_limit_and_set(tmp_path):
    path = str(small_corpus(tmp_path / "corpus"))

    def ids(**options):
        source = SourceConfig(kind="table", path=path, **options)
        return [(u.id, u.split) for u in select(0, source, open_source(source))]

    assert [name for name, _ in ids(speakers=("s1",))] == ["s1-0", "s1-1", "s1-2"]
    assert {name[:2] for name, _ in ids(exclude_speakers=("s1",))} == {"s0", "s2", "s3"}
    assert ids(limit=2, speakers=("s2",), set="test") == [("s2-0", "test"), ("s2-1", "test")]


def test_sources_share_sets_and_duplicate_ids_are_quarantined(home, tmp_path):
    first, second = small_corpus(tmp_path / "one"), small_corpus(tmp_path / "two", speakers=5)
    sources = [
        {"kind": "table", "path": str(first), "set": "train"},
        {"kind": "table", "path": str(second), "set": "other"},
    ]
    document = {"name": "p", "data": {"sources": sources, "max_quarantined": 1}}
    result = PREPARE.execute(Run(parse_config(document), "r"))
    assert result.record["reasons"] == {"duplicate-id": 12}
    assert {name: entry["utterances"] for name, entry in result.record["sets"].items()} == {"train": 12, "other": 3}


def test_split_takes_no_share_for_sets_of_the_sources(home, tmp_path):
    first, second = small_corpus(tmp_path / "one", speakers=6), small_corpus(tmp_path / "two", speakers=1)
    rows = list(csv.reader(second.open()))
    write_table(tmp_path / "two", [["t-" + row[0], *row[1:4]] for row in rows[1:]])
    sources = [{"kind": "table", "path": str(first)}, {"kind": "table", "path": str(second), "set": "eval"}]
    document = {"name": "p", "data": {"sources": sources}}
    sets = PREPARE.execute(Run(parse_config(document), "r")).record["sets"]
    assert set(sets) == {"train", "valid", "eval"}


def test_synthetic_speech_is_made_once_by_concurrent_runs(home):
    config = {"train": 1, "valid": 0, "test": 0, "train_voices": ["f1"]}
    source = SourceConfig.model_validate({"kind": "synthetic", "synthesis": config})
    utterances = list(open_source(source))
    assert [u.speaker for u in utterances] == ["f1"]
    assert list((home / "corpora").glob("synthetic-*.lock"))
    lock = next((home / "corpora").glob("synthetic-*.lock"))
    with file_lock(lock, 0), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.stages.sources.LOCK_WAIT_S", 0.0)
        with pytest.raises(LockTimeoutError):
            open_source(source)


def test_unset_variable_in_a_path_is_named(home, monkeypatch):
    monkeypatch.delenv("STARLING_NOWHERE", raising=False)
    with pytest.raises(ConfigError, match="environment variable STARLING_NOWHERE"):
        open_source(SourceConfig(kind="table", path="$STARLING_NOWHERE/metadata.csv"))
