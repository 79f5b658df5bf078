"""What is said while a model has learned nothing yet, and where a pattern of parameters matches none."""

import re
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from support import give_mlflow, tiny_document

from tasks.config.pipeline import parse_config
from tasks.figures import LEARN_MORE
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.initial import initial_model
from tasks.tracking import significance
from tasks.tracking.runs import client
from tasks.tracking.significance import Decision, PromotionOptions, promotion_decision
from training.config import TrainConfig
from training.learner.trained import trained_network

UNTRAINED = f"stays challenger: it has learned nothing yet. {LEARN_MORE}. `starling promote tiny --force`"


def test_nights_after_the_first_begin_with_random_weights_while_there_is_no_champion(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    give_mlflow(tmp_path)
    api = client()
    api.create_registered_model("tiny")
    api.create_model_version("tiny", source="models", run_id=None)
    document = tiny_document()
    document["train"]["init"] = "@champion"
    lines = []
    with progress.following(lambda name, text: lines.append(text)):
        assert initial_model(Run(parse_config(document), "second")) is None
    assert lines == ["tiny has no champion yet: training begins with random weights"]


def test_forced_decision_has_no_remedy_behind_it(monkeypatch):
    monkeypatch.setattr(significance, "frozen_tests", lambda api, name: "")
    monkeypatch.setattr(significance, "refusal", lambda own, frozen: "")
    monkeypatch.setattr(significance, "lm_refusal", lambda run: "")
    monkeypatch.setattr(significance, "tests_tag", lambda run: "{}")
    monkeypatch.setattr(significance, "decide", lambda run, champion, added: Decision(False, UNTRAINED))
    version = SimpleNamespace(name="tiny", version="1", tags={})
    found = promotion_decision(None, None, version, None, PromotionOptions(force=True, reason="a trial. Only that"))
    assert found.reason == "forced: a trial. Only that (stays challenger: it has learned nothing yet)"


@pytest.mark.parametrize("kind", ["conformer", "whisper"])
def test_pattern_that_matches_no_parameter_is_answered_with_patterns_that_match_all(tones, kind):
    torch.manual_seed(1)
    network = tones.TINY[kind].build(16, 7)
    config = TrainConfig.model_validate({"freeze": [{"names": ["nothing.*"]}]})
    with pytest.raises(ValueError, match="matches no parameter; there are ") as error:
        trained_network(network, config)
    patterns = re.split(", ", str(error.value).partition("there are ")[2])
    assert {"layers.*", "output.*"} <= set(patterns)
    names = [name for name, _ in network.named_parameters()]
    assert [name for name in names if not any(fnmatchcase(name, one) for one in patterns)] == []
