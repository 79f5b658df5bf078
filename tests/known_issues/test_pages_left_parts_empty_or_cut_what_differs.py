"""Pages had empty tables and descriptions, and lists cut descriptions before what differs: seen in a browser."""

import json
import re

import pytest
from support import ROOT

from tasks.dataset.duplicates import doubles_text
from tasks.dataset.policies import DuplicatesConfig
from tasks.figures import percent
from tasks.stages.base import get_stage
from tasks.stages.report import render
from tasks.tracking.model_card import card, contents
from tasks.tracking.plots import learning_curves
from tasks.tracking.runs import NOTE_TAG, client


def test_model_card_begins_with_the_error_rate(finished):
    about = contents(finished)
    wer = percent(finished.result("score").record["sets"]["test"]["wer"])
    assert card(about, {}).startswith(f"WER {wer} on test. Speech recognition (en): audio in, text out.")


def test_registered_model_has_a_description(finished):
    record = finished.result("register").record
    text = client().get_registered_model(record["model"]).description
    assert text.startswith("Speech recognition (en), trained on ")
    assert f"`models:/{record['model']}@champion`" in text


def test_description_of_an_experiment_begins_with_words(finished):
    experiment = client().get_experiment_by_name("tiny")
    assert experiment.tags[NOTE_TAG].startswith("Trainings and their error rates: [")


@pytest.mark.parametrize("stage", ["prepare", "shard", "features", "train", "decode", "score", "register", "report"])
def test_every_artifact_has_a_description(finished, stage):
    assert all(artifact.description for artifact in get_stage(stage).artifacts(finished, finished.result(stage)))


def test_report_has_no_table_without_rows(finished, monkeypatch):
    output = finished.result("score").output
    scores = output.read_json("scores.json")
    scores["details"]["test"]["confusions"] |= {"insertions": [], "deletions": [{"ref": "seven", "count": 2}]}
    monkeypatch.setattr(type(output), "read_json", lambda *_: json.loads(json.dumps(scores)))
    page = render(finished, b"")
    assert "<th>deleted</th>" in page
    assert "<th>inserted</th>" not in page


def test_epochs_of_curves_are_whole_numbers(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    axes = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: axes.extend(figure.axes))
    valid = [{"kind": "valid", "epoch": 5.0 * n, "loss": 1.0, "wer": 0.5} for n in range(1, 4)]
    steps = [{"kind": "step", "epoch": n / 2, "loss": 1.0, "lr": 0.1, "throughput": 1.0} for n in range(1, 30)]
    learning_curves([*steps, *valid], tmp_path / "curves.png")
    assert axes
    assert all(float(tick).is_integer() for axis in axes for tick in axis.get_xticks())


def test_utterances_counted_before_are_not_said_to_be_all():
    counts = {"same-text overlap": 640, "same-text within": 129}
    assert doubles_text(counts, DuplicatesConfig())[-1].startswith("129 more utterances have the words and the speaker")
    assert doubles_text({"same-text within": 129}, DuplicatesConfig())[-1].startswith("129 utterances have")


def test_page_of_the_server_takes_several_files():
    page = (ROOT / "recognition" / "serving" / "page.html").read_text()
    assert re.search(r'<input type="file"[^>]* multiple', page)
