"""An attention model gave no words for an utterance beyond its encoder's positions, such as Whisper's 30 s.

Words of a cut utterance were up to a frame later with each piece, and more with trimmed silence.
"""

import numpy as np
import pytest
import soundfile
import torch

from recognition.bundle import BundleSpec
from recognition.long_utterances import joined_hypothesis, pieces_of
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionSystem
from recognition.transcriber import Transcriber
from speech.decoding import AttentionDecodeConfig
from speech.features import WhisperLogMelConfig
from speech.hypotheses import Alternative, Hypothesis
from speech.models import TransformerDecoderConfig, WhisperConfig
from speech.tokens import TokenConfig, train_tokenizer
from speech.vad import EverythingConfig
from speech.words import FrameTimes, Piece, placed_words
from tasks.dataset.sources import SourceConfig
from tasks.stages.base import Run, get_stage
from tasks.stages.evaluation import evaluation_config, evaluation_stages, use_model

RATE = 16000


def write_bundle(folder, positions=50, **features):
    """A model of random weights that says something, with an encoder of some positions of 20 ms."""
    pytest.importorskip("transformers")
    encoder = {"model_type": "whisper", "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    network = TransformerDecoderConfig(dim=16, layers=1, heads=2, dropout=0.0)
    spec = BundleSpec(
        sample_rate=RATE,
        features=WhisperLogMelConfig(num_mels=20, **features),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(kind="words", vocab_size=9), ["a b c d"]).to_dict(),
        model=WhisperConfig(dim=16, layers=1, encoder=encoder | {"max_source_positions": positions}),
        system=AttentionSystem(decoder_network=network),
    )
    torch.manual_seed(1)
    made = spec.build_model()
    with torch.no_grad():
        made.decoder.output.weight.mul_(4.0)
        made.decoder.output.bias[0] = -1.0  # of the end
    spec.save(folder, dict(made.state_dict()))
    return spec


def bursts(pauses, seconds):
    """Noise with half a second of faint noise from each of some times."""
    wave = torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0)) * 0.1
    for start in pauses:
        wave[int(start * RATE) : int((start + 0.5) * RATE)] *= 1e-3
    return wave


@pytest.mark.parametrize("features", [{}, {"trim_db": 30.0}])
def test_text_of_a_long_utterance_is_that_of_its_pieces(tmp_path, features):
    spec = write_bundle(tmp_path, **features)
    cfg = AttentionDecodeConfig(beam=2, nbest=3, tokens_per_frame=0.2)
    recognizer = Recognizer.load(tmp_path, cfg)
    waves = [bursts((0.8, 1.6), 2.6), bursts((), 0.7)]
    lengths = torch.tensor([len(wave) for wave in waves])
    encoded = recognizer.encode(torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths)
    long, short = recognizer.search(encoded)
    pieces = pieces_of(waves[0], spec.max_inputs(), recognizer.frontend)
    assert len(pieces) >= 3
    alone = [recognizer.encode(piece[None], torch.tensor([len(piece)])) for piece in pieces]
    found = [recognizer.search(part)[0] for part in alone]
    assert all(part.text for part in found)
    assert long.text == " ".join(part.text for part in found)
    assert long.tokens == [token for part in found for token in part.tokens]
    assert long.score == pytest.approx(sum(part.score for part in found), abs=1e-3)
    assert len(long.nbest) == 3
    assert long.nbest[0].text == long.text
    assert sum(option.posterior for option in long.nbest) <= 1 + 1e-9
    assert short.text == recognizer.search(recognizer.encode(waves[1][None], lengths[1:]))[0].text
    # the words are where they are in their pieces
    times = recognizer.times(encoded, 0, 10.0, 12.6)
    words = recognizer.timed_words(encoded, 0, long, times)
    wanted, begin = [], 10.0
    for piece, part, hypothesis in zip(pieces, alone, found, strict=True):
        own = recognizer.times(part, 0, begin, begin + len(piece) / RATE)
        wanted += recognizer.timed_words(part, 0, hypothesis, own)
        begin += len(piece) / RATE
    assert [word.word for word in words] == [word.word for word in wanted]
    assert [word.start for word in words] == pytest.approx([word.start for word in wanted], abs=0.021)


def test_frames_of_later_pieces_have_their_own_times():
    times = FrameTimes(0.02, 5.0, 5.0, 9.0, (Piece(100, 7.42, 7.5), Piece(150, 8.5, 8.5)))
    spans = [(0, 2), (98, 100), (100, 102), (110, 111), (148, 151)]
    words = placed_words("a b c d e", spans, [1.0] * 5, times)
    assert [word.start for word in words] == pytest.approx([5.0, 6.96, 7.5, 7.62, 8.38])
    assert [word.start + word.duration for word in words] == pytest.approx([5.04, 7.0, 7.52, 7.64, 8.52])


def test_lists_of_pieces_are_joined_to_one_that_is_no_longer_than_asked_for():
    parts = [
        Hypothesis([1], text, -1.0, [3], 0.5, [0.5], [Alternative(t, -s, p) for t, s, p in options], [(3, 4)])
        for text, options in (("a", [("a", 1.0, 0.6), ("b", 2.0, 0.4)]), ("c", [("c", 1.0, 0.7), ("d", 5.0, 0.3)]))
    ]
    joined = joined_hypothesis([*parts, Hypothesis()], [0, 10, 20], 3)
    assert (joined.text, joined.tokens, joined.frames) == ("a c", [1, 1], [3, 13])
    assert joined.word_frames == [(3, 4), (13, 14)]
    assert joined.confidence == 0.5
    assert [option.text for option in joined.nbest] == ["a c", "b c", "a d"]
    assert [option.score for option in joined.nbest] == [-2.0, -3.0, -6.0]
    assert [option.posterior for option in joined.nbest] == pytest.approx([0.42, 0.28, 0.18])
    assert joined_hypothesis(parts, [0, 10], 1).nbest == []


def test_recordings_of_70_seconds_are_transcribed_and_decoded(tmp_path):
    write_bundle(tmp_path / "model", positions=1500)
    wave = bursts((25.0, 50.0), 70.0)
    cfg = AttentionDecodeConfig(beam=1, tokens_per_frame=0.02)
    transcriber = Transcriber(tmp_path / "model", cfg, vad=EverythingConfig())
    (transcript,) = transcriber.transcribe([wave], words=True)
    assert transcript.seconds == 70.0
    assert [word.word for word in transcript.words] == transcript.text.split()
    assert transcript.words[-1].start > 50
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    soundfile.write(corpus / "long.wav", np.asarray(wave), RATE)
    (corpus / "long.txt").write_text("a b")
    source = SourceConfig(kind="sidecar", path=str(corpus))
    decode = ["decode.kind=attention", "decode.beam=1", "decode.tokens_per_frame=0.02"]
    run = Run(evaluation_config(tmp_path / "model", "long", [source], overrides=decode), "r")
    use_model(run, tmp_path / "model")
    for name in evaluation_stages():
        if name not in ("score", "report"):
            get_stage(name).execute(run)
    (line,) = run.result("decode").output.read("test.hyp.trn").decode().splitlines()
    assert run.result("decode").counts == {"utterances": 1, "empty": 0}
    assert len(line.rpartition("(")[0].split()) >= 3
