"""Attention models as a system: training, recognition, times, tuning, and no endless texts for what is no speech."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support import load_beside

from recognition.bundle import BundleError, BundleSpec, load_spec
from recognition.decoder_tuning import DecoderTrials
from recognition.inference import decode_set, drawn_rows, encode_set, open_set
from recognition.initial_weights import check_source, open_source, transfer_weights
from recognition.recognizer import Recognizer
from recognition.systems import system_of
from recognition.systems.attention import AttentionSystem, AttentionTask
from recognition.transcriber import Transcriber
from speech.decoding import AttentionDecodeConfig, DecodeError, GreedyConfig
from speech.models import TransformerDecoderConfig
from speech.objectives import AttentionConfig
from tasks.simulated_speech import Speech

tones = load_beside(__file__, "../training/tones.py")
RATE, WORDS = tones.RATE, tones.WORDS
SYSTEM = AttentionSystem(decoder_network=TransformerDecoderConfig(dim=32, layers=1, heads=2, dropout=0.0))


UNIGRAMS = """\\data\\
ngram 1=4

\\1-grams:
-2\t<unk>
-99\t<s>
-1\t</s>
-0.5\tyes

\\end\\
"""


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """An attention model that knows the six words."""
    spec = corpus.spec("conformer", model=tones.bare("conformer"), system=SYSTEM)
    changes = {**tones.LEARNS, "objective": "attention", "epochs": 14, "average": 2, "optimizer": {"lr": 5e-3}}
    return tones.train_here(corpus.job(tmp_path_factory.mktemp("attention"), spec=spec, **changes))


def decoded(trained, corpus, folder, batch_seconds=4.0, **fields):
    recognizer = Recognizer.load(trained.bundle, AttentionDecodeConfig(**fields))
    return list(
        decode_set(recognizer, open_set(corpus.url("valid"), RATE, folder), batch_seconds=batch_seconds).values()
    )


def test_validation_has_loss_token_accuracy_and_error_rate(trained):
    figures = trained.result["valid"]
    assert 0 < figures["loss"] < 1.5
    assert figures["token_accuracy"] > 0.5  # of six words and the end
    assert figures["wer"] < 0.7


def test_trained_model_recognizes_the_set_with_ctc(trained, corpus, tmp_path):
    """A minute of speech does not teach attention enough to do without."""
    entries = decoded(trained, corpus, tmp_path, ctc_weight=0.8)
    assert sum(entry.ref != entry.hyp for entry in entries) <= 2
    assert all(0 < entry.confidence <= 1 for entry in entries)


def test_hypotheses_are_ranked_again_as_they_are_scored(trained, monkeypatch, tmp_path):
    (tmp_path / "lm.arpa").write_text(UNIGRAMS)
    monkeypatch.setattr(BundleSpec, "comparable", lambda spec, hypothesis: "yes " * len(hypothesis.text.split()))
    recognizer = Recognizer.load(trained.bundle, AttentionDecodeConfig(rescore_lm=str(tmp_path / "lm.arpa"), nbest=4))
    wave = tones.speak(["ba", "gu"], np.random.default_rng(5))
    encoded = recognizer.encode(wave[None], torch.tensor([len(wave)]))
    (plain,) = recognizer.with_decoder(AttentionDecodeConfig(nbest=8)).search(encoded)
    (again,) = recognizer.search(encoded)
    before = {option.text: option.score for option in plain.nbest}
    both = [option for option in again.nbest if option.text in before]
    for option in both:
        log10 = -0.5 * len(option.text.split()) - 1
        assert option.score == pytest.approx(before[option.text] + 0.3 * np.log(10) * log10, abs=1e-4)
    assert both


def test_hypotheses_do_not_depend_on_batching(trained, corpus, tmp_path):
    ways = [decoded(trained, corpus, tmp_path, batch_seconds) for batch_seconds in (0.1, 1000)]
    assert [entry.hyp for entry in ways[0]] == [entry.hyp for entry in ways[1]]
    assert [entry.score for entry in ways[0]] == pytest.approx([entry.score for entry in ways[1]], abs=1e-3)


@pytest.mark.parametrize("times", ["ctc", "attention"])
def test_words_have_times_in_order_within_the_recording(trained, times):
    wave = tones.speak(["ba", "gu", "ce"], np.random.default_rng(5))
    transcriber = Transcriber(trained.bundle, decode=AttentionDecodeConfig(times=times, ctc_weight=0.8))
    (transcript,) = transcriber.transcribe([wave], words=True)
    assert transcript.text.split() == [word.word for word in transcript.words]
    assert len(transcript.words) >= 2
    end = 0.0
    for word in transcript.words:
        assert word.start >= end - 1e-6
        end = word.start + word.duration
        assert 0 < word.confidence <= 1
    assert end <= len(wave) / RATE + 1e-3


def test_times_of_ctc_are_those_of_the_words(trained):
    wave = tones.speak(["ba", "gu"], np.random.default_rng(5))
    transcriber = Transcriber(trained.bundle, decode=AttentionDecodeConfig(times="ctc", ctc_weight=0.8))
    (transcript,) = transcriber.transcribe([wave], words=True)
    assert transcript.text == "ba gu"
    for word, begin in zip(transcript.words, (0.05, 0.21), strict=True):  # each word 0.10 to 0.14 s, 0.04 s between
        assert abs(word.start - begin) < 0.15


def not_speech():
    """Waveforms without words, by what they are."""
    rng, time = np.random.default_rng(0), np.arange(30 * RATE) / RATE
    chord = sum(np.sin(2 * np.pi * pitch * time) for pitch in (220, 277, 330))
    cut = tones.speak(["ba", "ce", "di"], np.random.default_rng(1)).numpy()
    return {
        "zeros": np.zeros(30 * RATE),
        "noise": rng.normal(0, 0.1, 30 * RATE),
        "quiet noise": rng.normal(0, 1e-4, 30 * RATE),
        "music": 0.1 * chord * (1 + np.sin(2 * np.pi * 2 * time)),
        "cut word": cut[: int(0.11 * RATE)],
        "words and silence": np.concatenate([cut, np.zeros(28 * RATE)]),
    }


@pytest.mark.parametrize("fields", [{"beam": 1}, {"beam": 1, "ctc_weight": 0.0}, {"beam": 4}])
@pytest.mark.parametrize("name", sorted(not_speech()))
def test_what_is_no_speech_gives_no_endless_text(trained, name, fields):
    wave = torch.from_numpy(not_speech()[name]).float()
    recognizer = Recognizer.load(trained.bundle, AttentionDecodeConfig(**fields))
    encoded = recognizer.encode(wave[None], torch.tensor([len(wave)]))
    (hypothesis,) = recognizer.search(encoded)
    words = hypothesis.text.split()
    assert len(words) <= int(encoded.frames[0])
    for phrase in range(1, 17):  # nothing is said nine times on end
        for start in range(len(words) - 9 * phrase + 1):
            assert words[start : start + 9 * phrase] != words[start : start + phrase] * 9


def test_parameters_can_be_tuned(trained, corpus, tmp_path):
    cfg = AttentionDecodeConfig(beam=2)
    recognizer = Recognizer.load(trained.bundle, cfg)
    data = open_set(corpus.url("valid"), RATE, tmp_path)
    encoded = [
        (part.texts, encoded_part) for part, encoded_part in encode_set(recognizer, data, drawn_rows(data, 6, seed=1))
    ]
    with DecoderTrials(recognizer, encoded) as trials:
        for weight in (0.0, 0.3):
            few, most = (trials.errors({"ctc_weight": weight, "length_bonus": bonus}).errors for bonus in (0.0, -50.0))
            assert most > few  # so large a malus allows no words


def test_decoder_of_posteriors_is_refused(trained):
    recognizer = Recognizer.load(trained.bundle, GreedyConfig())
    with pytest.raises(DecodeError, match="use attention"):
        recognizer.prepare()


def test_bundle_is_one_file_of_weights_and_names_its_system(trained):
    spec = load_spec(trained.bundle)
    assert spec.system == SYSTEM
    damaged = trained.bundle.parent / "damaged"
    damaged.mkdir()
    for path in trained.bundle.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    text = (damaged / "bundle.json").read_text()
    changed = text.replace('"layers": 1', '"layers": 2').replace('"checksum"', '"provenance": {}, "checksum"')
    (damaged / "bundle.json").write_text(changed)
    with pytest.raises(BundleError):
        Recognizer.load(damaged, AttentionDecodeConfig())


def test_model_without_ctc_trains_on_the_decoder_network_alone(corpus, tmp_path):
    spec = corpus.spec("tdnn", system=SYSTEM.model_copy(update={"ctc": False}))
    job = corpus.job(tmp_path, spec=spec, objective="attention")
    task = job.task.build(1)
    assert isinstance(task, AttentionTask)
    assert task.objective.cfg.ctc_weight == 0
    data = job.task.open_set("valid", tmp_path / "cache", None, lambda _: None)
    batch = data.batch(np.arange(5))
    network = job.task.build_network()
    losses, unalignable = task.losses(network, task.drawn(batch, 0), torch.device("cpu"))
    assert losses.shape == (5,)
    assert unalignable == 0
    losses.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_training_may_begin_with_a_ctc_models_encoder_or_with_another_attention_model(corpus, tmp_path):
    spec, own = corpus.spec("tdnn"), corpus.spec("tdnn", system=SYSTEM)
    spec.save(tmp_path / "ctc", dict(spec.build_model().state_dict()))
    source = open_source(tmp_path / "ctc")
    check_source(source, own, "the model")
    found = transfer_weights(source, own, own.build_model())
    assert found.new
    assert all(name.startswith("decoder.") for name in found.new)
    theirs = source.weights()
    assert torch.equal(found.weights["encoder.layers.0.linear.weight"], theirs["layers.0.linear.weight"])
    assert torch.equal(found.weights["ctc.weight"], theirs["output.weight"])
    own.save(tmp_path / "attention", dict(own.build_model().state_dict()))
    again = transfer_weights(open_source(tmp_path / "attention"), own, own.build_model())
    assert (again.incomplete, again.left_out) == ((), ())


def test_simulations_of_attention_models_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="not of a recognizer of kind attention: set train.objective to ctc"):
        Speech(corpus.job(tmp_path, spec=corpus.spec("tdnn", system=SYSTEM), objective="attention"), 1)


def test_objective_chooses_the_system_which_checks_it():
    assert system_of(AttentionConfig()).kind == "attention"
    AttentionSystem().check_objective(AttentionConfig())
    AttentionSystem(ctc=False).check_objective(AttentionConfig(ctc_weight=0))
    with pytest.raises(ValueError, match="leaves CTC's output layer untrained: set recognizer"):
        AttentionSystem().check_objective(AttentionConfig(ctc_weight=0))
    with pytest.raises(ValueError, match="set train.objective to attention"):
        AttentionSystem().check_objective(system_objective("ctc"))


def system_objective(kind):
    from speech.objectives import OBJECTIVES

    return OBJECTIVES[kind]()


def test_ctc_with_whispers_tokens_is_refused(corpus):
    values = corpus.spec("tdnn", system=SYSTEM).model_dump() | {"tokenizer": {"kind": "whisper"}}
    with pytest.raises(ValidationError, match="its system's ctc must be false"):
        type(corpus.spec("tdnn")).model_validate(values)
