"""Pipelines whose network reads tokens beside frames: configuration, training, decoding with a language model,
pretrained encoders, registration."""

from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
import torch
from support import copy_finished, give_mlflow, load_beside, tiny_document

from recognition.bundle import load_bundle, load_spec
from recognition.recognizer import Recognizer
from recognition.systems.token_networks import TokenRecognizer
from speech.models.networks.encoder_decoder import EncoderWithCtc
from tasks import STAGES
from tasks.config.decoding import tuned_space
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, get_stage
from tasks.stages.bundles import fetch_bundle
from tasks.stages.initial import initial_model, transfer_initial
from tasks.stages.train import TRAIN, make_spec
from training.learner.trained import trained_network

pretrained = load_beside(__file__, "test_pretrained_training.py")
networks = load_beside(__file__, "../speech/test_pretrained_networks.py")


@dataclass(frozen=True)
class Case:
    """The sections of a configuration, sizes that change the model, and what is refused."""

    kind: str
    recognizer: dict
    sizes: tuple[dict, ...]
    refused: tuple[tuple[dict, str], ...]
    parts: frozenset[str]

    def document(self, **fields):
        made = tiny_document(**{"recognizer": self.recognizer, "decode": {"kind": self.kind, "beam": 2}} | fields)
        made["train"] = made["train"] | {"objective": self.kind, "epochs": 1}
        return made

    def config(self, **fields):
        return parse_config(self.document(**fields))


_DECODER = {"dim": 16, "layers": 1, "heads": 2}
CASES = {
    "attention": Case(
        "attention",
        {"kind": "attention", "decoder_network": _DECODER},
        ({"decoder_network": _DECODER | {"layers": 2}}, {"ctc": False}),
        (
            ({"lm": "class"}, "reads ARPA files, and lm.kind class makes none"),
            (
                {"recognizer": {"kind": "attention", "decoder_network": {"dim": 20, "heads": 4}}},
                "must be a multiple of 2 x heads=8",
            ),
        ),
        frozenset({"decoder"}),
    ),
    "transducer": Case(
        "transducer",
        {"kind": "transducer", "predictor": {"kind": "stateless", "dim": 16}, "joint_dim": 16},
        ({"joint_dim": 8}, {"predictor": "lstm"}, {"ctc": True}),
        (({"recognizer": {"kind": "transducer", "predictor": "rnn"}}, "'rnn' is none of 'stateless', 'lstm'"),),
        frozenset({"predictor", "joiner"}),
    ),
}
COMMON = (
    ({"decode": "greedy"}, "decode.kind greedy does not search .* kind {kind} puts out: use {kind}"),
    ({"recognizer": "ctc"}, "recognizer is ctc, which is not trained with {kind}"),
    ({"lm": {"unit": "word"}}, "needs a language model of tokens: set lm.unit: token"),
)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize(("kind", "part"), [("attention", "decoder_network"), ("transducer", "predictor")])
def test_objective_alone_chooses_the_system(kind, part):
    made = CASES[kind].config(recognizer="network")
    assert made.system.kind == kind
    assert getattr(made.system, part).kind in ("transformer", "stateless")


def test_words_rank_hypotheses_again_without_a_language_model_in_the_search(case):
    tune = {"grid": {"rescore_weight": [0, 0.2], "word_score": [0, 1]}}
    made = case.config(rescoring={"order": 3}, tune=tune)
    axes = {name: list(values) for name, values in tuned_space(made.decode, made.tune).axes().items()}
    assert axes == {"rescore_weight": [0, 0.2, 0.3], "word_score": [0, 1]}
    with pytest.raises(ConfigError, match="rescoring.kind ngram with unit token is none"):
        case.config(rescoring={"unit": "token"})


def test_unsuitable_parts_are_refused_naming_suitable_ones(case):
    for fields, message in (*COMMON, *case.refused):
        with pytest.raises(ConfigError, match=message.replace("{kind}", case.kind)):
            case.config(**fields)


def test_training_cannot_be_split_over_learners(case):
    made = case.document()
    made["train"] |= {"strategy": "pipeline", "learners_per_node": 2}
    with pytest.raises(ConfigError, match=f"do not train a recognizer of kind {case.kind}: use another strategy"):
        parse_config(made)


def address(finished, case, objective=None, **system):
    made = case.document(recognizer=case.recognizer | system)
    made["train"] |= {"objective": objective or case.kind}
    run = Run(parse_config(made), "r")
    run.results = dict(finished.results)
    return TRAIN.output(run).key


def test_sizes_change_the_trainings_address(finished, case):
    keys = {address(finished, case), *(address(finished, case, **sizes) for sizes in case.sizes)}
    assert len(keys - {finished.result("train").key}) == 1 + len(case.sizes)


def test_pruning_changes_the_trainings_address_and_the_joiners_memory_does_not(finished):
    def key(**fields):
        return address(finished, CASES["transducer"], {"kind": "transducer", **fields})

    assert key(joint_mb=3) == key() != key(prune_range=4)


@pytest.mark.parametrize("lm", ["ngram", pytest.param("lstm", marks=pytest.mark.slow)])
@pytest.mark.variants(1)
def test_model_is_trained_decoded_with_a_language_model_and_registered(finished, tmp_path, monkeypatch, case, lm):
    home = copy_finished(tmp_path / "home")
    give_mlflow(home)
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    short = {"epochs": 1, "device": "cpu", "threads": 1, "membership": {"beat_s": 0.05}}
    words = {"order": 2, "smoothing": "witten-bell"}
    tuned = {"rescoring": words, "tune": {"utterances": 4, "grid": {"rescore_weight": [0.1, 1]}}}
    section, more = ({"kind": "lstm", "dim": 8}, {"lm_train": short}) if lm == "lstm" else (words, tuned)
    run = Run(case.config(lm=section | {"unit": "token"}, **more), "r")
    early = STAGES[: STAGES.index("train")]
    run.results = {name: result for name, result in finished.results.items() if name in early}
    second, last = (("rescoring",), ("register",)) if lm == "ngram" else ((), ())
    for name in ("train", "lm", *second, "decode", "score", *last):
        get_stage(name).execute(run)
    assert len(read_table(run.result("decode").output, "test.parquet")) == 12
    if lm == "lstm":
        return
    model = mlflow.artifacts.download_artifacts(
        artifact_uri=run.result("register").record["model_uri"], dst_path=str(tmp_path / "got")
    )
    bundle = next(Path(model).rglob("bundle.json")).parent
    assert load_spec(bundle).system == run.config.system
    recognizer = Recognizer.load(bundle)
    assert isinstance(recognizer, TokenRecognizer)
    assert recognizer.cfg.kind == case.kind
    assert recognizer.cfg.lm.startswith(str(bundle))
    assert recognizer.cfg.rescore_lm == str(bundle / "rescore-lm.arpa")
    tuning = run.result("decode").record["tuning"]
    assert [trial["rescore_weight"] for trial in tuning["table"]] == [0.1, 0.3, 1.0]
    assert recognizer.cfg.rescore_weight == tuning["chosen"]["rescore_weight"]
    recognizer.prepare()


# --- pretrained encoders


def write_wav2vec2(folder):
    """A folder with a tiny wav2vec 2.0 model of random weights; returns its URL."""
    networks.library_model("wav2vec2").save_pretrained(folder)
    return str(folder)


ENCODERS = {
    "whisper": (pretrained.write_whisper, {"kind": "whisper_logmel"}, "*self_attn.q_proj"),
    "wav2vec2": (write_wav2vec2, {"kind": "waveform", "cmvn": "none"}, "*attention.q_proj"),
}


@pytest.fixture(params=ENCODERS)
def encoder(request, tmp_path):
    write, features, modules = ENCODERS[request.param]
    return {"kind": request.param, "source": write(tmp_path / "pretrained")}, features, modules


@pytest.mark.parametrize("freeze", [pytest.param(False, marks=pytest.mark.slow), True])
def test_model_with_a_pretrained_encoder_trains_decodes_and_is_a_bundle(encoder, case, tmp_path, monkeypatch, freeze):
    """With adapters beside the new parts, or with a frozen encoder."""
    model, features, modules = encoder
    made = case.document(features=features, model=model, recognizer=case.recognizer | {"ctc": True})
    made["data"]["sample_rate"] = 16000
    made["train"]["augment"] = {"time_masks": 1, "freq_masks": 0}
    made["train"] |= {"freeze": [{"names": ["encoder.*"]}]} if freeze else {"lora": {"rank": 2, "modules": [modules]}}
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    run = Run(parse_config(made), "r")
    for name in ("prepare", "shard", "features", "train", "decode", "score"):
        get_stage(name).execute(run)
    rows = read_table(run.result("decode").output, "test.parquet")
    assert len(rows) == 12
    spec, network = load_bundle(fetch_bundle(run.result("train").store, tmp_path / "bundle"))
    assert spec.system == run.config.system
    assert isinstance(network, EncoderWithCtc)
    transfer = transfer_initial(run, make_spec(run))
    assert {name.partition(".")[0] for name in transfer.new} == {"ctc"} | case.parts
    before = initial_model(run).source.weights()
    moved = {
        name
        for name, tensor in network.encoder.state_dict().items()
        if name in before and not torch.equal(tensor, before[name])
    }
    assert {name.partition(".")[0] for name, _ in network.named_parameters()} == {"encoder", "ctc"} | case.parts
    assert all("q_proj.weight" in name for name in moved)
    assert bool(moved) != freeze
    trained = trained_network(network, run.config.train.engine_part(), transfer.new)
    names = {name for name, _ in trained.network.named_parameters()}
    assert set(transfer.new) <= names
    assert any(name.startswith("encoder.") for name in names) != freeze
    (waves, lengths) = torch.randn(1, 16000) / 10, torch.tensor([16000])
    recognizer = Recognizer.load(tmp_path / "bundle", run.config.decode)
    encoded = recognizer.encode(waves, lengths)
    assert 45 <= encoded.frames.item() <= 50  # of 20 ms
    assert len(recognizer.search(encoded)) == 1
