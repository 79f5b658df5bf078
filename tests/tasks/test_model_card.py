"""The model card of a version."""

import json
import re
from dataclasses import replace

import mlflow
import pytest
import yaml

from storage.index import ShardIndex
from tasks.dataset.sources import SourceConfig
from tasks.figures import percent
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.register import REGISTER
from tasks.stages.report import render
from tasks.tracking import model_card
from tasks.tracking.model_card import CARD_LENGTH, card, card_tags, contents, corpora, learners_text, licence_of
from tasks.tracking.runs import client


def source(**fields):
    return SourceConfig(**({"path": "/x"} | fields))


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"kind": "librispeech"}, "CC BY 4.0"),
        ({"kind": "librispeech", "licence": "bought"}, "bought"),
        ({"kind": "fsdd"}, "CC BY-SA 4.0"),
        ({"kind": "table", "corpus": "fsdd"}, "CC BY-SA 4.0"),
        ({"kind": "table"}, "not stated"),
    ],
)
def test_licence_comes_from_configuration_or_catalogue(fields, licence):
    assert licence_of(source(**fields)) == licence
    assert "eSpeak NG" in licence_of(SourceConfig(kind="synthetic"))


def test_each_corpus_is_named_once():
    entries = corpora(
        [source(kind="table", corpus="a"), source(kind="table", corpus="a", set="test"), source(kind="an4")]
    )
    assert [entry["corpus"] for entry in entries] == ["a", "x"]


def test_model_version_has_card_tags_and_description(finished):
    record = finished.result("register").record
    version = client().get_model_version(record["model"], record["version"])
    about = contents(finished)
    assert yaml.safe_load(yaml.safe_dump(about)) == about
    assert card_tags(about).items() <= version.tags.items()
    assert json.loads(version.tags["starling.features"])["num_mels"] == 16
    assert json.loads(version.tags["starling.tests"]) == model_card.tests_of(finished)
    assert {"test.wer", "test.wer_low", "test.wer_high", "starling.commit", "dataset.test"} <= version.tags.keys()
    info = mlflow.models.get_model_info(record["model_uri"])
    carried = info.metadata["starling"]
    assert carried["datasets"]["train"]["utterances"] == 24
    assert carried["decode"]["kind"] == "greedy"
    assert carried["scores"]["test"]["wer"] == finished.result("score").record["sets"]["test"]["wer"]
    text = version.description
    assert re.match(r"WER \d+\.\d\d % on test\. Speech recognition \(en", text)
    assert "- training: single, one learner, 2 epochs, 6 steps on cpu\n" in text
    assert "| test |" in text
    assert "Licence: synthesized here by eSpeak NG" in text
    assert carried["bytes"] == {"weights": finished.result("train").store.size("model/model.safetensors")}
    assert f"- size: weights {carried['bytes']['weights'] / 1e6:,.1f} MB\n" in text
    assert carried["code"]["commit"] in text


def with_records(run, **changes):
    """The run whose stages' records have other parts."""
    results = {
        name: replace(run.result(name), record=run.result(name).record | changes[name]) if name in changes else result
        for name, result in run.results.items()
    }
    return Run(run.config, run.run_id, results=results)


BEGUN = {
    "given": "@champion",
    "model": "models:/telephone/3",
    "digest": "0123456789abcdef" * 4,
    "taken": 12,
    "taken_weights": 34567,
    "rows": {"output.weight": [3, 5]},
    "new": ["ctc.bias"],
    "left_out": ["old.weight"],
    "outputs": {},
}


def test_card_and_report_name_what_training_began_with(finished):
    assert contents(finished)["initial"] is None
    assert "began with" not in card(contents(finished), {})
    run = with_records(finished, train={"initial": BEGUN})
    text = card(contents(run), {})
    line = (
        "models:/telephone/3 (SHA-256 0123456789abcdef): takes 12 tensors (34,567 weights); 3 of 5 rows of "
        "output.weight; new: ctc.bias; left out: old.weight"
    )
    assert f"- began with: {line}\n" in text
    assert line in render(run, b"")
    local = contents(with_records(finished, train={"initial": BEGUN | {"given": "/a/b", "model": "/a/b"}}))
    assert "/a" not in json.dumps(local["initial"])
    assert "- began with: b (SHA" in card(local, {})


def test_card_has_the_error_rate_of_each_corpus_of_a_mixed_set(finished):
    assert contents(finished)["corpus_scores"] == {}
    counts = {"new": {"wer": 0.25, "ref_words": 4}, "": {"wer": 0.5, "ref_words": 1200}}
    run = with_records(finished, score={"groups": {"test": {"corpora": counts}}})
    text = card(contents(run), {})
    assert text.index("| test, unnamed | 50.00 % | | | | 1,200 |") < text.index("| test, new | 25.00 % | | | | 4 |")


def test_card_has_intervals_over_speakers_and_says_whether_voices_are_new(finished):
    scores = finished.result("score").record["sets"]["test"]
    text = card(contents(finished), {})
    over = [f"{percent(scores[f'{name}_low'])} – {percent(scores[f'{name}_high'])}" for name in ("wer", "wer_speaker")]
    assert f"| test | {percent(scores['wer'])} | {over[0]} | {over[1]} | 2, new | {scores['words']} |" in text
    alone = with_records(
        finished, score={"sets": {"test": scores | dict.fromkeys(("wer_speaker_low", "wer_speaker_high"))}}
    )
    assert f"| {over[0]} | – | 2, new |" in card(contents(alone), {})


@pytest.mark.parametrize(
    ("test", "shared", "said"),
    [
        ({"speakers": 3}, 0, "3, new"),
        ({"speakers": 3}, 1, "3, 1 of them trained on"),
        ({"speakers": 3}, 3, "3, trained on"),
        ({"speakers": 3, "unnamed": 4}, 0, "3 or more, new or unknown"),
        ({"speakers": 0, "unnamed": 4}, 0, "unknown"),
    ],
)
def test_voices_of_a_test_set_are_new_trained_on_or_unknown(finished, test, shared, said):
    prepared = finished.result("prepare").record
    sets = prepared["sets"] | {"test": prepared["sets"]["test"] | test}
    shared_speakers = {"test": {"speakers": shared, "utterances": 1, "names": []}} if shared else {}
    run = with_records(finished, prepare={"sets": sets, "shared_speakers": shared_speakers})
    assert model_card.voices(run) == {"test": said}


def test_card_is_shortened_to_fit_a_description(finished):
    about = contents(finished)
    about["corpora"] *= 200
    text = card(about, {"flow run": "http://127.0.0.1/flow"})
    assert len(text) <= CARD_LENGTH
    assert card(contents(finished), {"flow run": "http://x/y"}).endswith("[flow run](http://x/y)")


def test_a_card_names_the_objective_and_a_language_model_of_any_kind(finished):
    about = contents(finished)
    assert "A conformer trained with ctc, " in card(about, {})
    about["language_model"] = {"words": 1200, "ngrams": [1200, 3000]}
    assert "decoding: greedy, 2-gram of 1,200 words" in card(about, {})
    about["language_model"]["ngrams"] = None
    assert "decoding: greedy, language model of 1,200 words" in card(about, {})
    about["language_model"]["words"] = 1
    assert "decoding: greedy, language model of 1 word\n" in card(about, {})


def test_numbers_of_learners_are_in_plain_words():
    assert learners_text(1, 1) == "one learner"
    assert learners_text(1, 4) == "1 node of 4 learners"
    assert learners_text(3, 1) == "3 nodes of 1 learner"


def test_digest_of_test_sets_ignores_how_they_are_sharded(finished, monkeypatch):
    before = model_card.tests_of(finished)
    original = ShardIndex.column

    def changed(self, name):
        columns = original(self, name)
        return ["other", *list(columns)[1:]] if name == "text" else columns

    monkeypatch.setattr(ShardIndex, "column", changed)
    assert model_card.tests_of(finished).keys() == before.keys()
    assert model_card.tests_of(finished) != before


def with_changes(run, **changes):
    """The run with another configuration of its first source, or of its registration."""
    config = run.config
    if "licence" in changes:
        sources = tuple(s.model_copy(update=changes) for s in config.data.sources)
        config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    else:
        config = config.model_copy(update={"register_as": config.register_as.model_copy(update=changes)})
    return Run(config, run.run_id, results=run.results)


def test_licence_and_promotion_mode_do_not_change_keys(finished):
    assert PREPARE.output(with_changes(finished, licence="bought")).key == finished.result("prepare").key
    assert REGISTER.output(with_changes(finished, promote="manual")).key == finished.result("register").key
