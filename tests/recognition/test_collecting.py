"""Doubtful utterances of a server: what is stored, what people correct, what a training reads, and what goes wrong."""

import csv
import json
import shutil
import stat

import numpy as np
import pytest
import soundfile
import torch
from support import load_beside, wait_until

from recognition.serving import collecting
from recognition.serving.collecting import COLLECTED, TABLE, Collector, offer_rows
from recognition.serving.metrics import ServeMetrics
from recognition.transcriber import SpokenPiece
from storage.corpora.table import TableReader

tones = load_beside(__file__, "running_server.py")
RATE, speak, flac, post = tones.RATE, tones.speak, tones.flac, tones.post
PIECE = SpokenPiece(0.0, 1.0, "delta, alpha", 0.4)


@pytest.fixture(autouse=True)
def any_disk(monkeypatch):
    """Also the small disks of test machines are used."""
    monkeypatch.setattr(collecting, "_SPARE_BYTES", 0)


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


@pytest.fixture
def model(transcriber):
    transcriber.recognizer.model.__init__()
    return transcriber.recognizer.model


class Kept:
    """A collector and what it has told and counted."""

    def __init__(self, folder, **options):
        self.folder, self.figures, self.told = folder, ServeMetrics(), []
        self.collector = Collector(folder, "m", self.figures, **options)
        self.collector.on_problem = self.told.append

    def offer(self, *pieces, version="3", audio=None):
        self.collector.offer(pieces, tones.silence(2) if audio is None else audio, RATE, version)

    def end(self):
        self.collector.close(240)
        return rows(self.folder / COLLECTED)

    def skipped(self, reason):
        return self.figures.registry.get_sample_value("starling_not_collected_total", {"reason": reason})


def rows(path):
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path, table, delimiter=","):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)


def doubt(model, word):
    """A network that is not sure of a word."""

    def forward(feats, lengths):
        outputs, lengths = type(model).forward(model, feats, lengths)
        doubtful = outputs.argmax(-1, keepdim=True) == tones.WORDS.index(word) + 1
        return torch.where(doubtful, outputs / 10, outputs).log_softmax(-1), lengths

    return forward


def test_only_doubtful_utterances_of_a_file_are_stored_with_their_audio(transcriber, model, tmp_path, monkeypatch):
    wave = np.concatenate([speak("delta alpha"), tones.silence(40), speak("echo bravo bravo")])
    monkeypatch.setattr(model, "forward", doubt(model, "echo"))
    (whole,) = transcriber.transcribe(wave, words=True)
    first, doubtful = whole.pieces
    assert doubtful.confidence < 0.9 < first.confidence
    assert doubtful.least == whole.words[2].confidence < 0.8 < whole.words[3].confidence
    with tones.running(transcriber, version="7", collect=(tmp_path / "kept", 0.9)) as server:
        assert post(server, flac(wave))[0] == 200
        assert tones.fetch(f"{server.url}/healthz")[2]["collects"] is True
    (row,) = rows(tmp_path / "kept" / COLLECTED)
    assert (row["hypothesis"], row["text"], row["checked"]) == (doubtful.text, doubtful.text, "")
    assert (row["model"], row["version"]) == ("tones", "7")
    assert float(row["confidence"]) == pytest.approx(doubtful.confidence, abs=1e-3)
    heard, rate = soundfile.read(tmp_path / "kept" / row["audio"], dtype="float32")
    begin = round(doubtful.start * RATE)
    assert rate == RATE
    assert len(heard) == pytest.approx(doubtful.seconds * RATE, abs=1)
    assert np.abs(heard - wave[begin : begin + len(heard)]).max() < 1e-3
    (again,) = transcriber.transcribe([tmp_path / "kept" / row["audio"]])
    assert again.text == doubtful.text


def test_segments_of_a_stream_are_stored_with_their_audio(transcriber, model, tmp_path):
    spoken = ["delta alpha", "echo echo bravo"]
    wave = np.concatenate([tones.silence(1), *[part for text in spoken for part in (speak(text), tones.silence(1.5))]])
    with tones.running(transcriber, collect=(tmp_path, 1.0)) as server, tones.stream(server) as connection:
        connection.send(tones.pcm(np.concatenate([wave] * 8)))  # longer than what a stream keeps
        connection.send(json.dumps({"type": "end"}))
        finals = [message for message in tones.messages(connection) if message["type"] == "final"]
        wait_until(lambda: len(rows(tmp_path / COLLECTED)) == len(finals) == 16)
    table = rows(tmp_path / COLLECTED)
    assert [row["text"] for row in table] == spoken * 8
    for row, text in zip(table, spoken * 8, strict=True):
        assert transcriber.transcribe([tmp_path / row["audio"]])[0].text == text


def test_nothing_is_stored_unless_it_is_wanted(transcriber, model, tmp_path):
    with tones.running(transcriber, log=tmp_path / "log.jsonl") as server:
        assert post(server, flac(speak("echo")))[0] == 200
        assert tones.fetch(f"{server.url}/healthz")[2]["collects"] is False
    assert [path.name for path in tmp_path.rglob("*")] == ["log.jsonl"]


def test_the_log_says_that_utterances_are_stored(transcriber, model, tmp_path):
    with tones.running(transcriber, log=tmp_path / "log.jsonl", collect=(tmp_path / "kept", 0.5)):
        pass
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert first["event"] == "collect"
    assert first["note"] == f"utterances below 0.5 are stored in {tmp_path / 'kept'}"


def test_other_users_cannot_read_what_is_stored(tmp_path):
    kept = Kept(tmp_path / "kept")
    kept.offer(PIECE)
    (row,) = kept.end()
    for path in (kept.folder, kept.folder / "audio", kept.folder / COLLECTED, kept.folder / row["audio"]):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize(
    ("pieces", "stored", "reason"),
    [
        ([SpokenPiece(0, 1, "sure", 0.9)], 0, None),
        ([SpokenPiece(0, 0.1, "short", 0.2), PIECE], 1, "length"),
        ([SpokenPiece(0, 90, "long", 0.2)], 0, "length"),
        ([PIECE] * 25, 20, "many"),
    ],
)
def test_utterances_that_help_nobody_are_counted_and_not_stored(tmp_path, pieces, stored, reason):
    kept = Kept(tmp_path)
    kept.offer(*pieces)
    assert len(kept.end()) == stored
    for name in collecting.REASONS:
        fitting = min(20, stored)
        assert kept.skipped(name) == (name == reason) * (sum(piece.confidence < 0.8 for piece in pieces) - fitting)


def test_the_folder_stays_below_its_limit_until_somebody_makes_room(tmp_path, monkeypatch):
    noise = np.random.default_rng(1).normal(0, 0.2, 2 * RATE).astype(np.float32)
    kept = Kept(tmp_path, most_mb=0.1)
    for _ in range(20):
        kept.offer(PIECE, audio=noise)
    wait_until(lambda: kept.skipped("full") > 0 and not kept.collector._waiting)
    table = rows(tmp_path / COLLECTED)
    assert 0 < len(table) < 20
    assert len(table) + kept.skipped("full") == 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.flac")) <= 100_000
    assert len(kept.told) == 1  # once
    assert "full" in kept.told[0]
    shutil.rmtree(tmp_path / "audio")
    monkeypatch.setattr(collecting, "_LOOK_S", 0.0)
    kept.offer(PIECE, audio=noise)
    assert len(kept.end()) == len(table) + 1


def test_a_disk_that_fails_disturbs_no_request(transcriber, model, tmp_path):
    folder, path = tmp_path / "kept", tmp_path / "log.jsonl"
    with tones.running(transcriber, log=path, collect=(folder, 1.0)) as server:
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")
        for _ in range(3):
            assert post(server, flac(speak("echo")))[2] == {"text": "echo"}
        failed = 'starling_not_collected_total{reason="failed"} 3.0'
        wait_until(lambda: failed in tones.fetch(f"{server.url}/metrics")[2].decode())
        folder.unlink()
        folder.mkdir()
        assert post(server, flac(speak("alpha")))[2] == {"text": "alpha"}
        wait_until(lambda: [row["text"] for row in rows(folder / COLLECTED)] == ["alpha"])
    problems = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("problem")]
    assert [line["event"] for line in problems] == ["collect"]


def test_rejected_requests_are_not_stored(transcriber, model, tmp_path):
    with tones.running(transcriber, collect=(tmp_path, 1.0)) as server:
        assert post(server, b"no audio")[0] == 415
    assert not list(tmp_path.iterdir())


def test_more_than_the_disk_takes_is_left_out_and_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "_WAITING_BYTES", 100_000)
    kept, gate = Kept(tmp_path), tones.threading.Event()
    monkeypatch.setattr(kept.collector, "_store", lambda *_: gate.wait(240))
    for _ in range(5):
        kept.offer(PIECE, audio=np.zeros(20_000, dtype=np.float32))
    assert kept.skipped("busy") == 4
    gate.set()
    kept.end()


def test_a_row_follows_a_torn_one_on_a_line_of_its_own(tmp_path):
    kept = Kept(tmp_path)
    kept.offer(PIECE)
    wait_until(lambda: rows(tmp_path / COLLECTED))
    whole = (tmp_path / COLLECTED).read_bytes()
    (tmp_path / COLLECTED).write_bytes(whole + b"20261127-1010")
    kept.offer(PIECE)
    kept.end()
    assert offer_rows(tmp_path).new == 2


# --- the table that people correct


@pytest.fixture
def offered(tmp_path):
    """A folder with three utterances, offered."""
    kept = Kept(tmp_path)
    for text in ("alpha, delta", 'echo "bravo"', "delta"):
        kept.offer(SpokenPiece(0.0, 1.0, text, 0.5))
    kept.end()
    assert (offer_rows(tmp_path).new, offer_rows(tmp_path).new) == (3, 0)
    return kept


def test_only_checked_rows_are_a_corpus(offered):
    table = rows(offered.folder / TABLE)
    assert [row["text"] for row in table] == ["alpha, delta", 'echo "bravo"', "delta"]
    table[1] |= {"text": "echo foxtrot", "checked": "x"}
    write(offered.folder / TABLE, table)
    assert offer_rows(offered.folder).checked == 1
    reader = TableReader(str(offered.folder), where={"checked": "x"})
    (utterance,) = list(reader)
    assert utterance.text == "echo foxtrot"
    assert utterance.audio == str(offered.folder / table[1]["audio"])
    assert not reader.problems


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_corrections_stay_when_new_rows_are_added(tmp_path, delimiter):
    kept = Kept(tmp_path)
    kept.offer(PIECE)
    wait_until(lambda: rows(tmp_path / COLLECTED))
    offer_rows(tmp_path)
    (row,) = rows(tmp_path / TABLE)
    # as a spreadsheet may save it: other separators, another order, a column of its own, no last line end
    edited = {"note": "noisy", "checked": "x", "text": "delta: foxtrot", **{k: row[k] for k in ("id", "audio")}}
    write(tmp_path / TABLE, [edited], delimiter)
    before = (tmp_path / TABLE).read_bytes().rstrip(b"\r\n")
    (tmp_path / TABLE).write_bytes(before)
    kept.offer(SpokenPiece(0.0, 1.0, "echo", 0.5))
    kept.end()
    made = offer_rows(tmp_path)
    assert (made.new, made.rows, made.checked) == (1, 2, 1)
    assert (tmp_path / TABLE).read_bytes().startswith(before)
    texts = [utterance.text for utterance in TableReader(str(tmp_path))]
    assert texts == ["delta: foxtrot", "echo"]


def test_utterances_whose_audio_was_removed_are_not_offered(tmp_path):
    kept = Kept(tmp_path)
    for _ in range(2):
        kept.offer(PIECE)
    first, second = kept.end()
    (tmp_path / first["audio"]).unlink()
    offer_rows(tmp_path)
    assert [row["id"] for row in rows(tmp_path / TABLE)] == [second["id"]]


def test_marks_that_are_not_the_mark_are_told(offered):
    table = rows(offered.folder / TABLE)
    for row, mark in zip(table, ("yes", "x", "X"), strict=True):
        row["checked"] = mark
    write(offered.folder / TABLE, table)
    made = offer_rows(offered.folder)
    assert (made.checked, made.other_marks) == (1, ("X", "yes"))


def test_tables_that_cannot_be_extended_are_left_alone(offered, tmp_path):
    path = offered.folder / TABLE
    for content, message in [
        ("﻿".encode("utf-16") + "id,audio,text,checked\n".encode("utf-16"), "save it as CSV in UTF-8"),
        (b"id,audio,transcription,checked\n", "has no column 'text' any more"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            offer_rows(offered.folder)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match=r"has no collected.csv: give the folder"):
        offer_rows(tmp_path / "elsewhere")


@pytest.mark.parametrize("options", [{"below": 0}, {"below": 1.5}, {"most_mb": 0}, {"below": float("nan")}])
def test_numbers_without_a_meaning_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="give a"):
        Kept(tmp_path, **options)
