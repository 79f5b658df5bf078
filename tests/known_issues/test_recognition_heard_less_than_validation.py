"""Decoding trimmed recordings and put silence around them, validation did not: 9 of 170 digits were wrong, not 1."""

from types import SimpleNamespace

import pytest
import torch

from recognition.inference import decode_set, open_set
from recognition.recognizer import Recognizer
from recognition.transcriber import Transcriber
from speech.decoding import GreedyConfig
from speech.features import LogMelConfig
from speech.scoring import score_sets
from speech.vad import EverythingConfig
from tasks.tracking.pyfunc_model import SpeechRecognizer
from training.node.evaluator import Evaluator


def wer_of(texts, corpus):
    rows = [(sample.id, sample.row["text"], text, "", "") for sample, text in zip(corpus.valid, texts, strict=True)]
    return score_sets(rows).wer


@pytest.mark.parametrize("trim_db", [0.0, 21.0])
def test_all_paths_hear_the_same_samples(trim_db, corpus, tmp_path, tones_are_speech):
    features = LogMelConfig(num_mels=16, cmvn="utterance", cmvn_gate_db=20, cmvn_floor=3, trim_db=trim_db)
    job = corpus.job(tmp_path, spec=corpus.spec(features=features, stats=None))
    torch.manual_seed(1)  # a model that is not trained: every sample that it hears matters
    weights = {name: 2 * value for name, value in job.task.spec.build_model().state_dict().items()}
    job.task.spec.save(tmp_path / "bundle", weights)

    validated = Evaluator(job).validate(weights)["wer"]
    recognizer = Recognizer.load(tmp_path / "bundle", GreedyConfig())
    decoded = decode_set(recognizer, open_set(corpus.url("valid"), 8000, tmp_path / "cache")).values()
    files = [sample.members["flac"] for sample in corpus.valid]
    transcribed = [
        transcript.text for transcript in Transcriber(tmp_path / "bundle", vad=EverythingConfig()).transcribe(files)
    ]
    registered = SpeechRecognizer()
    registered.load_context(SimpleNamespace(artifacts={"bundle": tmp_path / "bundle"}))
    served = registered.predict(None, files)["text"].tolist()

    texts = {entry.id: entry.hyp for entry in decoded}
    assert [texts[sample.id] for sample in corpus.valid] == transcribed == served
    assert len(set(transcribed)) > 3
    assert wer_of(transcribed, corpus) == validated
