"""`starling transcribe`: formats, folders, streams; and the guarantees of `speech`: words' times, bounded memory."""

import io
import json
import shutil

import numpy as np
import pytest
import soundfile
import torch
from support import bundle_with_languages, load_beside, silent_system, tiny_bundle, write_tone
from typer.testing import CliRunner

from flows.cli.app import app
from recognition.bundle import add_decoder
from recognition.subtitles import ctm, srt, vtt
from recognition.systems import SYSTEMS
from recognition.transcriber import Transcriber, Transcript
from speech.audio import decode_audio, stream_audio
from speech.decoding import BeamConfig
from speech.hypotheses import Word

pytestmark = pytest.mark.usefixtures("tones_are_speech")
said = load_beside(__file__, "../recognition/test_transcriber.py")
RATE, TEXT, folder, speak = said.RATE, said.TEXT, said.folder, said.speak
perfect_model = said.perfect_model


def transcribe(*words, model, code=0, stdin=None):
    result = CliRunner().invoke(app, ["transcribe", *map(str, words), "--model", str(model)], input=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def audio(tmp_path):
    """A folder of one recording in each format, and a bad file."""
    place = tmp_path / "audio"
    (place / "deep").mkdir(parents=True)
    for name in ("a.wav", "b.flac", "c.ogg", "d.mp3", "deep/f.wav"):
        soundfile.write(place / name, speak(TEXT), RATE)
    soundfile.write(place / "e.opus", speak(TEXT), RATE, format="OGG", subtype="OPUS")
    (place / "bad one.wav").write_bytes(b"no audio")
    return place


def test_language_is_given_by_an_option_and_one_that_the_model_does_not_know_is_refused(tmp_path):
    bundle_with_languages(tmp_path / "model")
    soundfile.write(tmp_path / "a.wav", speak(TEXT), RATE)
    asked = tmp_path / "a.wav", "--vad", "none", "--json"
    for code in ("de", "en"):
        found = json.loads(transcribe(*asked, "--language", code, model=tmp_path / "model").stdout)
        assert [entry["language"] for entry in found["files"]] == [code]
    assert "languages de, en, not 'fr'" in transcribe(
        *asked, "--language", "fr", model=tmp_path / "model", code=1
    ).stderr.replace("\n", " ")
    tiny_bundle(tmp_path / "other")
    assert "no tokens of languages" in transcribe(*asked, "--language", "de", model=tmp_path / "other", code=1).stderr
    assert (
        "--language needs whole"
        in transcribe(tmp_path / "a.wav", "--stream", "--language", "de", model=tmp_path / "other", code=1).stderr
    )


def test_json_of_a_recognizer_without_times_has_no_words_and_formats_of_times_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "silent", silent_system())
    tiny_bundle(tmp_path / "model", system={"kind": "silent"})
    recording = write_tone(tmp_path / "a.wav", rate=RATE)
    (entry,) = json.loads(transcribe(recording, "--json", model=tmp_path / "model").stdout)["files"]
    assert (entry["error"], entry["words"]) == ("", [])
    refused = transcribe(recording, "--format", "ctm", model=tmp_path / "model", code=1)
    assert "a recognizer of kind silent has no word times: leave out the words' times" in refused.stderr


def test_a_gpu_is_used_by_option_and_its_absence_is_explained(perfect_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recording = tmp_path / "a.wav"
    soundfile.write(recording, speak(TEXT), RATE)
    words = ["transcribe", str(recording), "--model", str(perfect_model), "--device"]
    assert TEXT in CliRunner().invoke(app, [*words, "auto"]).stdout
    result = CliRunner().invoke(app, [*words, "cuda"])
    assert result.exit_code
    assert "--device is 'cuda' but torch sees no GPU" in f"{result.stderr}{result.exception}"


def test_every_format_is_read_and_a_bad_file_stops_no_other(perfect_model, audio):
    result = transcribe(audio, model=perfect_model, code=1)
    lines = dict(line.split(": ") for line in result.stdout.splitlines())
    assert {path.rpartition("/")[2] for path in lines} == {"a.wav", "b.flac", "c.ogg", "d.mp3", "e.opus", "f.wav"}
    assert set(lines.values()) == {TEXT}
    assert "bad one.wav" in result.stderr
    assert result.stderr.splitlines()[-1] == "6 of 7 recognized, 1 failed"


def test_recording_without_words_is_said_to_have_none(perfect_model, tmp_path):
    soundfile.write(tmp_path / "quiet.wav", np.zeros(2 * RATE, np.float32), RATE)
    result = transcribe(tmp_path / "quiet.wav", model=perfect_model)
    assert result.stdout.strip() == ""
    assert "no words were recognized in 1 of 1" in result.stderr


def test_ctm_has_the_times_of_words(perfect_model, audio):
    result = transcribe(audio / "b.flac", "--format", "ctm", model=perfect_model)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[4] for row in rows] == TEXT.split()
    assert {(row[0], row[1]) for row in rows} == {("b", "1")}
    for number, row in enumerate(rows):  # each 0.2 s long after a pause of 0.1 s, and faint at both ends
        assert float(row[2]) == pytest.approx(0.1 + 0.3 * number, abs=0.08)
        assert 0.05 < float(row[3]) <= 0.25
        assert 0.9 < float(row[5]) <= 1.0
    transcript = Transcript("a", 1.0, 1.0, words=(Word("a", 0.5, 0.25, 0.75),))
    assert ctm("two parts", transcript) == "two_parts 1 0.500 0.250 a 0.7500\n"


WORDS = (
    Word("one", 0.0, 0.4, 1.0),
    Word("&", 0.5, 0.3, 1.0),
    Word("two", 1.61, 0.3999, 1.0),
    Word("x", 3661.5, 1, 1.0),
)


@pytest.fixture
def searching(perfect_model, tmp_path):
    """The same model with a search that finds several hypotheses."""
    copy = shutil.copytree(perfect_model, tmp_path / "searching")
    add_decoder(copy, BeamConfig(beam=8, beam_threshold=1e3))
    return copy


def test_nbest_has_posteriors_and_its_best_is_the_text(searching, audio):
    result = transcribe(audio / "a.wav", "--json", "--nbest", 3, model=searching)
    (entry,) = json.loads(result.stdout)["files"]
    assert entry["text"] == entry["nbest"][0]["text"] == TEXT
    assert len({alternative["text"] for alternative in entry["nbest"]}) == 3
    scores, shares = zip(
        *((alternative["score"], alternative["posterior"]) for alternative in entry["nbest"]), strict=True
    )
    assert list(scores) == sorted(scores, reverse=True)
    assert 0.99 < shares[0] <= sum(shares) <= 1 + 1e-6
    assert "nbest" not in json.loads(transcribe(audio / "a.wav", "--json", model=searching).stdout)["files"][0]


def test_nbest_text_output_has_numbered_lines(searching, audio, tmp_path):
    result = transcribe(audio / "a.wav", audio / "b.flac", "--nbest", 2, model=searching)
    lines = result.stdout.splitlines()
    assert lines[0] == f"a-1 {TEXT}"
    assert [line.partition(" ")[0] for line in lines] == ["a-1", "a-2", "b-1", "b-2"]
    transcribe(audio / "deep", "--nbest", 2, "--output", f"{tmp_path}/out/", model=searching)
    assert (tmp_path / "out" / "f.txt").read_text().splitlines()[0] == f"f-1 {TEXT}"


def test_nbest_of_a_split_recording_is_joined(searching, tmp_path):
    wave = np.concatenate([speak("delta alpha"), np.zeros(4 * RATE), speak("echo")])
    soundfile.write(tmp_path / "a.wav", wave, RATE)
    result = transcribe(tmp_path / "a.wav", "--json", "--nbest", 4, model=searching)
    (entry,) = json.loads(result.stdout)["files"]
    assert entry["text"] == entry["nbest"][0]["text"] == "delta alpha echo"
    assert len({alternative["text"] for alternative in entry["nbest"]}) == 4


def test_decoder_without_nbest_is_refused_naming_those_with(perfect_model, audio):
    wrong = transcribe(audio / "a.wav", "--nbest", 2, model=perfect_model, code=1)
    assert "decode.kind greedy finds one hypothesis" in f"{wrong.stderr}{wrong.exception}"
    for kind in ("ctm", "srt", "vtt"):
        wrong = transcribe(audio / "a.wav", "--nbest", 2, "--format", kind, model=perfect_model, code=1)
        assert f"--format {kind} shows one hypothesis: give --format json or text" in f"{wrong.stderr}{wrong.exception}"


def cues(words):
    return [cue.splitlines()[2] for cue in srt("a", Transcript("", 1.0, 1.0, words=words)).split("\n\n")[:-1]]


class Unsure(said.LoudestBand):
    """Hears every word in its first frame, and half as probably bravo."""

    def forward(self, feats, lengths):
        log_probs, lengths = super().forward(feats, lengths)
        best = log_probs.argmax(dim=2)
        begins = (best > 0) & (best != best.roll(1, dims=1))
        shares = torch.nn.functional.one_hot(torch.where(begins, best, 0), 7) + 1e-5
        shares[:, :, 1 + said.WORDS.index("bravo")] += 0.5 * begins
        return (shares / shares.sum(-1, keepdim=True)).log(), lengths


def test_hot_words_are_preferred_to_what_was_heard_a_little_better(folder, tmp_path, monkeypatch, caplog):
    original = Transcriber.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.recognizer.model = Unsure()

    monkeypatch.setattr(Transcriber, "__init__", init)
    soundfile.write(tmp_path / "a.wav", speak("delta alpha echo"), RATE)
    hot, empty = tmp_path / "hot.txt", tmp_path / "empty.txt"
    hot.write_text("Bravo\nZulu\n")
    empty.write_text("")
    for words, text in (
        ([], "delta alpha echo"),
        (["--hot-words", empty], "delta alpha echo"),
        (["--hot-words", hot, "--hot-score", "0.05"], "delta alpha echo"),
        (["--hot-words", hot], "bravo bravo bravo"),
    ):
        assert transcribe(tmp_path / "a.wav", *words, model=folder).stdout.strip() == text
    assert "1 of 2 hot words are left out, since they cannot be spelled in the model's tokens: 'zulu'" in caplog.text
    refused = transcribe(tmp_path / "a.wav", "--hot-words", tmp_path / "none.txt", model=folder, code=1)
    assert "none.txt cannot be read" in refused.stderr
    refused = transcribe(tmp_path / "a.wav", "--hot-score", "1", model=folder, code=1)
    assert "--hot-score is that of the phrases in --hot-words" in refused.stderr


def test_subtitles_change_at_pauses():
    transcript = Transcript("", 1.0, 1.0, words=WORDS)
    assert srt("a", transcript) == (
        "1\n00:00:00,000 --> 00:00:00,800\none &\n\n2\n00:00:01,610 --> 00:00:02,010\ntwo\n\n"
        "3\n01:01:01,500 --> 01:01:02,500\nx\n\n"
    )
    assert vtt("a", transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.800\none &amp;\n\n00:00:01.610 --> 00:00:02.010\ntwo\n\n"
        "01:01:01.500 --> 01:01:02.500\nx\n\n"
    )
    assert (srt("a", Transcript("", 1.0, 1.0)), vtt("a", Transcript("", 1.0, 1.0))) == ("", "WEBVTT\n\n")


def test_subtitles_without_pauses_change_at_their_maximum_length():
    assert [len(text) for text in cues(tuple(Word("abcd", 0.1 * n, 0.1, 1.0) for n in range(40)))] == [74, 74, 49]
    slow = cues(tuple(Word("a", 1.0 * n, 1.0, 1.0) for n in range(20)))
    assert [len(text.split()) for text in slow] == [6, 6, 6, 2]


def test_subtitles_of_several_recordings_need_a_folder(perfect_model, audio, tmp_path):
    lines = transcribe(audio / "b.flac", "--format", "vtt", model=perfect_model).stdout.splitlines()
    assert lines[0] == "WEBVTT"
    assert " ".join(line for line in lines[2:] if line and "-->" not in line) == TEXT
    refused = transcribe(audio, "--format", "srt", model=perfect_model, code=1)
    assert "give --output FOLDER/" in refused.stderr
    transcribe(audio, "--format", "srt", "--output", f"{tmp_path}/srt/", model=perfect_model, code=1)
    assert (tmp_path / "srt" / "b.srt").read_text().startswith("1\n00:00:00,")


def test_output_goes_to_one_file_or_one_per_recording(perfect_model, audio, tmp_path):
    transcribe(audio, "--format", "json", "--output", tmp_path / "all.json", model=perfect_model, code=1)
    written = json.loads((tmp_path / "all.json").read_text())
    assert len(written["files"]) == 7
    assert sum(bool(entry["error"]) for entry in written["files"]) == 1
    assert written["files"][0]["words"][0].keys() == {"word", "start", "duration", "confidence"}
    transcribe(audio, "--output", f"{tmp_path}/each/", model=perfect_model, code=1)
    texts = sorted(p.relative_to(tmp_path / "each").as_posix() for p in (tmp_path / "each").rglob("*") if p.is_file())
    assert texts == ["a.txt", "b.txt", "c.txt", "d.txt", "deep/f.txt", "e.txt"]
    assert (tmp_path / "each" / "a.txt").read_text() == TEXT + "\n"
    shutil.copy(audio / "a.wav", audio / "b.wav")  # beside b.flac
    transcribe(audio, "-f", "ctm", "-o", f"{tmp_path}/ctm/", model=perfect_model, code=1)
    assert (tmp_path / "ctm" / "b.wav.ctm").exists()
    assert not list(tmp_path.rglob(".tmp-*"))


def test_recording_is_read_from_standard_input(perfect_model, audio):
    result = transcribe("-", model=perfect_model, stdin=(audio / "b.flac").read_bytes())
    assert result.stdout == TEXT + "\n"


def test_long_file_is_read_in_pieces_and_keeps_its_words(perfect_model, tmp_path):
    texts = [said.WORDS[k] for k in np.random.default_rng(1).integers(0, 6, 240)]
    wave = speak(" ".join(texts), 2 * RATE, pause=0.3)
    soundfile.write(tmp_path / "long.wav", wave, 2 * RATE)
    transcriber = Transcriber(perfect_model, batch_seconds=10)
    sizes, seconds = [], []
    flush = transcriber._flush
    transcriber._flush = lambda window, *rest: (sizes.append(sum(len(p.wave) for p in window)), flush(window, *rest))
    transcript = transcriber.transcribe([tmp_path / "long.wav"], words=True, on_seconds=seconds.append)[0]
    assert transcript.text.split() == texts
    assert transcript.seconds == pytest.approx(len(wave) / RATE / 2)
    assert max(sizes) / RATE < 4 * 10 + 30.1
    assert sum(seconds) == pytest.approx(transcript.seconds, abs=0.1)
    assert [word.word for word in transcript.words] == texts
    drift = [word.start - (0.3 + 0.5 * n) for n, word in enumerate(transcript.words)]
    assert max(map(abs, drift)) < 0.1


def test_streaming_gives_the_same_words_as_decoding_at_once(tmp_path):
    for name in ("a.flac", "b.mp3", "c.ogg"):
        path = write_tone(tmp_path / name, seconds=3.0, channels=2)
        parts = [block for block, _ in stream_audio(path)]
        assert torch.equal(torch.cat(parts), decode_audio(path)[0])


def test_truncated_recording_has_an_error_and_no_text(perfect_model, tmp_path):
    data = io.BytesIO()
    soundfile.write(data, np.tile(speak(TEXT), 30), RATE, format="WAV")
    (tmp_path / "cut.wav").write_bytes(data.getvalue()[:-1000])
    transcripts = Transcriber(perfect_model, batch_seconds=5).transcribe([tmp_path / "cut.wav", speak(TEXT)])
    assert [transcript.text for transcript in transcripts][1:] == [TEXT]
    assert transcripts[0].error == "" or transcripts[0].text == ""
