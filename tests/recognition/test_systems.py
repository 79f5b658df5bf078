"""What every system of `SYSTEMS` does, and bundles that name theirs: a new system is tested by being registered."""

import inspect
import json

import pytest
import torch
from support import load_beside, silent_system, tiny_bundle

from recognition.bundle import BundleError, BundleSpec, TiedStates, load_bundle, load_spec
from recognition.recognizer import Recognizer
from recognition.systems import SYSTEMS, TASK_CONFIGS, system_of
from recognition.systems.acoustic import FrameRecognizer
from recognition.systems.attention import AttentionRecognizer
from recognition.systems.gmm import GmmRecognizer
from recognition.systems.token_networks import TokenRecognizer
from recognition.systems.transducer import TransducerRecognizer
from recognition.transcriber import Transcriber
from speech.decoding import DECODERS, DecodeError
from speech.objectives import OBJECTIVES
from speech.vad import EverythingConfig

STATES = TiedStates(model="ab" * 32, frame_shift_ms=10.0, log_priors=(-0.7, -0.7))
bundles = load_beside(__file__, "test_bundle.py")


@pytest.fixture(params=SYSTEMS)
def system(request):
    return SYSTEMS[request.param]()


def test_registered_name_is_that_of_the_configuration(system):
    assert SYSTEMS[system.kind] is type(system)


def test_decoders_exist_and_others_are_refused_naming_them(system):
    assert system.decoders
    assert set(system.decoders) <= set(DECODERS)
    for kind in DECODERS:
        if kind in system.decoders:
            system.check_decoder(kind)
        else:
            with pytest.raises(DecodeError, match=f"of kind {system.kind} .*: use .*{system.decoders[-1]}"):
                system.check_decoder(kind)


def test_engine_knows_the_task_of_every_trained_system(system):
    assert system.is_trained == (system.task_config in TASK_CONFIGS.values())


def test_every_objective_trains_one_system():
    for kind, objective in OBJECTIVES.items():
        assert [name for name, system in SYSTEMS.items() if kind in system.objectives] == [system_of(objective()).kind]


@pytest.mark.parametrize("ability", ["word times", "several hypotheses", "tuning", "forced alignment"])
def test_abilities_that_a_system_lacks_are_refused_with_a_remedy(system, ability):
    if ability in system.abilities:
        system.require(ability)
    else:
        with pytest.raises(DecodeError, match=f"of kind {system.kind} has no {ability}: "):
            system.require(ability)


@pytest.mark.parametrize("kind", [FrameRecognizer, AttentionRecognizer, TransducerRecognizer, GmmRecognizer])
def test_recognizers_have_all_that_their_interface_promises(kind):
    """What only some can do, they give or do not give; no method raises for others."""
    assert not kind.__abstractmethods__
    source = inspect.getsource(inspect.getmodule(Recognizer))
    assert "NotImplementedError" not in source
    assert Recognizer.adapter.fget is not kind.adapter.fget or issubclass(kind, TokenRecognizer)


def test_model_that_reads_each_utterance_as_it_is_has_no_adapter_and_a_fast_search_stays_here(tmp_path):
    tiny_bundle(tmp_path)
    recognizer = Recognizer.load(tmp_path)
    assert recognizer.adapter is None
    assert recognizer.elsewhere() is None
    other = recognizer.with_decoder(recognizer.cfg.model_copy())
    assert other is not recognizer
    assert other.model is recognizer.model


def test_recordings_of_a_speaker_go_through_the_adapter_together(tmp_path, monkeypatch):
    tiny_bundle(tmp_path)
    transcriber, heard = Transcriber(tmp_path, vad=EverythingConfig()), []
    extract = transcriber.recognizer.frontend.extract

    def adapter(waves):
        heard.append([len(wave) for wave in waves])
        return [extract(torch.zeros(1, count), torch.tensor([count]))[0][0] for count in heard[-1]]

    monkeypatch.setattr(FrameRecognizer, "adapter", property(lambda self: adapter))
    recordings = [torch.zeros(count) for count in (4000, 6000, 5000)]
    transcripts = transcriber.transcribe(recordings, speakers=["ann", "bo", "ann"])
    assert heard == [[4000, 5000], [6000]]
    assert [transcript.error for transcript in transcripts] == [""] * 3


def without(folder, *fields, **changes):
    """A bundle's description as an earlier version wrote it: without some fields."""
    path = folder / "bundle.json"
    value = json.loads(path.read_text()) | {"checksum": ""} | changes
    path.write_text(json.dumps({name: entry for name, entry in value.items() if name not in fields}))


@pytest.mark.parametrize(("states", "kind"), [(None, "ctc"), (STATES, "hybrid")])
def test_bundle_of_an_earlier_version_is_of_the_system_that_its_outputs_imply(tmp_path, states, kind):
    tiny_bundle(tmp_path, states=states)
    written = load_bundle(tmp_path)
    assert json.loads((tmp_path / "bundle.json").read_text())["system"] == {"kind": kind}
    without(tmp_path, "system")
    spec, network = load_bundle(tmp_path)
    assert (spec, spec.system.kind) == (written[0], kind)
    assert all(torch.equal(tensor, written[1].state_dict()[name]) for name, tensor in network.state_dict().items())


def test_bundle_that_an_earlier_version_wrote_transcribes(tmp_path):
    """As version 1.0 wrote it, field by field."""
    spec, _ = bundles.write(tmp_path, bundles.make_spec(decode={"kind": "greedy"}))
    without(tmp_path, "system")
    value = json.loads((tmp_path / "bundle.json").read_text())
    assert sorted(value) == [
        *("adaptation", "checksum", "decode", "features", "files", "format", "model", "normalizer", "provenance"),
        *("sample_rate", "states", "stats", "tokenizer"),
    ]
    wave = torch.randn(8000, generator=torch.Generator().manual_seed(1)).numpy() / 10
    (transcript,) = Transcriber(tmp_path, vad=EverythingConfig()).transcribe([wave], 8000, words=True)
    assert (transcript.error, load_spec(tmp_path)) == ("", spec)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ({"kind": "oracle"}, "system 'oracle' is none of ctc, hybrid, gmm"),
        ("oracle", "'oracle' is none of ctc"),
        (3, "system None is none of ctc"),
        ({"kind": "hybrid"}, "needs states: its system is ctc"),
        ({"kind": "ctc", "surprise": 1}, "surprise"),
        ({"kind": "gmm"}, "needs adaptation"),
    ],
)
def test_systems_that_do_not_fit_are_refused_with_the_remedy(tmp_path, system, message):
    tiny_bundle(tmp_path)
    without(tmp_path, system=system)
    for load in (load_spec, Recognizer.load):
        with pytest.raises(BundleError, match=rf"install the version that wrote it(.|\n)*{message}"):
            load(tmp_path)


def test_bundle_of_states_is_no_ctc_model(tmp_path):
    tiny_bundle(tmp_path, states=STATES)
    without(tmp_path, system={"kind": "ctc"})
    with pytest.raises(BundleError, match="its system is hybrid"):
        load_spec(tmp_path)


def test_description_needs_what_its_system_reads(tmp_path):
    tiny_bundle(tmp_path)
    without(tmp_path, model=None, tokenizer=None)
    with pytest.raises(BundleError, match="of kind ctc needs model and tokenizer"):
        load_spec(tmp_path)


def test_transcriber_names_what_a_system_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "silent", silent_system())
    tiny_bundle(tmp_path, system={"kind": "silent"})
    with pytest.raises(DecodeError, match="of kind silent has no several hypotheses: ask for one"):
        Transcriber(tmp_path, nbest=2)
    transcriber = Transcriber(tmp_path, vad=EverythingConfig())
    with pytest.raises(DecodeError, match="of kind silent has no word times: leave out the words' times"):
        transcriber.transcribe([torch.zeros(800).numpy()], 8000, words=True)
    assert [transcript.error for transcript in transcriber.transcribe([torch.zeros(800).numpy()], 8000)] == [""]
    assert BundleSpec.model_validate(load_spec(tmp_path).model_dump(mode="json")).system.kind == "silent"
