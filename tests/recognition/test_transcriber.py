"""Transcription of files, bytes and arrays of any length.

The acoustic model makes no errors: the loudest of six mel bands determines the word, silence is the blank.
"""

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from recognition.bundle import BundleError, BundleSpec, save_bundle
from recognition.transcriber import Transcriber, _first_unheard
from speech.audio import encode_flac
from speech.decoding import AttentionDecodeConfig, BeamConfig, DecodeError
from speech.features import LogMelConfig
from speech.hypotheses import Word
from speech.models import BlstmConfig
from speech.tokens import TokenConfig, train_tokenizer
from speech.vad import EnergyConfig

pytestmark = pytest.mark.usefixtures("tones_are_speech")
RATE = 8000
WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot"]


class LoudestBand(torch.nn.Module):
    """Log-mel frames [B, T, 6] to sure log probabilities over blank and words."""

    def forward(self, feats, lengths):
        best, band = feats.max(dim=2)
        tokens = torch.where(best > 15.0, band + 1, 0)
        return (torch.nn.functional.one_hot(tokens, 7) * 20.0).log_softmax(-1), lengths


def write_bundle(folder):
    """A bundle of random weights; `LoudestBand` takes their place."""
    spec = BundleSpec(
        sample_rate=RATE,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(kind="words"), WORDS).to_dict(),
        model=BlstmConfig(dim=8, layers=1, channels=2, subsampling=1),
    )
    save_bundle(folder, spec, dict(spec.build_model().state_dict()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(folder)
    return folder


@pytest.fixture
def transcriber(folder):
    transcriber = Transcriber(folder)
    transcriber.recognizer.model = LoudestBand()
    return transcriber


@pytest.fixture
def perfect_model(folder, monkeypatch):
    """The bundle's folder, whose model makes no errors."""
    original = Transcriber.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.recognizer.model = LoudestBand()

    monkeypatch.setattr(Transcriber, "__init__", init)
    return folder


def speak(text, rate=RATE, pause=0.1):
    """Each word is a tone in the middle of its mel band, with fades, since a click has energy in all bands."""
    top = 1127 * math.log(1 + 4000 / 700)
    bottom = 1127 * math.log(1 + 20 / 700)
    pieces = [np.zeros(int(pause * rate))]
    for word in text.split():
        mel = bottom + (top - bottom) * (WORDS.index(word) + 1) / 7
        frequency = 700 * (math.exp(mel / 1127) - 1)
        tone = np.sin(2 * np.pi * frequency * np.arange(int(0.2 * rate)) / rate)
        pieces += [0.4 * np.hanning(len(tone)) * tone, np.zeros(int(pause * rate))]
    return np.concatenate(pieces).astype(np.float32)


TEXT = "delta alpha foxtrot bravo echo charlie"


def test_arrays_tensors_bytes_and_paths_give_the_same(transcriber, tmp_path):
    wave = speak(TEXT)
    data = encode_flac(torch.from_numpy(wave), RATE)
    (tmp_path / "a.flac").write_bytes(data)
    items = [wave, torch.from_numpy(wave), wave.astype(np.float64), data, tmp_path / "a.flac", str(tmp_path / "a.flac")]
    transcripts = transcriber.transcribe(items)
    assert [transcript.text for transcript in transcripts] == [TEXT] * len(items)
    for transcript in transcripts:
        assert transcript.seconds == pytest.approx(len(wave) / RATE)
        assert 0.9 < transcript.confidence <= 1.0
        assert transcript.error == ""
    for item in items:  # one recording needs no list
        assert [transcript.text for transcript in transcriber.transcribe(item)] == [TEXT]


def test_any_format_rate_and_channel_count_is_transcribed(transcriber, tmp_path):
    for name, rate in [("a.wav", 44100), ("b.ogg", 16000), ("c.mp3", 22050), ("d.flac", 11025)]:
        wave = speak(TEXT, rate)
        soundfile.write(tmp_path / name, np.stack([wave, wave], axis=1), rate)
    transcripts = transcriber.transcribe(sorted(tmp_path.iterdir()))
    assert [transcript.text for transcript in transcripts] == [TEXT] * 4


def test_arrays_of_another_rate_are_resampled(transcriber):
    transcripts = transcriber.transcribe([speak(TEXT, 16000)], sample_rate=16000)
    assert transcripts[0].text == TEXT
    assert transcripts[0].seconds == pytest.approx(len(speak(TEXT)) / RATE, abs=0.01)


def test_results_are_in_input_order(folder):
    texts = [" ".join(WORDS[: 1 + k % 6]) for k in range(14)]
    waves = [speak(text) for text in texts]
    for batch_seconds in (0.1, 3.0, 1000.0):
        transcriber = Transcriber(folder, batch_seconds=batch_seconds)
        transcriber.recognizer.model = LoudestBand()
        assert [transcript.text for transcript in transcriber.transcribe(waves)] == texts


def test_batch_size_is_bounded(folder):
    transcriber = Transcriber(folder, batch_seconds=4.0)
    sizes = []

    class Recorder(LoudestBand):
        def forward(self, feats, lengths):
            sizes.append(tuple(feats.shape[:2]))
            return super().forward(feats, lengths)

    transcriber.recognizer.model = Recorder()
    transcriber.transcribe([speak(TEXT)[: 1000 * k] for k in range(1, 15)])
    assert sum(rows for rows, _ in sizes) == 14
    assert all(rows == 1 or rows * frames <= 400 for rows, frames in sizes)


def test_unreadable_recording_stops_no_other(transcriber, tmp_path):
    wave = speak("echo")
    (tmp_path / "text.wav").write_text("this is no audio")
    (tmp_path / "cut.flac").write_bytes(encode_flac(torch.from_numpy(wave), RATE)[:100])
    empty = io.BytesIO()
    soundfile.write(empty, np.zeros(0, dtype=np.float32), RATE, format="WAV")
    bad = [
        (tmp_path / "text.wav", "text.wav"),
        (tmp_path / "absent.wav", "absent.wav"),
        (tmp_path / "cut.flac", "cut.flac"),
        (tmp_path, "is a folder"),
        (b"", "is empty"),
        (empty.getvalue(), "no sample"),
        (np.zeros(0), "shape \\(0,\\)"),
        (np.zeros((2, 100)), "shape \\(2, 100\\)"),
        (np.array([0.0, np.nan]), "finite"),
        (np.float32(3.0), "shape \\(\\)"),
    ]
    transcripts = transcriber.transcribe([wave, *(item for item, _ in bad), wave])
    assert [transcripts[0].text, transcripts[-1].text] == ["echo", "echo"]
    for transcript, (_, message) in zip(transcripts[1:-1], bad, strict=True):
        assert pytest.approx((0.0, 0.0)) == (transcript.seconds, transcript.confidence)
        assert transcript.text == ""
        assert re.search(message, transcript.error), transcript.error


def test_silence_and_snippets_give_no_words(transcriber):
    transcripts = transcriber.transcribe([np.zeros(8000), np.zeros(1), np.zeros(150)])
    assert [transcript.text for transcript in transcripts] == ["", "", ""]
    assert [transcript.error for transcript in transcripts] == ["", "", ""]
    assert transcriber.transcribe([np.zeros(10)])[0].text == ""  # alone in its batch
    assert transcriber.transcribe([]) == []


def test_long_audio_is_cut_at_pauses(transcriber):
    """Two and a half minutes with the real model's limits: no word is lost at a cut, none is doubled."""
    texts = [WORDS[k] for k in np.random.default_rng(0).integers(0, 6, 300)]
    wave = speak(" ".join(texts), pause=0.3)
    transcript = transcriber.transcribe([wave])[0]
    assert transcript.seconds == pytest.approx(150.3)
    assert transcript.text.split() == texts


def test_decoding_can_be_chosen(folder):
    transcriber = Transcriber(folder, decode=BeamConfig(beam=4))
    transcriber.recognizer.model = LoudestBand()
    assert transcriber.transcribe([speak(TEXT)])[0].text == TEXT
    assert transcriber.sample_rate == RATE


def test_untrained_real_model_runs(folder):
    transcripts = Transcriber(folder).transcribe([speak(TEXT), np.zeros(10)])
    assert [transcript.error for transcript in transcripts] == ["", ""]


def test_missing_bundle_is_a_clear_error(tmp_path):
    with pytest.raises(BundleError, match=r"bundle\.json"):
        Transcriber(tmp_path)


@pytest.mark.parametrize(
    ("computed_s", "vad", "texts"),
    [
        (0.0, None, ["delta", "alpha", "bravo"]),
        (0.4, None, ["delta", "alpha", "bravo"]),
        (0.6, None, ["delta alpha", "bravo"]),
        (30.0, None, ["delta alpha", "bravo"]),  # longer pauses separate pieces for every model
        (30.0, EnergyConfig(pause_s=0.4), ["delta", "alpha", "bravo"]),
        (0.0, EnergyConfig(pause_s=5.0), ["delta alpha bravo"]),
    ],
)
def test_speech_is_one_piece_if_its_pauses_cost_less_than_another_piece(folder, monkeypatch, computed_s, vad, texts):
    monkeypatch.setattr(BlstmConfig, "min_frames", round(100 * computed_s))
    transcriber = Transcriber(folder, vad=vad)
    transcriber.recognizer.model = LoudestBand()
    spoken = [speak("delta", pause=0.25), speak("alpha", pause=0.25), np.zeros(RATE), speak("bravo", pause=0.25)]
    (transcript,) = transcriber.transcribe([np.concatenate(spoken)])
    assert [piece.text for piece in transcript.pieces] == texts
    assert transcript.text == "delta alpha bravo"


@pytest.mark.parametrize("nbest", [1, 2])
@pytest.mark.parametrize("words", [False, True])
def test_a_model_that_stops_too_soon_hears_everything_in_the_end(folder, monkeypatch, words, nbest):
    monkeypatch.setattr(BlstmConfig, "min_frames", 3000)  # so that short pauses are within a piece
    transcriber = Transcriber(folder, decode=BeamConfig(beam=4), nbest=nbest)
    transcriber.recognizer.model = LoudestBand()
    search, heard = transcriber.recognizer.search, []

    def six_words_at_most(encoded):
        for hypothesis in search(encoded):
            heard.append(hypothesis.text)
            text = " ".join(hypothesis.text.split()[:6])
            nbest = hypothesis.nbest[:1]
            yield replace(
                hypothesis, tokens=hypothesis.tokens[:6], frames=hypothesis.frames[:6], text=text, nbest=nbest
            )

    monkeypatch.setattr(transcriber.recognizer, "search", six_words_at_most)
    texts = [TEXT, " ".join(reversed(TEXT.split())), "echo bravo echo bravo echo bravo", "alpha"]
    wave = np.concatenate([part for text in texts for part in (speak(text), np.zeros(RATE // 4))])
    first, transcript, last = transcriber.transcribe([speak("delta"), wave, speak("foxtrot")], words=words)
    assert heard.count(" ".join(texts)) == 1  # as one piece
    # the last word is too short to be recognized by itself
    assert [piece.text for piece in transcript.pieces] == texts[:3]
    assert (first.text, transcript.text, last.text) == ("delta", " ".join(texts[:3]), "foxtrot")
    assert [word.word for word in transcript.words] == (transcript.text.split() if words else [])
    ends = [piece.start + piece.seconds for piece in transcript.pieces]
    assert [piece.start for piece in transcript.pieces[1:]] == pytest.approx(ends[:2])
    assert ends[2] == pytest.approx(len(wave) / RATE, abs=0.35)
    starts = [word.start for word in transcript.words]
    assert starts == sorted(starts)
    lengths = [len(speak(text)) / RATE + 0.25 for text in texts]
    assert [piece.start for piece in transcript.pieces] == pytest.approx([0, lengths[0], sum(lengths[:2])], abs=0.4)


SENTENCES = [TEXT, " ".join(reversed(TEXT.split())), "echo bravo echo bravo echo bravo", "alpha"]


@pytest.mark.parametrize(
    ("left_out", "texts"),
    [
        ({0}, [SENTENCES[0], " ".join(SENTENCES[1:])]),
        ({1}, [SENTENCES[0], SENTENCES[1], " ".join(SENTENCES[2:])]),
        ({1, 2}, [SENTENCES[0], " ".join(SENTENCES[1:3]), SENTENCES[3]]),
        ({1, 2, 3}, [SENTENCES[0], " ".join(SENTENCES[1:])]),
        ({0, 2}, [SENTENCES[0], " ".join(SENTENCES[1:])]),
        ({3}, [" ".join(SENTENCES[:3])]),  # a short word may also be a noise
        ({0, 1, 2, 3}, [""]),  # the model says that nobody speaks
        (set(), [" ".join(SENTENCES)]),
    ],
)
@pytest.mark.parametrize("words", [False, True])
def test_speech_that_a_text_leaves_out_is_recognized_again(folder, monkeypatch, left_out, texts, words):
    monkeypatch.setattr(BlstmConfig, "min_frames", 3000)  # so that short pauses are within a piece
    transcriber = Transcriber(folder, decode=BeamConfig(beam=4))
    transcriber.recognizer.model = LoudestBand()
    search = transcriber.recognizer.search
    sentence_of = [number for number, sentence in enumerate(SENTENCES) for _ in sentence.split()]

    def forgetful(encoded):
        for hypothesis in search(encoded):
            if hypothesis.text == " ".join(SENTENCES):
                said = [place for place, number in enumerate(sentence_of) if number not in left_out]
                hypothesis = replace(
                    hypothesis,
                    tokens=[hypothesis.tokens[place] for place in said],
                    frames=[hypothesis.frames[place] for place in said],
                    text=" ".join(hypothesis.text.split()[place] for place in said),
                )
            yield hypothesis

    monkeypatch.setattr(transcriber.recognizer, "search", forgetful)
    wave = np.concatenate([part for text in SENTENCES for part in (speak(text), np.zeros(RATE // 4))])
    (transcript,) = transcriber.transcribe([wave], words=words)
    assert [piece.text for piece in transcript.pieces] == texts
    assert transcript.text == " ".join(texts)
    assert [word.word for word in transcript.words] == (transcript.text.split() if words else [])
    starts = [word.start for word in transcript.words]
    assert starts == sorted(starts)
    ends = [piece.start + piece.seconds for piece in transcript.pieces]
    assert [piece.start for piece in transcript.pieces[1:]] == pytest.approx(ends[:-1], abs=0.01)


@pytest.mark.parametrize(
    ("words", "unheard"),
    [
        ([], (0, 3)),
        ([(0.5, 0.3)], (1, 3)),
        ([(0.5, 0.3), (2.8, 0.4)], (2, 3)),  # it began before the speech
        ([(0.5, 0.3), (3.9, 0.3), (5.1, 1.2)], (0, 0)),  # they end after it
        ([(0.9, 4.9)], (1, 2)),  # a long word is at one of its ends: here, at both
        ([(1.1, 3.3)], (0, 3)),  # or beside speech that is missed
        ([(0.5, 0.3), (1.4, 1.3), (5.2, 0.2)], (1, 2)),  # a word that ends in the pause was said before it
        ([(0.5, 0.3), (4.3, 0.6), (5.2, 0.2)], (1, 2)),  # and one that begins in the pause after it
        ([(0.5, 0.3), (2.75, 1.5), (5.2, 0.2)], (0, 0)),  # a word with its pauses
        ([(3.5, 0.1)], (2, 3)),  # the first stretch is too short
    ],
)
def test_speech_without_words(words, unheard):
    speech = [(0.2, 1.0), (3.0, 4.0), (5.0, 6.1)]
    assert _first_unheard(speech, [Word("word", start, duration, 1.0) for start, duration in words]) == unheard


def test_a_decoder_that_does_not_fit_is_refused_at_once(folder):
    with pytest.raises(DecodeError, match="attention does not search what a recognizer of kind ctc puts"):
        Transcriber(folder, decode=AttentionDecodeConfig())
