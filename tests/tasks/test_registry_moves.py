"""Promotions and rollbacks on a real registry."""

import json
from types import SimpleNamespace

import mlflow
import pytest
from registered import RUN, TESTS, add, champion, comparison_gives, former_champions

from tasks.tracking import promotion
from tasks.tracking.promotion import load_run, promote_version, settle
from tasks.tracking.registry import (
    COMPARED_TAG,
    DECISION_TAG,
    PREVIOUS,
    ROLLED_BACK_TAG,
    SINCE_TAG,
    RegistryError,
    champion_version,
    frozen_tests,
    history,
    make_champion,
    rollback,
    version_of,
    waiting_challenger,
)
from tasks.tracking.runs import client
from tasks.tracking.significance import Decision, PromotionOptions, refusal


def test_challenger_waits_until_compared_with_current_champion(api, monkeypatch):
    assert waiting_challenger(api, "m") is None
    add(api)
    assert waiting_challenger(api, "m").version == 1
    settle(api, RUN, "m", "1")
    assert waiting_challenger(api, "m") is None  # it is the champion
    add(api)
    assert waiting_challenger(api, "m").version == 2
    comparison_gives(monkeypatch, False)
    assert not settle(api, RUN, "m", "2").promoted
    assert waiting_challenger(api, "m") is None  # compared, and not better
    api.set_model_version_tag("m", "2", COMPARED_TAG, "another champion " + TESTS)
    assert waiting_challenger(api, "m").version == 2  # the champion has changed by now


def test_the_decision_and_its_numbers_are_tags_and_an_artifact(api, monkeypatch):
    former_champions(api, 1)
    add(api)
    comparison_gives(monkeypatch, False, sets={"test": {"words": 10, "challenger_wer": 0.1, "champion_wer": 0.2}})
    settle(api, RUN, "m", "2")
    version = api.get_model_version("m", "2")
    assert version.tags[DECISION_TAG] == "loses"
    numbers = {name: float(version.tags[f"promotion.{name}"]) for name in ("champion_wer", "challenger_wer", "p_value")}
    assert numbers == {"champion_wer": 0.2, "challenger_wer": 0.1, "p_value": 0.01}
    note = mlflow.artifacts.load_dict(f"runs:/{version.run_id}/promotion.json")
    assert (note["promoted"], note["champion"], note["version"]) == (False, "1", "2")
    assert note["sets"]["test"]["words"] == 10
    assert note["tests"] == {"test": "aaaa"}
    assert note["by"]
    assert note["at"]
    run = api.get_run(version.run_id)
    assert run.data.tags["promotion.p_value"] == "0.01"


def test_comparison_is_repeated_if_the_champion_changes(api, monkeypatch):
    former_champions(api, 1)
    add(api, count=2)
    seen = []

    def decide(run, champion, added):
        seen.append(str(champion.version))
        if len(seen) == 1:  # another machine
            api.set_registered_model_alias("m", "champion", "2")
        return Decision(True, "beats", str(champion.version))

    monkeypatch.setattr("tasks.tracking.significance.decide", decide)
    settle(api, RUN, "m", "3")
    assert seen == ["1", "2"]
    assert champion(api) == "3"
    assert version_of(api, "m", PREVIOUS).version == 2

    def restless(run, champion, added):
        api.set_registered_model_alias("m", "champion", "1" if str(champion.version) == "2" else "2")
        return Decision(True, "beats", str(champion.version))

    monkeypatch.setattr("tasks.tracking.significance.decide", restless)
    add(api)
    with pytest.raises(RegistryError, match="changed 3 times"):
        settle(api, RUN, "m", "4")
    assert champion(api) in ("1", "2")


def test_first_comparison_freezes_the_test_sets(api, monkeypatch):
    add(api, count=2)
    make_champion(api, "m", "1", None)  # by a forced promotion: there was no comparison
    assert frozen_tests(api, "m") == ""
    comparison_gives(monkeypatch, False, p_value=None)
    settle(api, RUN, "m", "2")
    assert frozen_tests(api, "m") == ""  # nothing was compared
    comparison_gives(monkeypatch, False)
    assert not settle(api, RUN, "m", "2").promoted
    assert frozen_tests(api, "m") == TESTS


def test_events_are_sent_for_promotions_and_rollbacks_only(api, monkeypatch):
    told = []
    for module in ("promotion", "registry"):
        monkeypatch.setattr(f"tasks.tracking.{module}.emit", lambda *given: told.append(given))
    former_champions(api, 2)
    add(api)
    comparison_gives(monkeypatch, False)
    settle(api, RUN, "m", "3")
    settle(api, RUN, "m", "2")
    assert told == [
        ("starling.promoted", "m", {"version": "1", "from": "", "reason": "became champion: there was none before"}),
        ("starling.promoted", "m", {"version": "2", "from": "1", "reason": "beats"}),
    ]
    move = rollback("m", reason="numbers")
    assert told[2:] == [("starling.rolled-back", "m", {"version": "1", "from": "2", "reason": "numbers"})]
    assert move.reason == "rolled back from version 2: numbers"
    assert api.get_model_version("m", "1").tags[DECISION_TAG] == move.reason


def test_decision_names_its_flow_run(api):
    add(api)
    settle(api, SimpleNamespace(run_id="a-run", flow_run_url="http://ui/1", config=RUN.config), "m", "1")
    assert api.get_model_version("m", "1").tags["promotion.flow_run"] == "http://ui/1"
    former_champions(api, 1)
    assert "promotion.flow_run" not in api.get_model_version("m", "2").tags
    note = mlflow.artifacts.load_dict(f"runs:/{api.get_model_version('m', '1').run_id}/promotion.json")
    assert (note["flow_run"], note["champion"]) == ("http://ui/1", "")


def test_rollbacks_step_back_or_go_to_a_given_version(api):
    former_champions(api, 3)
    assert version_of(api, "m", PREVIOUS).version == 2
    move = rollback("m", reason="numbers are misheard")
    assert (move.champion, move.replaced) == ("2", "3")
    assert "numbers are misheard" in api.get_model_version("m", "3").tags[ROLLED_BACK_TAG]
    assert version_of(api, "m", PREVIOUS).version == 1
    assert rollback("m").champion == "1"
    assert version_of(api, "m", PREVIOUS) is None
    with pytest.raises(RegistryError, match="replaced no champion: name a former one with --to: 3, 2$"):
        rollback("m")
    assert rollback("m", to="3").champion == "3"
    assert ROLLED_BACK_TAG not in api.get_model_version("m", "3").tags
    told = {entry["version"]: entry for entry in history(api, "m")}
    assert told["3"]["aliases"] == ["challenger", "champion"]
    assert told["1"]["rolled_back"]
    assert list(told) == ["3", "2", "1"]


def test_missing_alias_of_a_killed_promotion_is_restored(api):
    former_champions(api, 2)
    api.delete_registered_model_alias("m", PREVIOUS)
    assert settle(api, RUN, "m", "2").reason == "it is already the champion"
    assert version_of(api, "m", PREVIOUS).version == 1


def test_rolled_back_version_is_promoted_only_by_number(api):
    former_champions(api, 2)
    rollback("m")
    assert waiting_challenger(api, "m") is None
    decision = settle(api, RUN, "m", "2")
    assert not decision.promoted
    assert "it was rolled back" in decision.reason
    assert settle(api, RUN, "m", "2", PromotionOptions(named=True)).promoted
    assert champion(api) == "2"


def test_rolled_back_version_is_not_compared_automatically(api):
    """Version 3 was compared with version 2, but not with version 1."""
    former_champions(api, 3)
    rollback("m", to="1")
    assert version_of(api, "m", "challenger").version == 3
    assert waiting_challenger(api, "m") is None
    assert settle(api, RUN, "m", "3", PromotionOptions(named=True)).promoted
    assert ROLLED_BACK_TAG not in api.get_model_version("m", "3").tags
    settle(api, RUN, "m", add(api)[0])
    api.set_registered_model_alias("m", "challenger", "3")
    assert waiting_challenger(api, "m").version == 3  # it is an ordinary version again


def test_champion_does_not_become_its_own_predecessor(api):
    former_champions(api, 2)
    since = api.get_model_version("m", "2").tags[SINCE_TAG]
    api.set_model_version_tag("m", "2", SINCE_TAG, "long ago")
    make_champion(api, "m", "2", champion_version(api, "m"), "[]")
    assert since != "long ago" == api.get_model_version("m", "2").tags[SINCE_TAG]
    assert version_of(api, "m", PREVIOUS).version == 1
    assert rollback("m").champion == "1"


def test_impossible_rollback_names_the_remedy(api):
    former_champions(api, 2)
    add(api)
    cases = [("9", "has no version 9"), ("2", "is already the champion"), ("3", "has never been champion")]
    for to, message in cases:
        with pytest.raises(RegistryError, match=message):
            rollback("m", to=to)
    assert champion(api) == "2"
    with pytest.raises(RegistryError, match="the registry has no model 'nobody'; it has: m"):
        rollback("nobody")
    add(api, "new")
    with pytest.raises(RegistryError, match="new has no champion"):
        rollback("new")


def test_changed_test_sets_are_refused_unless_accepted(api, monkeypatch):
    former_champions(api, 1)
    assert frozen_tests(api, "m") == TESTS
    other = json.dumps({"test": "bbbb", "more": "cccc"})
    monkeypatch.setattr(promotion, "tests_tag", lambda run: other)
    monkeypatch.setattr("tasks.tracking.significance.tests_tag", lambda run: other)
    add(api)
    decision = settle(api, RUN, "m", "2")
    assert not decision.promoted
    assert "(more, test differ)" in decision.reason
    assert champion(api) == "1"
    assert settle(api, RUN, "m", "2", PromotionOptions(new_tests=True)).promoted
    assert frozen_tests(api, "m") == other
    assert refusal(other, other) == refusal(other, "") == ""


def test_force_needs_a_reason_and_promotes_without_comparison(api, monkeypatch):
    former_champions(api, 1)
    add(api)
    with pytest.raises(RegistryError, match="--reason TEXT"):
        promote_version("m", options=PromotionOptions(force=True))
    with pytest.raises(RegistryError, match="cannot be read"):
        promote_version("m")
    promoted = promote_version("m", options=PromotionOptions(force=True, reason="the champion was withdrawn"))
    assert promoted["promoted"]
    assert promoted["reason"].startswith("forced: the champion was withdrawn (")
    assert champion(api) == "2"
    assert api.get_model_version("m", "2").tags["promotion.forced"] == "true"
    add(api)
    comparison_gives(monkeypatch, False)
    decision = settle(api, RUN, "m", "3", PromotionOptions(force=True, reason="it is smaller"))
    assert (decision.promoted, decision.forced, decision.p_value) == (True, True, 0.01)
    assert rollback("m").champion == "2"


def test_missing_challenger_or_version_is_an_error(api):
    with pytest.raises(RegistryError, match="the registry has no model 'nobody'; it has: none"):
        promote_version("nobody")
    add(api, count=2)
    for version in ("", "7"):
        with pytest.raises(RegistryError, match="the registry has no model 'nobody'; it has: m"):
            promote_version("nobody", version)
    with pytest.raises(RegistryError, match=r"m has no version 7 in this registry; it has: 2 \(@challenger\), 1"):
        promote_version("m", "7")
    api.delete_registered_model_alias("m", "challenger")
    with pytest.raises(RegistryError, match=r"m has no challenger .* --version N; it has: 2, 1"):
        promote_version("m")


def test_run_is_restored_from_its_version_with_its_outputs(finished):
    record = finished.result("register").record
    restored = load_run(client().get_model_version(record["model"], record["version"]))
    assert restored.run_id == finished.run_id
    wanted = finished.config.model_copy(update={"storage": restored.config.storage})
    assert restored.config.model_dump() == wanted.model_dump()
    for name in ("prepare", "shard", "features", "train", "decode", "score"):
        assert restored.result(name).key == finished.result(name).key
        assert restored.result(name).record == finished.result(name).record
    again = promote_version(record["model"])
    assert (again["promoted"], again["reason"]) == (True, "it is already the champion")


def test_missing_outputs_are_named(finished, monkeypatch):
    record = finished.result("register").record
    version = client().get_model_version(record["model"], record["version"])
    monkeypatch.setattr(promotion, "_store_of", lambda *_: None)
    with pytest.raises(RegistryError, match="are not in .*run its configuration again"):
        load_run(version)
