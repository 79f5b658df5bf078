"""`starling evaluate`: an existing model on a corpus, with real stages and a model that makes no errors."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import soundfile
from command_line import invoke
from support import copy_database, copy_finished, load_beside, tiny_document, write_arpa
from typer.testing import CliRunner

from flows.cli.app import app
from flows.models import model_uri
from recognition.bundle import add_decoder, bundle_digest, own_decoder
from recognition.recognizer import Recognizer
from speech.decoding import BeamConfig, GreedyConfig, WordsConfig
from tasks.config.home import home as home_folder
from tasks.config.pipeline import parse_config
from tasks.dataset.sources import SourceConfig
from tasks.stages.base import Run, StageError
from tasks.stages.evaluation import evaluation_config, use_model

said = load_beside(__file__, "../recognition/test_transcriber.py")
RATE, folder, speak = said.RATE, said.folder, said.speak

SAID = {
    "ann/1": ("alpha bravo", "alpha bravo"),
    "ann/2": ("charlie", "charlie"),
    # transcripts with three errors in the view of the recognizer
    "bob/1": ("delta echo", "delta delta echo"),
    "bob/2": ("foxtrot", "foxtrot"),
    "eve/1": ("alpha", "bravo charlie"),
}


@pytest.fixture
def perfect_model(folder, monkeypatch):
    """The folder of a bundle whose model makes no errors."""
    load = Recognizer.load

    def loaded(*args, **kwargs):
        recognizer = load(*args, **kwargs)
        recognizer.model = said.LoudestBand()
        return recognizer

    monkeypatch.setattr(Recognizer, "load", staticmethod(loaded))
    return folder


@pytest.fixture
def corpus(tmp_path):
    """A folder of recordings with text files."""
    for name, (words, transcript) in SAID.items():
        path = tmp_path / "my corpus" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, speak(words), RATE)
        path.with_suffix(".txt").write_text(transcript + "\n")
    return tmp_path / "my corpus"


def evaluate(*words, code=0):
    result = CliRunner().invoke(app, ["evaluate", *map(str, words), "--no-prefect"])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_bundle_is_scored_on_a_folder_of_recordings(perfect_model, corpus, home):
    summary = json.loads(evaluate(perfect_model, corpus, "--json").stdout.splitlines()[-1])
    assert [stage["name"] for stage in summary["stages"]] == ["prepare", "shard", "features", "decode", "score"]
    scores = summary["sets"]["test"]
    assert (scores["words"], scores["sub"], scores["del"], scores["ins"]) == (9, 1, 2, 0)
    assert scores["utterances"] == 5
    assert scores["wer_low"] < scores["wer"] < scores["wer_high"]
    assert scores["speakers"] == 3
    assert scores["wer_speaker_low"] < scores["wer"] < scores["wer_speaker_high"]
    assert summary["model_uri"] is None
    page = Path(summary["report"]).read_text()
    assert f"<td>{perfect_model}</td>" in page
    assert "(-delta)" in page
    again = json.loads(evaluate(perfect_model, corpus, "--json").stdout.splitlines()[-1])
    assert all(stage["cached"] for stage in again["stages"])
    shorter = json.loads(evaluate(perfect_model, corpus, "--json", "--limit", 2).stdout.splitlines()[-1])
    assert shorter["sets"]["test"]["wer"] == 0


def as_table(corpus, header, parts=()):
    """The folder's transcripts as a table with columns of other names, instead of text files."""
    for name in SAID:
        (corpus / f"{name}.txt").unlink()
        (corpus / f"{name}.wav").rename(corpus / f"{name.replace('/', '-')}.wav")
    rows = [(f"{name.replace('/', '-')}.wav", transcript, name[:3]) for name, (_, transcript) in SAID.items()]
    rows = [(*row, part) for row, part in zip(rows, parts, strict=True)] if parts else rows
    with (corpus / "digits.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_table_with_columns_of_other_names_is_scored_like_text_files(perfect_model, corpus, tmp_path, home):
    as_table(corpus, ("filename", "label", "user"))
    shown = evaluate(perfect_model, corpus, "--json")
    assert "digits.csv, audio in the column filename, text in the column label, speaker in the column user" in (
        shown.stderr
    )
    scores = json.loads(shown.stdout.splitlines()[-1])["sets"]["test"]
    assert (scores["words"], scores["sub"], scores["del"], scores["ins"], scores["speakers"]) == (9, 1, 2, 0, 3)
    invoke("init", corpus, "-o", tmp_path / "mine.yaml")
    again = json.loads(evaluate(perfect_model, tmp_path / "mine.yaml", "--json").stdout.splitlines()[-1])
    assert again["sets"]["test"] == scores
    message = evaluate(perfect_model, corpus, "--split", "test", code=1).stderr
    assert "no part of its own that is called 'test'" in message, "a random tenth of it is not its test part"


def test_part_that_a_column_names_is_scored(perfect_model, corpus, home):
    as_table(corpus, ("filename", "label", "user", "part"), ("train", "train", "eval", "eval", "train"))
    scores = json.loads(evaluate(perfect_model, corpus, "--split", "test", "--json").stdout.splitlines()[-1])["sets"]
    assert (scores["test"]["utterances"], scores["test"]["del"]) == (2, 1)
    own = json.loads(evaluate(perfect_model, corpus, "--split", "eval", "--json").stdout.splitlines()[-1])["sets"]
    assert own["eval"]["wer"] == scores["test"]["wer"]
    whole = json.loads(evaluate(perfect_model, corpus, "--json").stdout.splitlines()[-1])["sets"]
    assert whole["test"]["utterances"] == 5
    message = evaluate(perfect_model, corpus, "--split", "dev", code=1).stderr
    assert "there is no set 'dev': the sources have test, train" in message


def test_bundle_digest_depends_on_the_weights(folder, tmp_path):
    before = bundle_digest(folder)
    assert bundle_digest(folder) == before
    for name in ("bundle.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert bundle_digest(tmp_path) != before


def test_flow_uses_the_bundles_decoder_unless_one_is_configured(folder, tmp_path):
    lists = [
        write_arpa(tmp_path / name, {"<s>": (-99, 0), "</s>": (-1, None), "alpha": (-0.5, 0)}, {}) for name in "ab"
    ]
    bundle = tmp_path / "bundle"
    shutil.copytree(folder, bundle)

    def decoder(*given, **fields):
        run = Run(parse_config(tiny_document(**fields)), "r")
        use_model(run, bundle, *given)
        assert (run.bundle, run.config.lm, run.config.tune) == (bundle, None, None)
        return run.config.decode

    assert decoder() == GreedyConfig()
    assert decoder(decode={"kind": "beam", "beam": 3}) == BeamConfig(beam=3)
    with pytest.raises(
        StageError, match=r"needs files that neither .* \(its decoder is greedy\): name them, or remove"
    ):
        decoder(decode="words", lm={})
    add_decoder(bundle, WordsConfig(lm=lists[0], lm_weight=3.0))
    own = own_decoder(bundle)
    assert (own.lm_weight, Path(own.lm).parent) == (3.0, bundle)
    assert decoder() == decoder(decode="greedy") == own
    assert decoder(True, decode="greedy") == GreedyConfig()
    assert decoder(decode="words", lm={}, tune={}) == own, "the bundle has the tuned weights"
    configured = decoder(decode={"kind": "words", "lm_weight": 1.5}, lm={})
    assert (configured.lm_weight, configured.lm) == (1.5, own.lm)
    assert decoder(decode={"kind": "words", "lm": lists[1]}) == WordsConfig(lm=lists[1])
    listed = tmp_path / "words.txt"
    listed.write_text("alpha\n")
    assert decoder(decode={"kind": "words", "words": str(listed)}).lm == "", "no language model is asked for"


def test_evaluation_uses_the_models_configuration(folder, tmp_path):
    sources = [SourceConfig(kind="table", path=str(tmp_path / "a b.csv"))]
    config = evaluation_config(folder, "a b.csv", sources, overrides=["data.max_seconds=7"])
    assert (config.name, config.data.sample_rate, config.data.max_seconds) == ("evaluate-a-b.csv", RATE, 7)
    assert config.features.kind == "logmel"
    assert config.data.sources[0].set == config.score.sets[0] == "test"
    # every utterance counts
    data = config.data
    assert (data.min_seconds, data.silence_db, data.duplicates.fingerprint) == (0, -1000, False)
    named = {name: evaluation_config(folder, name, sources).name for name in ("", ".old (1)")}
    assert named == {"": "evaluate-corpus", ".old (1)": "evaluate-old-1"}
    config = evaluation_config(folder, "a b.csv", sources, "dev")
    assert (config.data.sources[0].set, config.score.sets) == ("", ("dev",))


@pytest.mark.parametrize(
    ("name", "uri"),
    [
        ("demo", "models:/demo@champion"),
        ("demo@challenger", "models:/demo@challenger"),
        ("demo/3", "models:/demo/3"),
        ("models:/demo@x", "models:/demo@x"),
        ("/", "/"),
    ],
)
def test_model_names_are_parsed(name, uri):
    assert model_uri(name) == uri


def test_user_errors_name_remedies(folder, tmp_path, corpus, home):
    assert "is neither a folder nor the name of a model: give NAME" in evaluate("no/such/bundle", corpus, code=1).stderr
    assert "is not a model bundle" in evaluate(tmp_path, corpus, code=1).stderr
    assert "has no recordings" in evaluate(folder, folder, code=1).stderr
    message = evaluate(folder, corpus, "--split", "dev", code=1).stderr
    assert "no part of its own that is called 'dev'" in message


def test_registered_model_scores_like_in_its_run(finished, tmp_path, monkeypatch):
    registry = Path("mlflow", "mlflow.db")
    copy_database(home_folder() / registry, tmp_path / "home" / registry)
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))
    (table,) = (home_folder() / "corpora").glob("synthetic-*/metadata.csv")
    speakers = sorted(finished.result("score").output.read_json("scores.json")["details"]["test"]["speakers"])
    chosen = f"data.sources.0.speakers={json.dumps(speakers)}"
    summary = json.loads(evaluate("tiny", table, "--set", chosen, "--json").stdout.splitlines()[-1])
    assert summary["model"] == "models:/tiny@champion"
    assert summary["sets"]["test"] == finished.result("score").record["sets"]["test"]
