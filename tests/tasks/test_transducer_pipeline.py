"""Pipelines with transducers: configuration, training, decoding with a language model, pretrained encoders."""

import pytest
import torch
from support import copy_finished, load_beside, tiny_document

from recognition.bundle import load_bundle
from recognition.recognizer import Recognizer
from recognition.systems.transducer import TransducerRecognizer
from speech.decoding import TransducerDecodeConfig
from tasks import STAGES
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, get_stage
from tasks.stages.initial import transfer_initial
from tasks.stages.train import TRAIN, make_spec
from training.learner.trained import trained_network

SMALL = {"kind": "transducer", "predictor": {"kind": "stateless", "dim": 16}, "joint_dim": 16}
DECODE = {"kind": "transducer", "beam": 2}


def document(**fields):
    made = tiny_document(**{"recognizer": SMALL, "decode": DECODE} | fields)
    made["train"] = made["train"] | {"objective": "transducer", "epochs": 1}
    return made


def config(**fields):
    return parse_config(document(**fields))


def test_objective_alone_chooses_the_system():
    made = config(recognizer="network")
    assert made.system.kind == "transducer"
    assert made.system.predictor.kind == "stateless"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode": "greedy"}, "decode.kind greedy does not search .* kind transducer puts out: use transducer"),
        ({"decode": DECODE, "recognizer": "ctc"}, "recognizer is ctc, which is not trained with transducer"),
        ({"lm": {"unit": "word"}}, "needs a language model of tokens: set lm.unit: token"),
        ({"recognizer": SMALL | {"predictor": "rnn"}}, "'rnn' is none of 'stateless', 'lstm'"),
    ],
)
def test_unsuitable_parts_are_refused_naming_suitable_ones(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_training_cannot_be_split_over_learners():
    made = document()
    made["train"] |= {"strategy": "pipeline", "learners_per_node": 2}
    with pytest.raises(ConfigError, match="do not train a recognizer of kind transducer: use another strategy"):
        parse_config(made)


def test_sizes_change_the_trainings_address_and_its_memory_does_not(finished):
    def key(memory=1024, **system):
        made = document(recognizer=SMALL | system)
        made["train"] |= {"objective": {"kind": "transducer", "joint_mb": memory}}
        run = Run(parse_config(made), "r")
        run.results = dict(finished.results)
        return TRAIN.output(run).key

    assert len({key(), key(joint_dim=8), key(predictor="lstm"), key(ctc=True)}) == 4
    assert key(memory=3) == key()


def test_model_is_trained_and_decoded_with_a_language_model(finished, tmp_path, monkeypatch):
    home = copy_finished(tmp_path / "home")
    monkeypatch.setenv("STARLING_HOME", str(home))
    run = Run(config(lm={"order": 2, "smoothing": "witten-bell", "unit": "token"}), "r")
    early = STAGES[: STAGES.index("train")]
    run.results = {name: result for name, result in finished.results.items() if name in early}
    for name in ("train", "lm", "decode", "score"):
        get_stage(name).execute(run)
    assert len(read_table(run.result("decode").output, "test.parquet")) == 12


whisper = load_beside(__file__, "test_pretrained_training.py")


def test_training_begins_with_a_pretrained_encoder(tmp_path, monkeypatch):
    made = document(features={"kind": "whisper_logmel"}, recognizer=SMALL | {"ctc": True})
    made["data"]["sample_rate"] = 16000
    made["model"] = {"kind": "whisper", "source": whisper.write_whisper(tmp_path / "whisper")}
    made["train"] |= {"lora": {"rank": 2, "modules": ["*self_attn*"]}}
    for name, value in (("set_digest", "digest"), ("train_stats", None), ("set_texts", ["hello ha"])):
        monkeypatch.setattr(f"tasks.stages.train.{name}", lambda *given, value=value: value)
    run = Run(parse_config(made), "r")
    spec = make_spec(run)
    transfer = transfer_initial(run, spec)
    assert {name.partition(".")[0] for name in transfer.new} == {"ctc", "predictor", "joiner"}
    assert {name.partition(".")[0] for name in transfer.weights} == {"encoder", "ctc", "predictor", "joiner"}
    spec.save(tmp_path / "bundle", transfer.weights)
    network = load_bundle(tmp_path / "bundle")[1]
    trained = trained_network(network, run.config.train.engine_part(), transfer.new)
    names = {name for name, _ in trained.network.named_parameters()}
    assert "joiner.output.weight" in names  # new weights are trained, pretrained ones by adapters
    assert "encoder.layers.0.self_attn.q_proj.lora_a" in names
    assert "encoder.layers.0.self_attn.q_proj.weight" not in names
    recognizer = Recognizer.load(tmp_path / "bundle", TransducerDecodeConfig())
    assert isinstance(recognizer, TransducerRecognizer)
    encoded = recognizer.encode(torch.randn(1, 16000) / 10, torch.tensor([16000]))
    assert encoded.frames.tolist() == [50]
    assert len(recognizer.search(encoded)) == 1
