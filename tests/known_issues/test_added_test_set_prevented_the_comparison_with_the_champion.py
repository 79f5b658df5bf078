"""A challenger that was scored on the frozen test sets and on one of new recordings was not compared with the champion.

It was refused as if it had not been scored on the frozen ones, so new speech could only be tested by replacing them.
"""

import json
from types import SimpleNamespace

import pytest
from support import tiny_document

from speech.decoding import GreedyConfig
from tasks.config.pipeline import parse_config
from tasks.tracking import significance
from tasks.tracking.significance import PromotionOptions, SetErrors, promotion_decision

CHAMPION = SimpleNamespace(name="m", version="7", tags={})
CHALLENGER = SimpleNamespace(name="m", version="8", tags={})
SAME, BETTER = SetErrors([1] * 40, [5] * 40), SetErrors([0] * 40, [5] * 40)


@pytest.fixture
def decision_on(monkeypatch, tmp_path):
    """Decides about a challenger with these errors on the sets `test`, which is frozen, and `new`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bundle.json").touch()
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", lambda **_: str(tmp_path))
    monkeypatch.setattr(significance, "own_decoder", lambda folder: GreedyConfig())
    monkeypatch.setattr(significance, "frozen_tests", lambda api, name: json.dumps({"test": "a"}))
    monkeypatch.setattr(significance, "tests_tag", lambda run: json.dumps({"test": "a", "new": "b"}))
    run = SimpleNamespace(config=parse_config(tiny_document()), results={})

    def decide(*, test, new, **options):
        def errors(run, champion):
            return {"test": test, "new": new} if champion is None else {"test": SAME, "new": SAME}

        monkeypatch.setattr(significance, "count_errors", errors)
        return promotion_decision(None, run, CHALLENGER, CHAMPION, PromotionOptions(**options))

    return decide


def test_frozen_set_decides_and_the_added_one_is_reported(decision_on):
    decision = decision_on(test=BETTER, new=SAME)
    assert decision.promoted
    assert decision.challenger_wer == 0
    assert decision.reason.startswith("WER 0.00 % beats version 7's 20.00 %")
    assert decision.reason.endswith(". Not frozen, so without effect: new 20.00 % instead of 20.00 %")
    assert decision.added == ["new"]
    assert decision.sets["new"] == {"words": 200, "challenger_wer": 0.2, "champion_wer": 0.2}


def test_added_set_alone_makes_no_champion(decision_on):
    decision = decision_on(test=SAME, new=BETTER)
    assert not decision.promoted
    assert decision.reason.endswith("new 0.00 % instead of 20.00 %")
    assert decision.changed == {"better": 0, "worse": 0}


def test_both_count_if_the_user_freezes_both(decision_on):
    decision = decision_on(test=SAME, new=BETTER, new_tests=True)
    assert decision.promoted
    assert decision.challenger_wer == 0.1
    assert decision.added == []
