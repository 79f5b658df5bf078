"""Promotion decisions: paired comparison with the configured significance, on the frozen test sets."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from support import tiny_document

from recognition.inference import Decoded
from speech.decoding import GreedyConfig
from speech.scoring import score_sets
from tasks.config.pipeline import parse_config
from tasks.tracking import significance
from tasks.tracking.registry import ROLLED_BACK_TAG
from tasks.tracking.significance import Decision, PromotionOptions, SetErrors, count_errors, decide, promotion_decision

CHAMPION = SimpleNamespace(name="m", version="7", tags={})


def a_run(significance=0.05, **results):
    config = parse_config(tiny_document(register={"significance": significance}))
    run = SimpleNamespace(config=config, results=results)
    run.result = lambda name: run.results[name]
    return run


def stage(**record):
    return SimpleNamespace(record=record, output=None)


@pytest.fixture
def errors(monkeypatch, tmp_path):
    """Errors of challenger and champion by test set, each of as many words; no model is loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bundle.json").touch()
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", lambda **_: str(tmp_path))
    monkeypatch.setattr(significance, "own_decoder", lambda folder: GreedyConfig())
    counts = {}
    monkeypatch.setattr(
        significance, "count_errors", lambda run, champion: counts["own" if champion is None else "theirs"]
    )
    return counts


def test_both_error_rates_are_reported_overall_and_by_set(errors):
    errors["own"] = {"a": SetErrors([1] * 30, [10] * 30), "b": SetErrors([2] * 10, [5] * 10)}
    errors["theirs"] = {"a": SetErrors([4] * 30, [10] * 30), "b": SetErrors([3] * 10, [5] * 10)}
    decision = decide(a_run(), CHAMPION)
    assert (decision.promoted, decision.champion) == (True, "7")
    assert decision.challenger_wer == pytest.approx(50 / 350)
    assert decision.champion_wer == pytest.approx(150 / 350)
    assert decision.sets == {
        "a": {"words": 300, "challenger_wer": 0.1, "champion_wer": 0.4},
        "b": {"words": 50, "challenger_wer": 0.4, "champion_wer": 0.6},
    }
    assert decision.reason.startswith("WER 14.29 % beats version 7's 42.86 % (p < 0.001)")
    assert decision.numbers()["promotion.challenger_wer"] == str(50 / 350)
    errors["own"], errors["theirs"] = errors["theirs"], errors["own"]
    assert "is beaten by version 7's 14.29 %" in decide(a_run(), CHAMPION).reason


def test_significance_level_comes_from_the_configuration(errors):
    """The challenger is better on eight utterances of twelve and worse on none: p is about 0.003."""
    errors["own"] = {"a": SetErrors([1] * 4 + [0] * 8, [5] * 12)}
    errors["theirs"] = {"a": SetErrors([1] * 12, [5] * 12)}
    decisions = [decide(a_run(level), CHAMPION) for level in (1e-9, 0.5)]
    assert 1e-9 < decisions[0].p_value == decisions[1].p_value < 0.05
    assert [decision.promoted for decision in decisions] == [False, True]


def test_most_changed_utterances_are_kept_with_both_hypotheses(errors):
    def scored(*pairs):
        report = score_sets([(f"u{n}", ref, hyp, "", "") for n, (ref, hyp) in enumerate(pairs)])
        return {"a": SetErrors(report.errors().tolist(), report.words().tolist(), tuple(report.utterances))}

    errors["own"] = scored(("a b", "a b"), ("a b c", "a b c"), ("d", "e"), ("f", "f"))
    errors["theirs"] = scored(("a b", "a"), ("a b c", ""), ("d", "d"), ("f", "f"))
    decision = decide(a_run(), CHAMPION)
    assert decision.changed == {"better": 2, "worse": 1}
    assert [change["id"] for change in decision.changes] == ["u1", "u0", "u2"]
    assert decision.changes[0] == {
        **{"set": "a", "id": "u1", "ref": "a b c", "champion": "", "challenger": "a b c"},
        **{"champion_errors": 3, "challenger_errors": 0},
    }


def test_set_without_words_is_accepted(errors):
    errors["own"] = errors["theirs"] = {"a": SetErrors([0, 0], [0, 0]), "b": SetErrors([1, 0, 2], [4, 5, 1])}
    decision = decide(a_run(), CHAMPION)
    assert (decision.promoted, decision.champion_wer) == (False, 0.3)
    assert decision.sets["a"] == {"words": 0, "challenger_wer": 0.0, "champion_wer": 0.0}


ROWS = [("u1", "yes sir", "yes sir"), ("u2", "no", "yes"), ("u3", "one two three", "one")]


def decoded(number, order=(0, 1, 2)):
    """Utterances as a model recognizes them; with a number, all right but that one."""
    names = {field.name for field in dataclasses.fields(Decoded)}
    rows = []
    for at in order:
        name, ref, hyp = ROWS[at]
        row = dict.fromkeys(names, "") | {"id": name, "ref": ref, "hyp": hyp if number in (None, at) else ref}
        rows.append(row)
    return rows


@pytest.fixture
def models(monkeypatch, tmp_path):
    """This run's model and the champion recognize the same utterances, in another order."""
    site = SimpleNamespace(own=decoded(None), theirs=decoded(1, (2, 0, 1)), asked=[])

    def decode_with(run, champion, name, decode, own, on_progress, on_damage):
        site.asked.append((champion, name, decode, own))
        return [Decoded(**row) for row in site.theirs]

    monkeypatch.setattr(significance, "decode_with", decode_with)
    monkeypatch.setattr(significance, "own_decoder", lambda champion: f"of {champion}")
    monkeypatch.setattr(significance, "read_table", lambda output, name: site.own if name == "test.parquet" else [])
    monkeypatch.setattr(significance, "scored_sets", lambda run: ["test"])
    return site


def test_models_are_compared_by_utterance_in_any_order(models):
    run = a_run(decode=stage())
    assert {name: counts[:2] for name, counts in count_errors(run, None).items()} == {"test": ([0, 1, 2], [2, 1, 3])}
    theirs = count_errors(run, "champion")["test"]
    assert theirs[:2] == ([0, 1, 0], [2, 1, 3])
    assert [utterance.id for utterance in theirs.utterances] == sorted(row["id"] for row in models.own)
    assert models.asked == [("champion", "test", "of champion", False)]  # with the champion's decoder


@pytest.mark.parametrize("damaged", ["features", "decode"])
def test_unreadable_utterances_count_for_neither_model(models, damaged):
    del models.own[1]
    results = {name: stage() for name in ("features", "decode")}
    results[damaged] = stage(quarantined_shards=[{"shard": "shard-000001.tar"}])
    assert count_errors(a_run(**results), "champion")["test"][:2] == ([0, 0], [2, 3])


@pytest.fixture
def decision_setup(monkeypatch):
    """Decides without a registry: frozen test sets, those of the run, and the comparison's result are given."""
    site = SimpleNamespace(frozen='{"test": "a"}', own='{"test": "a"}', won=False, compared=0)

    def compare(run, champion, added):
        site.compared += 1
        return Decision(site.won, "compared", "7", 0.2, 0.1, 0.5)

    monkeypatch.setattr(significance, "frozen_tests", lambda api, name: site.frozen)
    monkeypatch.setattr(significance, "tests_tag", lambda run: site.own)
    monkeypatch.setattr(significance, "decide", compare)
    return site


def version(number="8", **tags):
    return SimpleNamespace(name="m", version=number, tags=tags)


def test_champion_is_not_compared_with_itself(decision_setup):
    decision = promotion_decision(None, a_run(), version("7"), CHAMPION, PromotionOptions())
    assert (decision.promoted, decision.reason, decision.champion, decision_setup.compared) == (
        True,
        "it is already the champion",
        "7",
        0,
    )


def test_frozen_test_sets_apply_only_while_there_is_a_champion(decision_setup):
    decision_setup.own = json.dumps({"test": "b"})
    assert "(test differ)" in promotion_decision(None, a_run(), version(), CHAMPION, PromotionOptions()).reason
    assert decision_setup.compared == 0
    assert promotion_decision(None, a_run(), version(), CHAMPION, PromotionOptions(new_tests=True)).reason == "compared"
    assert promotion_decision(None, a_run(), version(), None, PromotionOptions()).reason == "compared"


@pytest.mark.parametrize("won", [False, True])
def test_force_is_recorded_only_if_it_was_needed(decision_setup, won):
    decision_setup.won = won
    decision = promotion_decision(None, a_run(), version(), CHAMPION, PromotionOptions(force=True, reason="why"))
    assert (decision.promoted, decision.forced, decision.p_value) == (True, not won, 0.5)
    assert decision.reason == ("compared" if won else "forced: why (compared)")


def test_force_promotes_without_comparison_on_other_test_sets(decision_setup):
    decision_setup.own = json.dumps({"test": "b"})
    decision = promotion_decision(None, a_run(), version(), CHAMPION, PromotionOptions(force=True, reason="why"))
    assert (decision.promoted, decision.forced, decision.champion, decision_setup.compared) == (True, True, "7", 0)
    assert decision.reason.startswith("forced: why (not compared: the test sets are not the frozen ones (test differ)")
    assert decision.numbers() == {"promotion.champion": "7", "promotion.forced": "true"}


def test_rolled_back_version_is_compared_only_if_named(decision_setup):
    taken_down = version(**{ROLLED_BACK_TAG: "it misheard numbers"})
    decision = promotion_decision(None, a_run(), taken_down, CHAMPION, PromotionOptions(force=True, reason="why"))
    assert (decision.promoted, decision_setup.compared) == (False, 0)
    assert "it was rolled back (it misheard numbers)" in decision.reason
    assert promotion_decision(None, a_run(), taken_down, CHAMPION, PromotionOptions(named=True)).reason == "compared"
