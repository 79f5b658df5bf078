"""Recognizers on a GPU: each system is trained there, and recognizes there what it recognizes on the CPU."""

import math
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import pytest
from support import load_beside

from recognition.bundle import save_bundle
from recognition.frame_stream import FrameStream, FrameStreamConfig
from recognition.inference import decode_set, open_set
from recognition.recognizer import Recognizer
from recognition.system import SystemConfig
from recognition.systems.ctc import CtcSystem
from recognition.transcriber import Transcriber
from speech.decoding import BeamConfig, DecodeConfig, GreedyConfig, TransducerDecodeConfig

tones = load_beside(__file__, "../training/tones.py")
streams, tokens = (load_beside(__file__, f"test_{name}.py") for name in ("frame_stream", "token_systems"))
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Case:
    """A system, how it learns the six words, and how it is searched."""

    system: SystemConfig
    training: dict
    searches: tuple[DecodeConfig, ...]
    wer: float


def of_tokens(kind):
    """A system whose network reads tokens, as its own tests train it."""
    case = tokens.CASES[kind]
    searches = tuple(case.decoder(beam=beam, **case.decode) for beam in (1, 4))
    return Case(case.system, case.training, searches, case.wer + 0.1)


CASES = {
    "ctc": Case(CtcSystem(), {"epochs": 10, "optimizer": {"lr": 1e-2}}, (GreedyConfig(), BeamConfig(beam=4)), 0.4),
    "attention": of_tokens("attention"),
    "transducer": of_tokens("transducer"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def trained(case, corpus, tmp_path_factory):
    """A model that was trained on the GPU, by the processes of a training."""
    spec = corpus.spec("conformer", model=tones.bare("conformer"), system=case.system)
    fields = {**tones.LEARNS, "objective": case.system.kind, "average": 2, "device": "cuda", **case.training}
    return tones.train(corpus.job(tmp_path_factory.mktemp(case.system.kind), spec=spec, **fields))


@pytest.mark.gpu
def test_system_learns_on_a_gpu(case, trained):
    assert trained.result["device"] != "cpu"
    assert trained.result["valid"]["wer"] < case.wer


@pytest.mark.gpu
def test_hypotheses_and_times_on_a_gpu_are_those_of_the_cpu(case, trained, corpus, tmp_path):
    data = open_set(corpus.url("valid"), tones.RATE, tmp_path)
    wave = tones.speak(["ba", "gu", "ce"], np.random.default_rng(5))
    for search in case.searches:
        entries, words = [], []
        for device in DEVICES:
            recognizer = Recognizer.load(trained.bundle, search, device)
            entries.append(list(decode_set(recognizer, data, batch_seconds=4.0).values()))
            (transcript,) = Transcriber(trained.bundle, decode=search, device=device).transcribe([wave], words=True)
            assert not transcript.error
            words.append(transcript.words)
        # convolutions in TF32 may tip a close decision
        assert sum(ours.hyp != theirs.hyp for ours, theirs in zip(*entries, strict=True)) <= 1
        for ours, theirs in zip(*entries, strict=True):
            assert math.isclose(ours.score, theirs.score, rel_tol=0.02, abs_tol=0.2) or ours.hyp != theirs.hyp
        assert [word.word for word in words[0]] == [word.word for word in words[1]]
        for ours, theirs in zip(*words, strict=True):
            assert abs(ours.start - theirs.start) < 0.1


STREAMS = {
    "ctc": lambda: streams.recognizer(BeamConfig(beam=4)),
    "transducer": lambda: streams.transducer(TransducerDecodeConfig(beam=2), ctc=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_on_a_gpu_say_what_they_say_on_the_cpu(kind, tmp_path):
    made = STREAMS[kind]()
    save_bundle(tmp_path, made.spec, dict(made.model.state_dict()))
    samples, finals = streams.speech(6.0), []
    for device in DEVICES:
        recognizer = Recognizer.load(tmp_path, made.cfg, device)
        stream = FrameStream(recognizer, FrameStreamConfig(chunk_ms=160, endpoint=streams.NO_ENDPOINT))
        finals.append(streams.streamed(stream, samples, 800)[-1])
    ours, theirs = finals
    assert ours.final
    assert theirs.final
    assert len(ours.text) > 20
    assert SequenceMatcher(a=ours.text, b=theirs.text, autojunk=False).ratio() > 0.9  # TF32 may tip close decisions
