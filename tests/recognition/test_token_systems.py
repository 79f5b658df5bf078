"""Systems whose network reads tokens beside frames: training, recognition, times, tuning, warm starts, what is refused.

What all of them promise is tested of each; at the end of the file is what only one of them has.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support import load_beside

from recognition.bundle import BundleError, BundleSpec, load_bundle, load_spec
from recognition.decoder_tuning import DecoderTrials
from recognition.inference import decode_set, drawn_rows, encode_set, open_set
from recognition.initial_weights import check_source, open_source, save_initial, transfer_weights
from recognition.recognizer import Recognizer
from recognition.systems import system_of
from recognition.systems.attention import AttentionSystem, AttentionTask
from recognition.systems.token_networks import TokenSystem
from recognition.systems.transducer import TransducerSystem, TransducerTask
from recognition.transcriber import Transcriber
from speech.decoding import AttentionDecodeConfig, DecodeError, GreedyConfig, TransducerDecodeConfig
from speech.decoding.token_search import TokenSearch, TokenSearchConfig
from speech.models import LstmPredictorConfig, StatelessPredictorConfig, TransformerDecoderConfig
from speech.objectives import AttentionConfig, CtcConfig, TransducerConfig
from speech.objectives.base import CtcShareConfig
from speech.vad import EverythingConfig
from storage.objects import ObjectStore
from tasks.simulated_speech import Speech
from training.coordinator.messages import replica_name
from training.learner.checkpoint import write_weights
from training.node.evaluator import Evaluator

tones = load_beside(__file__, "../training/tones.py")
RATE, WORDS = tones.RATE, tones.WORDS


@dataclass(frozen=True)
class Case:
    """A system, how it learns the six words, and what it has learned."""

    system: TokenSystem
    objective: type[CtcShareConfig]
    training: dict
    decoder: type[TokenSearchConfig]
    decode: dict
    """What helps a search after a minute of speech: attention alone has not learned enough."""
    loss: float
    wer: float
    errors: int
    """Of twelve utterances."""
    change: tuple[str, str]
    """In the bundle's description, so that it needs other weights."""
    parts: frozenset[str]
    """Of the network, that a CTC model has not."""

    @property
    def kind(self):
        return self.system.kind


ATTENTION = Case(
    AttentionSystem(decoder_network=TransformerDecoderConfig(dim=32, layers=1, heads=2, dropout=0.0)),
    AttentionConfig,
    {"epochs": 14, "optimizer": {"lr": 5e-3}},
    AttentionDecodeConfig,
    {"ctc_weight": 0.8},
    loss=1.5,
    wer=0.7,
    errors=2,
    change=('"layers": 1', '"layers": 2'),
    parts=frozenset({"decoder"}),
)
LANGUAGES = TransformerDecoderConfig(dim=32, layers=1, heads=2, dropout=0.0, language="auto")
CASES = {
    "attention": ATTENTION,
    "attention with languages": replace(ATTENTION, system=AttentionSystem(decoder_network=LANGUAGES)),
    "transducer": Case(
        TransducerSystem(predictor=LstmPredictorConfig(dim=16, dropout=0.0), joint_dim=32, ctc=True),
        TransducerConfig,
        {"epochs": 30, "optimizer": {"lr": 1e-2}},
        TransducerDecodeConfig,
        {},
        loss=1.0,
        wer=0.4,
        errors=6,
        change=('"joint_dim": 32', '"joint_dim": 33'),
        parts=frozenset({"predictor", "joiner"}),
    ),
}
ATTENTION, TRANSDUCER = CASES["attention"].system, CASES["transducer"].system


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def trained(case, corpus, tmp_path_factory):
    """A model that knows the six words."""
    spec = corpus.spec("conformer", model=tones.bare("conformer"), system=case.system)
    changes = {**tones.LEARNS, "objective": case.kind, "average": 2, **case.training}
    return tones.train_here(corpus.job(tmp_path_factory.mktemp(case.kind), spec=spec, **changes))


languages = pytest.mark.parametrize("case", ["attention with languages"], indirect=True)
attention = pytest.mark.parametrize("case", ["attention"], indirect=True)
transducer = pytest.mark.parametrize("case", ["transducer"], indirect=True)


def decoded(case, trained, corpus, folder, batch_seconds=4.0, **fields):
    recognizer = Recognizer.load(trained.bundle, case.decoder(**fields))
    return list(
        decode_set(recognizer, open_set(corpus.url("valid"), RATE, folder), batch_seconds=batch_seconds).values()
    )


def batch_of(job, folder, count=5):
    """The task of a job, its network, and a batch of the validation set."""
    task, network = job.task.build(1), job.task.build_network()
    batch = job.task.open_set("valid", folder / "cache", None, lambda _: None).batch(np.arange(count))
    return task, network, task.drawn(batch, 0)


# --- of all systems


def test_validation_has_loss_and_error_rate(case, trained):
    figures = trained.result["valid"]
    assert 0 < figures["loss"] < case.loss
    assert figures["wer"] < case.wer


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_the_loss_alone_is_that_of_a_whole_validation(trained, value):
    evaluator, (_, network) = Evaluator(trained.job), load_bundle(trained.bundle)
    weights = {name: tensor * value for name, tensor in network.state_dict().items()}
    alone, whole = (evaluator.validate(weights, loss_only=loss_only) for loss_only in (True, False))
    assert "wer" not in alone
    assert alone["loss"] == pytest.approx(whole["loss"], nan_ok=True)
    assert math.isnan(alone["loss"]) == math.isnan(value)


def test_a_replica_that_replaces_a_worse_mean_has_its_error_rate(trained, corpus, tmp_path):
    job = trained.job.model_copy(update={"output_url": str(tmp_path)})
    evaluator, good = Evaluator(job), load_bundle(trained.bundle)[1].state_dict()
    for node, weights in enumerate((good, {name: tensor * 0.1 for name, tensor in good.items()})):
        write_weights(ObjectStore(job.output_url), replica_name(1, node), weights)
    result, alone = evaluator.evaluate(1, [0, 1]), evaluator.validate(good)
    assert (result["loss"], result["wer"]) == (alone["loss"], alone["wer"])
    assert result["replicas"]["0"] == pytest.approx(alone["loss"])
    assert result["replicas"]["1"] > alone["loss"]


@pytest.mark.parametrize("beam", [1, 4])
def test_trained_model_recognizes_the_set(case, trained, corpus, tmp_path, beam):
    entries = decoded(case, trained, corpus, tmp_path, beam=beam, **case.decode)
    assert sum(entry.ref != entry.hyp for entry in entries) <= case.errors
    assert all(0 < entry.confidence <= 1 for entry in entries)


def test_hypotheses_do_not_depend_on_batching(case, trained, corpus, tmp_path):
    ways = [decoded(case, trained, corpus, tmp_path, batch_seconds) for batch_seconds in (0.1, 1000)]
    assert [entry.hyp for entry in ways[0]] == [entry.hyp for entry in ways[1]]
    assert [entry.score for entry in ways[0]] == pytest.approx([entry.score for entry in ways[1]], abs=1e-3)


@pytest.mark.parametrize("of_ctc", [True, False])
def test_words_have_times_in_order_within_the_recording(case, trained, of_ctc):
    wave = tones.speak(["ba", "gu", "ce"], np.random.default_rng(5))
    decode = case.decoder(times="ctc" if of_ctc else case.kind, nbest=2, **case.decode)
    (transcript,) = Transcriber(trained.bundle, decode=decode).transcribe([wave], words=True)
    assert transcript.text.split() == [word.word for word in transcript.words]
    assert len(transcript.words) >= 2
    end = 0.0
    for word in transcript.words:
        assert word.start >= end - 1e-6
        end = word.start + word.duration
        assert 0 < word.confidence <= 1
    assert end <= len(wave) / RATE + 1e-3


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


def words_heard_in(name, trained, decode):
    """The words recognized in a waveform of `not_speech`, no more than the encoder has frames."""
    wave = torch.from_numpy(not_speech()[name]).float()
    recognizer = Recognizer.load(trained.bundle, decode)
    encoded = recognizer.encode(wave[None], torch.tensor([len(wave)]))
    (hypothesis,) = recognizer.search(encoded)
    assert len(hypothesis.tokens) <= int(encoded.frames[0])
    return hypothesis.text.split()


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", sorted(not_speech()))
def test_what_is_no_speech_has_no_more_tokens_than_frames(case, trained, name, beam):
    words_heard_in(name, trained, case.decoder(beam=beam))


def test_parameters_can_be_tuned(case, trained, corpus, tmp_path):
    recognizer = Recognizer.load(trained.bundle, case.decoder(beam=2))
    data = open_set(corpus.url("valid"), RATE, tmp_path)
    encoded = [(part.texts, given) for part, given in encode_set(recognizer, data, drawn_rows(data, 6, seed=1))]
    with DecoderTrials(recognizer, encoded) as trials:
        for fields in ({}, case.decode):
            few, most = (trials.errors(fields | {"length_bonus": bonus}).errors for bonus in (0.0, -50.0))
            assert most > few  # so large a malus allows no words


def test_decoder_of_posteriors_is_refused(case, trained):
    with pytest.raises(DecodeError, match=f"use {case.kind}"):
        Recognizer.load(trained.bundle, GreedyConfig()).prepare()


def test_bundle_is_one_file_of_weights_and_names_its_system(case, trained, tmp_path):
    assert load_spec(trained.bundle).system == case.system
    for path in trained.bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / "bundle.json").read_text()
    changed = text.replace(*case.change)
    assert changed != text
    (tmp_path / "bundle.json").write_text(changed.replace('"checksum"', '"provenance": {}, "checksum"'))
    with pytest.raises(BundleError):
        Recognizer.load(tmp_path, case.decoder())


def test_losses_of_a_batch_reach_all_weights_without_ctc(case, corpus, tmp_path):
    spec = corpus.spec("tdnn", system=case.system.model_copy(update={"ctc": False}))
    task, network, batch = batch_of(corpus.job(tmp_path, spec=spec, objective=case.kind), tmp_path)
    losses, unalignable = task.losses(network, batch, torch.device("cpu"))
    assert (losses.shape, unalignable) == ((5,), 0)
    losses.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_training_may_begin_with_a_ctc_models_encoder_or_with_a_model_of_the_same_kind(case, corpus, tmp_path):
    spec, own = corpus.spec("tdnn"), corpus.spec("tdnn", system=case.system)
    spec.save(tmp_path / "ctc", dict(spec.build_model().state_dict()))
    source = open_source(tmp_path / "ctc")
    check_source(source, own, "the model")
    given = transfer_weights(source, own, own.build_model())
    assert {name.partition(".")[0] for name in given.new} == case.parts
    theirs = source.weights()
    assert torch.equal(given.weights["encoder.layers.0.linear.weight"], theirs["layers.0.linear.weight"])
    text = len(theirs["output.weight"])  # tokens of languages are new
    assert torch.equal(given.weights["ctc.weight"][:text], theirs["output.weight"])
    own.save(tmp_path / "own", dict(own.build_model().state_dict()))
    again = transfer_weights(open_source(tmp_path / "own"), own, own.build_model())
    assert (again.incomplete, again.left_out, again.new) == ((), (), ())


def test_simulations_are_refused(case, corpus, tmp_path):
    with pytest.raises(ValueError, match=f"not of a recognizer of kind {case.kind}: set train.objective to ctc"):
        Speech(corpus.job(tmp_path, spec=corpus.spec("tdnn", system=case.system), objective=case.kind), 1)


def test_objective_chooses_the_system_which_checks_it(case):
    system = type(case.system)
    assert system_of(case.objective()).kind == case.kind
    system(ctc=True).check_objective(case.objective())
    system(ctc=False).check_objective(case.objective(ctc_weight=0))
    with pytest.raises(ValueError, match=f"leaves CTC's output layer untrained: set recognizer.kind to {case.kind}"):
        system(ctc=True).check_objective(case.objective(ctc_weight=0))
    with pytest.raises(ValueError, match=f"set train.objective to {case.kind}"):
        system().check_objective(CtcConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"kind": "whisper"}}, "have no blank, which (CTC|a transducer) needs"),
        ({"states": {"model": "ab", "frame_shift_ms": 10, "log_priors": [-0.7]}}, "its system is hybrid"),
    ],
)
def test_bundles_that_no_such_system_can_have_are_refused(case, corpus, changes, message):
    values = corpus.spec("tdnn", system=case.system).model_dump() | changes
    with pytest.raises(ValidationError, match=message):
        BundleSpec.model_validate(values)


# --- of attention models


UNIGRAMS = """\\data\\
ngram 1=4

\\1-grams:
-2\t<unk>
-99\t<s>
-1\t</s>
-0.5\tyes

\\end\\
"""


@attention
def test_validation_has_token_accuracy(trained):
    assert trained.result["valid"]["token_accuracy"] > 0.5  # of six words and the end


@attention
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


@attention
def test_times_of_ctc_are_those_of_the_words(trained):
    wave = tones.speak(["ba", "gu"], np.random.default_rng(5))
    transcriber = Transcriber(trained.bundle, decode=AttentionDecodeConfig(times="ctc", ctc_weight=0.8))
    (transcript,) = transcriber.transcribe([wave], words=True)
    assert transcript.text == "ba gu"
    for word, begin in zip(transcript.words, (0.05, 0.21), strict=True):  # each word 0.10 to 0.14 s, 0.04 s between
        assert abs(word.start - begin) < 0.15


@attention
@pytest.mark.parametrize("fields", [{"beam": 1}, {"beam": 1, "ctc_weight": 0.0}, {"beam": 4}])
@pytest.mark.parametrize("name", sorted(not_speech()))
def test_nothing_is_said_nine_times_on_end_in_what_is_no_speech(trained, name, fields):
    words = words_heard_in(name, trained, AttentionDecodeConfig(**fields))
    for phrase in range(1, 17):
        for start in range(len(words) - 9 * phrase + 1):
            assert words[start : start + 9 * phrase] != words[start : start + phrase] * 9


@languages
def test_language_is_found_where_none_is_given(trained, corpus, tmp_path):
    recognizer = Recognizer.load(trained.bundle, AttentionDecodeConfig(beam=1))
    assert list(recognizer.languages) == ["de", "en"]
    data = open_set(corpus.url("valid"), RATE, tmp_path)
    found = [
        (hypothesis.language, tones.language_of(text.split())[:2])
        for part, encoded in encode_set(recognizer, data, np.arange(len(data)))
        for text, hypothesis in zip(part.texts, recognizer.search(encoded), strict=True)
    ]
    assert len({wanted for _, wanted in found}) == 2
    assert sum(language == wanted for language, wanted in found) >= len(found) - 2


@languages
def test_sets_are_decoded_in_the_languages_that_the_data_name_if_so_configured(trained, corpus, tmp_path):
    recognizer = Recognizer.load(trained.bundle, AttentionDecodeConfig(beam=1, language="given"))
    data = open_set(corpus.url("valid"), RATE, tmp_path)
    for part, encoded in encode_set(recognizer, data, np.arange(len(data)), batch_seconds=1.0):
        assert encoded.languages == [tones.language_of(text.split())[:2] for text in part.texts]
        assert [hypothesis.language for hypothesis in recognizer.search(encoded)] == encoded.languages
    del recognizer.tokenizer.languages["de"]  # the model would have to find what it cannot be told
    (_, encoded), *_ = encode_set(recognizer, data, np.arange(len(data)))
    assert set(encoded.languages) == {"", "en"}


@pytest.mark.parametrize(("words", "nbest", "timed"), [(False, 1, 0), (True, 1, 3), (False, 2, 3)])
def test_times_are_found_only_if_they_are_asked_for(trained, case, monkeypatch, words, nbest, timed):
    transcriber = Transcriber(trained.bundle, case.decoder(beam=2, **case.decode), vad=EverythingConfig(), nbest=nbest)
    searches, spans = [], TokenSearch._spans
    monkeypatch.setattr(TokenSearch, "_spans", lambda *args: searches.append(args) or spans(*args))
    waves = [tones.speak([word, WORDS[3]], np.random.default_rng(5)) for word in WORDS[:3]]
    transcripts = transcriber.transcribe(waves, words=words)
    assert len(searches) == timed
    assert [transcript.text for transcript in transcripts] == [
        transcript.text for transcript in transcriber.transcribe(waves, words=True)
    ]
    assert all(transcript.text for transcript in transcripts)
    assert all(bool(transcript.words) == words for transcript in transcripts)


@languages
def test_recordings_may_be_in_different_languages_and_a_wrong_one_is_obeyed(trained):
    transcriber = Transcriber(trained.bundle, AttentionDecodeConfig(beam=2), vad=EverythingConfig())
    waves = [tones.speak([word], np.random.default_rng(5)) for word in ("ba", "gu")]
    assert [transcript.language for transcript in transcriber.transcribe(waves)] == ["de", "en"]
    assert [transcript.language for transcript in transcriber.transcribe(waves, language="en-US")] == ["en", "en"]
    opened = [transcriber.open(wave, language=code) for wave, code in zip(waves, ("en", ""), strict=True)]
    while left := [recording for recording in opened if not recording.finished]:
        transcriber.advance(left)
    assert [recording.transcript.language for recording in opened] == ["en", "en"]
    with pytest.raises(DecodeError, match="knows the languages de, en, not 'fr': give one"):
        transcriber.transcribe(waves, language="fr")


@attention
def test_model_without_tokens_of_languages_is_told_none(trained):
    transcriber = Transcriber(trained.bundle, AttentionDecodeConfig())
    with pytest.raises(DecodeError, match=r"no tokens of languages.*decoder_network\.language auto"):
        transcriber.open(torch.zeros(RATE), language="en")


@languages
def test_model_with_tokens_of_languages_is_not_exported(trained, tmp_path):
    spec, network = load_bundle(trained.bundle)
    with pytest.raises(ValueError, match=r"cannot be exported: .*`starling transcribe`.*language other than auto"):
        spec.system.graphs(spec, network, None)


def test_attention_without_ctc_has_no_share_of_it_in_the_loss(corpus, tmp_path):
    spec = corpus.spec("tdnn", system=ATTENTION.model_copy(update={"ctc": False}))
    task = corpus.job(tmp_path, spec=spec, objective="attention").task.build(1)
    assert isinstance(task, AttentionTask)
    assert task.objective.cfg.ctc_weight == 0


# --- of transducers


@pytest.mark.parametrize("prune_range", [0, 2])
def test_joiner_works_in_parts_of_the_configured_size(corpus, tmp_path, prune_range):
    results = []
    for memory in (1, 1024):
        spec = corpus.spec("tdnn", model=tones.bare("tdnn"), system=TRANSDUCER.model_copy(update={"joint_dim": 2048}))
        objective = {"kind": "transducer", "joint_mb": memory, "prune_range": prune_range}
        task, network, batch = batch_of(corpus.job(tmp_path, spec=spec, objective=objective), tmp_path)
        assert isinstance(task, TransducerTask)
        assert network.joint_bytes == memory << 20
        network.load_state_dict({name: torch.full_like(value, 0.01) for name, value in network.state_dict().items()})
        losses, unalignable = task.losses(network, batch, torch.device("cpu"))
        assert (losses.shape, unalignable) == ((5,), 0)
        losses.sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        results.append(losses.detach())
    torch.testing.assert_close(*results)


def test_pruned_training_ends_with_a_transducer_as_any_other(corpus, tmp_path):
    """It begins with a CTC model: what is new, the simple joiner included, is trained in full beside adapters."""
    ctc = corpus.spec("conformer", model=tones.bare("conformer"))
    ctc.save(tmp_path / "ctc", dict(ctc.build_model().state_dict()))
    own = ctc.model_copy(update={"system": TRANSDUCER})
    transfer = transfer_weights(open_source(tmp_path / "ctc"), own, own.build_model())
    initial = save_initial(transfer, ObjectStore(str(tmp_path / "source")))
    fields = {"init": "another", "lora": {"rank": 2, "modules": ["*attention*"]}, "average": 1, "initial": initial}
    objective = {"kind": "transducer", "prune_range": 2}
    job = corpus.job(tmp_path, spec=own, objective=objective, epochs=4, optimizer={"lr": 1e-2}, **fields)
    assert {name.partition(".")[0] for name in job.task.new_parameters} == {"predictor", "joiner", "simple"}
    run = tones.train_here(job)
    first, *_, last = run.result["history"]
    assert last["loss"] < 0.8 * first["loss"]
    spec, network = load_bundle(run.bundle)
    assert spec.system == TRANSDUCER
    assert network.simple is None
    unpruned = corpus.job(tmp_path, spec=own, objective="transducer", augment={"enabled": False})
    task, untrained, batch = batch_of(unpruned, tmp_path, 12)
    untrained.load_state_dict(network.state_dict())
    losses, _ = task.losses(untrained.eval(), batch, torch.device("cpu"))
    assert losses.sum().item() / task.items(batch) == pytest.approx(run.result["valid"]["loss"], rel=1e-4)


def test_stateless_predictor_needs_no_ctc_weight():
    system = TransducerSystem(predictor=StatelessPredictorConfig(dim=16))
    system.check_objective(TransducerConfig(ctc_weight=0))
