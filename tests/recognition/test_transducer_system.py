"""Transducers as a system: training with and without CTC, recognition, times, tuning, warm starts, what is refused."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support import load_beside

from recognition.bundle import BundleError, load_spec
from recognition.decoder_tuning import DecoderTrials
from recognition.inference import decode_set, drawn_rows, encode_set, open_set
from recognition.initial_weights import check_source, open_source, transfer_weights
from recognition.recognizer import Recognizer
from recognition.systems import system_of
from recognition.systems.transducer import TransducerSystem, TransducerTask
from recognition.transcriber import Transcriber
from speech.decoding import DecodeError, GreedyConfig, TransducerDecodeConfig
from speech.models import LstmPredictorConfig, StatelessPredictorConfig
from speech.objectives import CtcConfig, TransducerConfig
from tasks.simulated_speech import Speech

tones = load_beside(__file__, "../training/tones.py")
RATE, WORDS = tones.RATE, tones.WORDS
STATELESS = TransducerSystem(predictor=StatelessPredictorConfig(dim=16, dropout=0.0), joint_dim=32)
LSTM = TransducerSystem(predictor=LstmPredictorConfig(dim=16, dropout=0.0), joint_dim=32, ctc=True)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A transducer that knows the six words."""
    spec = corpus.spec("conformer", model=tones.bare("conformer"), system=LSTM)
    changes = {**tones.LEARNS, "objective": "transducer", "epochs": 30, "average": 2, "optimizer": {"lr": 1e-2}}
    return tones.train_here(corpus.job(tmp_path_factory.mktemp("transducer"), spec=spec, **changes))


def decoded(trained, corpus, folder, batch_seconds=4.0, **fields):
    recognizer = Recognizer.load(trained.bundle, TransducerDecodeConfig(**fields))
    return list(
        decode_set(recognizer, open_set(corpus.url("valid"), RATE, folder), batch_seconds=batch_seconds).values()
    )


def test_validation_has_loss_and_error_rate(trained):
    figures = trained.result["valid"]
    assert 0 < figures["loss"] < 1.0
    assert figures["wer"] < 0.4


@pytest.mark.parametrize("beam", [1, 4])
def test_trained_model_recognizes_the_set(trained, corpus, tmp_path, beam):
    entries = decoded(trained, corpus, tmp_path, beam=beam)
    assert sum(entry.ref != entry.hyp for entry in entries) <= 6
    assert all(0 < entry.confidence <= 1 for entry in entries)


def test_hypotheses_do_not_depend_on_batching(trained, corpus, tmp_path):
    ways = [decoded(trained, corpus, tmp_path, batch_seconds) for batch_seconds in (0.1, 1000)]
    assert [entry.hyp for entry in ways[0]] == [entry.hyp for entry in ways[1]]
    assert [entry.score for entry in ways[0]] == pytest.approx([entry.score for entry in ways[1]], abs=1e-3)


def test_words_have_times_in_order_within_the_recording(trained):
    wave = tones.speak(["ba", "gu", "ce"], np.random.default_rng(5))
    transcriber = Transcriber(trained.bundle, decode=TransducerDecodeConfig(times="transducer", nbest=2))
    (transcript,) = transcriber.transcribe([wave], words=True)
    assert transcript.text.split() == [word.word for word in transcript.words]
    assert len(transcript.words) >= 2
    end = 0.0
    for word in transcript.words:
        assert word.start >= end - 1e-6
        end = word.start + word.duration
        assert 0 < word.confidence <= 1
    assert end <= len(wave) / RATE + 1e-3


def test_silence_and_noise_have_few_words(trained):
    noise = np.random.default_rng(0).normal(0, 1e-4, 10 * RATE)
    for wave in (np.zeros(10 * RATE), noise):
        recognizer = Recognizer.load(trained.bundle, TransducerDecodeConfig())
        encoded = recognizer.encode(torch.from_numpy(wave).float()[None], torch.tensor([len(wave)]))
        (hypothesis,) = recognizer.search(encoded)
        assert len(hypothesis.tokens) <= int(encoded.frames[0])


def test_parameters_can_be_tuned(trained, corpus, tmp_path):
    recognizer = Recognizer.load(trained.bundle, TransducerDecodeConfig(beam=2))
    data = open_set(corpus.url("valid"), RATE, tmp_path)
    encoded = [(part.texts, given) for part, given in encode_set(recognizer, data, drawn_rows(data, 6, seed=1))]
    with DecoderTrials(recognizer, encoded) as trials:
        few, most = (trials.errors({"length_bonus": bonus}).errors for bonus in (0.0, -50.0))
    assert most > few  # so large a malus allows no words


def test_decoder_of_posteriors_is_refused(trained):
    with pytest.raises(DecodeError, match="use transducer"):
        Recognizer.load(trained.bundle, GreedyConfig()).prepare()


def test_bundle_is_one_file_of_weights_and_names_its_system(trained, tmp_path):
    assert load_spec(trained.bundle).system == LSTM
    for path in trained.bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / "bundle.json").read_text()
    changed = text.replace('"joint_dim": 32', '"joint_dim": 33').replace('"checksum"', '"provenance": {}, "checksum"')
    assert changed != text
    (tmp_path / "bundle.json").write_text(changed)
    with pytest.raises(BundleError):
        Recognizer.load(tmp_path, TransducerDecodeConfig())


def test_losses_of_a_batch_reach_all_weights_in_parts_of_the_configured_size(corpus, tmp_path):
    results = []
    for memory in (1, 1024):
        spec = corpus.spec("tdnn", model=tones.bare("tdnn"), system=LSTM.model_copy(update={"joint_dim": 2048}))
        job = corpus.job(tmp_path, spec=spec, objective={"kind": "transducer", "joint_mb": memory})
        task, network = job.task.build(1), job.task.build_network()
        assert isinstance(task, TransducerTask)
        assert network.joint_bytes == memory << 20
        network.load_state_dict({name: torch.full_like(value, 0.01) for name, value in network.state_dict().items()})
        batch = job.task.open_set("valid", tmp_path / "cache", None, lambda _: None).batch(np.arange(5))
        losses, unalignable = task.losses(network, task.drawn(batch, 0), torch.device("cpu"))
        assert (losses.shape, unalignable) == ((5,), 0)
        losses.sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        results.append(losses.detach())
    torch.testing.assert_close(*results)


def test_training_may_begin_with_a_ctc_models_encoder_or_with_another_transducer(corpus, tmp_path):
    spec, own = corpus.spec("tdnn"), corpus.spec("tdnn", system=LSTM)
    spec.save(tmp_path / "ctc", dict(spec.build_model().state_dict()))
    source = open_source(tmp_path / "ctc")
    check_source(source, own, "the model")
    given = transfer_weights(source, own, own.build_model())
    assert {name.partition(".")[0] for name in given.new} == {"predictor", "joiner"}
    theirs = source.weights()
    assert torch.equal(given.weights["encoder.layers.0.linear.weight"], theirs["layers.0.linear.weight"])
    assert torch.equal(given.weights["ctc.weight"], theirs["output.weight"])
    own.save(tmp_path / "transducer", dict(own.build_model().state_dict()))
    again = transfer_weights(open_source(tmp_path / "transducer"), own, own.build_model())
    assert (again.incomplete, again.left_out, again.new) == ((), (), ())


def test_simulations_of_transducers_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="not of a recognizer of kind transducer: set train.objective to ctc"):
        Speech(corpus.job(tmp_path, spec=corpus.spec("tdnn", system=STATELESS), objective="transducer"), 1)


def test_objective_chooses_the_system_which_checks_it():
    assert system_of(TransducerConfig()).kind == "transducer"
    TransducerSystem().check_objective(TransducerConfig(ctc_weight=0))
    TransducerSystem(ctc=True).check_objective(TransducerConfig())
    with pytest.raises(ValueError, match="leaves CTC's output layer untrained: set recognizer.kind to transducer"):
        TransducerSystem(ctc=True).check_objective(TransducerConfig(ctc_weight=0))
    with pytest.raises(ValueError, match="set train.objective to transducer"):
        TransducerSystem().check_objective(CtcConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"kind": "whisper"}}, "have no blank, which a transducer needs"),
        ({"states": {"model": "ab", "frame_shift_ms": 10, "log_priors": [-0.7]}}, "its system is hybrid"),
    ],
)
def test_bundles_that_no_transducer_can_be_are_refused(corpus, changes, message):
    values = corpus.spec("tdnn", system=STATELESS).model_dump() | changes
    with pytest.raises(ValidationError, match=message):
        type(corpus.spec("tdnn")).model_validate(values)
