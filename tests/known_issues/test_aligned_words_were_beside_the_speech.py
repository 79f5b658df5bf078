"""Words that a CTC model aligned ended after the recording, or were seconds away from where they were said.

Frames in the silence that is added around an utterance counted as its own, and those of an utterance beyond the
encoder's positions, which is cut into trimmed pieces, as if they followed each other.
"""

import numpy as np
import pytest
import torch

from recognition.alignment import CtcAligner
from recognition.bundle import BundleSpec
from recognition.data.dataset import Batch
from recognition.systems.ctc import CtcSystem
from speech.features import LogMelConfig, WhisperLogMelConfig
from speech.models import BlstmConfig, WhisperConfig
from speech.tokens import TokenConfig, train_tokenizer

RATE = 16000


def aligner_with(folder, features, model):
    """An aligner with a tiny network, not trained."""
    spec = BundleSpec(
        sample_rate=RATE,
        features=features,
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(kind="words", vocab_size=9), ["a b c"]).to_dict(),
        model=model,
        system=CtcSystem(),
    )
    spec.save(folder, dict(spec.build_model().state_dict()))
    return CtcAligner.load(folder, "cpu", {})


def one_utterance(wave, text):
    lengths = torch.tensor([len(wave)])
    return Batch(np.zeros(1, np.int64), ["u"], [""], [text], wave[None], lengths, lengths[:, None], lengths, 0.0)


def said_in(scores, frames):
    """Scores by which token k + 1 is said in the k-th of some frames, and nothing in the others."""
    tokens = torch.zeros(scores.log_probs.shape[:2], dtype=torch.long)
    tokens[0, frames] = torch.arange(1, 1 + len(frames))
    sure = torch.nn.functional.one_hot(tokens, scores.log_probs.shape[2]) * 20.0
    return scores._replace(log_probs=sure.log_softmax(-1))


def test_words_are_inside_their_recording(tmp_path):
    model = BlstmConfig(dim=8, layers=1, channels=1)
    aligner = aligner_with(tmp_path, LogMelConfig(num_mels=6, cmvn="none", trim_db=30.0), model)
    batch = one_utterance(torch.randn(RATE // 2, generator=torch.Generator().manual_seed(0)) / 10, "a")
    scores = aligner.outputs(batch)
    assert float(scores.starts[0]) < 0  # silence was added
    for frame in (0, int(scores.frames[0]) - 1):
        (utterance,) = aligner.align(batch, said_in(scores, [frame]))
        for spans in (utterance.alignment.words, utterance.alignment.units):
            (word,) = utterance.alignment.timed(spans)
            assert word.duration > 0
            assert 0 <= word.start < word.start + word.duration <= 0.5


@pytest.mark.parametrize("trim_db", [0.0, 30.0])
def test_words_of_a_long_utterance_are_where_they_are_said(tmp_path, trim_db):
    pytest.importorskip("transformers")
    encoder = {"model_type": "whisper", "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 50}
    model = WhisperConfig(dim=16, layers=1, encoder=encoder)  # reads a second at once
    aligner = aligner_with(tmp_path, WhisperLogMelConfig(num_mels=20, trim_db=trim_db), model)
    wave = torch.randn(3 * RATE, generator=torch.Generator().manual_seed(0)) * 1e-4
    for start in (0.3, 1.2, 2.4):
        wave[int(RATE * start) : int(RATE * (start + 0.2))] *= 1000
    batch = one_utterance(wave, "a b c")
    scores = aligner.outputs(batch)
    second, *_, last = scores.pieces[0]
    (utterance,) = aligner.align(batch, said_in(scores, [5, second.first + 5, last.first + 5]))
    starts = [word.start for word in utterance.alignment.timed(utterance.alignment.words)]
    wanted = [start + 5 * 0.02 for start in (float(scores.starts[0]), second.offset, last.offset)]
    assert starts == pytest.approx(wanted, abs=1e-3)
    assert utterance.alignment.duration == 3.0
