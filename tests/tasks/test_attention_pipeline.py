"""A pipeline with an attention model: configuration, training, decoding with a language model, registration."""

from pathlib import Path

import mlflow
import pytest
from support import copy_finished, give_mlflow, tiny_document

from recognition.bundle import load_spec
from recognition.recognizer import Recognizer
from recognition.systems.attention import AttentionRecognizer
from speech.decoding import AttentionDecodeConfig
from tasks import STAGES
from tasks.config.decoding import tuned_space
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.stages.base import Run, get_stage
from tasks.stages.train import TRAIN

SMALL = {"kind": "attention", "decoder_network": {"dim": 16, "layers": 1, "heads": 2}}
DECODE = {"kind": "attention", "beam": 2}


def document(**fields):
    made = tiny_document(**{"recognizer": SMALL, "decode": DECODE} | fields)
    made["train"] = made["train"] | {"objective": "attention", "epochs": 1}
    return made


def config(**fields):
    return parse_config(document(**fields))


def test_objective_alone_chooses_the_system():
    made = config(recognizer="network")
    assert made.system.kind == "attention"
    assert made.system.decoder_network.kind == "transformer"


def test_words_rank_hypotheses_again_without_a_language_model_in_the_search():
    tune = {"grid": {"rescore_weight": [0, 0.2], "word_score": [0, 1]}}
    made = config(rescoring={"order": 3}, tune=tune)
    axes = {name: list(values) for name, values in tuned_space(made.decode, made.tune).axes().items()}
    assert axes == {"rescore_weight": [0, 0.2, 0.3], "word_score": [0, 1]}
    with pytest.raises(ConfigError, match="rescoring.kind ngram with unit token is none"):
        config(rescoring={"unit": "token"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode": "greedy"}, "decode.kind greedy does not search .* kind attention puts out: use attention"),
        ({"decode": DECODE, "recognizer": "ctc"}, "recognizer is ctc, which is not trained with attention"),
        ({"lm": {"unit": "word"}}, "needs a language model of tokens: set lm.unit: token"),
        ({"lm": "class"}, "reads ARPA files, and lm.kind class makes none"),
        ({"recognizer": SMALL | {"decoder_network": {"dim": 20, "heads": 4}}}, "must be a multiple of 2 x heads=8"),
    ],
)
def test_unsuitable_parts_are_refused_naming_suitable_ones(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_training_cannot_be_split_over_learners():
    made = document()
    made["train"] |= {"strategy": "pipeline", "learners_per_node": 2}
    with pytest.raises(ConfigError, match="do not train a recognizer of kind attention: use another strategy"):
        parse_config(made)


def test_sizes_of_the_decoder_network_change_the_trainings_address(finished):
    def key(**network):
        run = Run(config(recognizer=SMALL | {"decoder_network": SMALL["decoder_network"] | network}), "r")
        run.results = dict(finished.results)
        return TRAIN.output(run).key

    assert len({key(), key(layers=2), finished.result("train").key}) == 3


@pytest.mark.parametrize("kind", ["ngram", "lstm"])
def test_model_is_trained_decoded_with_a_language_model_and_registered(finished, tmp_path, monkeypatch, kind):
    home = copy_finished(tmp_path / "home")
    give_mlflow(home)
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    short = {"epochs": 1, "device": "cpu", "threads": 1, "membership": {"beat_s": 0.05}}
    lm = {"ngram": {"order": 2, "smoothing": "witten-bell"}, "lstm": {"kind": "lstm", "dim": 8}}[kind]
    words = {"order": 2, "smoothing": "witten-bell"}
    tuned = {"rescoring": words, "tune": {"utterances": 4, "grid": {"rescore_weight": [0.1, 1]}}}
    more = {"lm_train": short} if kind == "lstm" else tuned
    run = Run(config(lm=lm | {"unit": "token"}, **more), "r")
    early = STAGES[: STAGES.index("train")]
    run.results = {name: result for name, result in finished.results.items() if name in early}
    second, last = (("rescoring",), ("register",)) if kind == "ngram" else ((), ())
    for name in ("train", "lm", *second, "decode", "score", *last):
        get_stage(name).execute(run)
    rows = read_table(run.result("decode").output, "test.parquet")
    assert len(rows) == 12
    if kind == "lstm":
        return
    model = mlflow.artifacts.download_artifacts(
        artifact_uri=run.result("register").record["model_uri"], dst_path=str(tmp_path / "got")
    )
    bundle = next(Path(model).rglob("bundle.json")).parent
    assert load_spec(bundle).system == run.config.system
    recognizer = Recognizer.load(bundle)
    assert isinstance(recognizer, AttentionRecognizer)
    assert isinstance(recognizer.cfg, AttentionDecodeConfig)
    assert recognizer.cfg.lm.startswith(str(bundle))
    assert recognizer.cfg.rescore_lm == str(bundle / "rescore-lm.arpa")
    tuning = run.result("decode").record["tuning"]
    assert [trial["rescore_weight"] for trial in tuning["table"]] == [0.1, 0.3, 1.0]
    assert recognizer.cfg.rescore_weight == tuning["chosen"]["rescore_weight"]
    recognizer.prepare()
