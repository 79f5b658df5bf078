"""The stage restore: what a model writes gives transcripts their form, and training learns to write it."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from support import load_beside

from speech.hypotheses import Hypothesis
from speech.text import TextNormalizer
from storage.intact import DamagedObjectError
from storage.objects import ObjectStore
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table, write_table
from tasks.stages import restore
from tasks.stages.base import Run, StageError
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.restore import RESTORE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_job

pytest.importorskip("transformers", reason="the package transformers is missing")
attention = load_beside(__file__, "test_attention_pretrained.py")
folder = attention.folder


def document_of(folder, **network):
    document = attention.document_of(folder, **network)
    document["restore"] = {}
    return document


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """A run up to the features."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    made = Run(parse_config(document_of(folder)), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(made)
    return made


@pytest.fixture
def writer(monkeypatch):
    """In place of the model: it writes each transcript in capitals behind a comma, and counts utterances."""
    heard = []
    true_encode_set = restore.encode_set

    def opened(model, device):
        spec = restore.Recognizer.load(model_folder(model)).spec
        return SimpleNamespace(spec=spec, cfg=spec.decode, adapter=None, encode=lambda *given: None, search=None)

    def model_folder(model):
        return ObjectStore(model).local_path("model/bundle.json").parent

    def encode_set(recognizer, dataset, rows, on_damage=None):
        for part, _ in true_encode_set(recognizer, dataset, rows, on_damage=on_damage):
            heard.extend(part.ids)
            hypotheses = [Hypothesis(text=", ".join(text.upper().split()) + "!") for text in part.texts]
            recognizer.search = lambda encoded, hypotheses=hypotheses: hypotheses
            yield part, None

    monkeypatch.setattr(restore, "_opened", opened)
    monkeypatch.setattr(restore, "encode_set", encode_set)
    return heard


def texts_of(run, name):
    return read_table(run.result("restore").store, f"{name}.parquet")


def test_model_that_cannot_write_yet_makes_sentences_of_transcripts(run):
    RESTORE.execute(run)
    record = RESTORE.record(run)
    assert record["counts"]["restored"] + record["counts"]["as they were"] == 28
    assert not run.result("restore").store.list("work")
    for name in ("train", "valid"):
        rows = texts_of(run, name)
        assert len(rows) == {"train": 24, "valid": 4}[name]
        assert all(row["text"][0].isupper() for row in rows)
        assert RESTORE.record(run)["sets"][name]["restored"] == len(rows)
    assert RESTORE.output(run).record(), "cached"


def test_address_depends_on_the_limit_of_errors_and_not_on_the_models_place(run, folder, tmp_path):
    def key(changed_folder=folder, **fields):
        document = document_of(changed_folder) | {"restore": fields}
        return RESTORE.output(Run(parse_config(document), "r", results=dict(run.results))).key

    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert key() == key(most_errors=0.5) == key(copy)
    assert key(most_errors=0.4) != key()
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(generation | {"suppress_tokens": [4]}))
    assert key(copy) != key()


def test_training_learns_the_form_and_validation_scores_the_words(run, writer, tmp_path):
    RESTORE.execute(run)
    assert len(writer) == len(set(writer)) == 28
    assert TRAIN.inputs(run)[1]["texts"] == run.result("restore").key
    task = make_job(run, TRAIN.output(run)).task
    written = {row["id"]: row["text"] for name in ("train", "valid") for row in texts_of(run, name)}
    for name in ("train", "valid"):
        dataset = task.open_set(name, tmp_path / "cache", None, lambda total: None)
        batch = dataset.batch(np.arange(len(dataset)))
        tokenizer = task.spec.build_tokenizer()
        for utterance, text, tokens, count in zip(
            batch.ids, batch.texts, batch.tokens, batch.token_lengths, strict=True
        ):
            assert written[utterance] == ", ".join(text.upper().split()) + "!"
            assert tokenizer.decode(tokens[:count].tolist()) == written[utterance]
            assert TextNormalizer().normalize(written[utterance]) == text


def test_pieces_that_are_done_are_not_repeated(run, writer, monkeypatch):
    true, calls = restore.restore_piece, []

    def killed_at_the_second(piece):
        calls.append(piece["name"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return true(piece)

    monkeypatch.setattr(restore, "map_pieces", lambda runner, name, pieces, what: map(killed_at_the_second, pieces))
    with pytest.raises(KeyboardInterrupt):
        RESTORE.execute(run)
    first = list(writer)
    assert first
    monkeypatch.setattr(restore, "map_pieces", lambda runner, name, pieces, what: map(true, pieces))
    RESTORE.execute(run)
    assert len(writer) == len(set(writer)) == 28, "each utterance once, in both attempts together"


def test_texts_of_another_set_are_refused(run, writer, tmp_path):
    RESTORE.execute(run)
    task = make_job(run, TRAIN.output(run)).task
    rows = texts_of(run, "train")[1:]
    write_table(run.result("restore").store, "train.parquet", rows, restore.SCHEMA)
    with pytest.raises(DamagedObjectError, match="it has 23 texts of 24 utterances"):
        task.open_set("train", tmp_path / "cache", None, lambda total: None)


def test_model_that_training_begins_with_must_be_able_to_write(run, folder, tmp_path):
    document = document_of(folder)
    document["train"]["init_tokens"] = "data"
    other = Run(parse_config(document), "r", results=dict(run.results))
    with pytest.raises(StageError, match=r"restore needs a model that can already write, but \d+ of its tensors"):
        RESTORE.execute(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recognizer": {"kind": "attention", "ctc": False}}, "restore gives .* which only Whisper's"),
        ({"epochs": 0}, "restore makes texts to train on, and train.epochs is 0"),
        ({"restore": {"most_errors": 2}}, "most_errors"),
    ],
)
def test_configurations_without_use_for_it_are_refused(folder, changes, message):
    document = document_of(folder)
    if "epochs" in changes:
        document["train"]["epochs"] = changes.pop("epochs")
    with pytest.raises(ConfigError, match=message):
        parse_config(json.loads(json.dumps(document | changes)))
