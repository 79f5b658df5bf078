"""Significance test of a challenger against the champion, on matched pairs of utterances.

Whole systems are compared: each decodes with its own decoder, weights, words and language model. A language model that
may have read the test sets is not compared.

The test sets are frozen by the first comparison: a model that was not scored on them is not compared, unless a user
replaces the frozen sets by its own (`new_tests`). Sets that it was scored on besides them decide nothing: the error
rates of both models on them are reported, and they are frozen, too, once it is champion.
"""

import json
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlflow

from recognition.bundle import own_decoder
from speech.decoding import DecodeConfig
from speech.scoring import UtteranceScore, compare_systems
from storage.reading import ShardError
from tasks.config.decoding import uses_stage
from tasks.dataset.tables import read_table
from tasks.figures import LEARN_MORE, brief, p_value_text, percent
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.decode import DECODE, decode_with
from tasks.stages.run_sets import scored_sets
from tasks.stages.score import SCORE, learned_nothing, score_rows, total_errors
from tasks.tracking.fetching import download_bundle
from tasks.tracking.model_card import tests_of
from tasks.tracking.registry import ROLLED_BACK_TAG, frozen_tests

_CHANGES = 40


class SetErrors(NamedTuple):
    """Word errors and reference words of a test set's utterances, sorted by id."""

    errors: list[int]
    words: list[int]
    utterances: tuple[UtteranceScore, ...] = ()
    """The utterances with their texts."""


Counts = dict[str, SetErrors]
"""Errors by test set."""


@dataclass(frozen=True)
class Decision:
    """Decision about a challenger, with its reason."""

    promoted: bool
    reason: str
    champion: str = ""
    """Version of the champion that the challenger was compared with."""
    champion_wer: float | None = None
    challenger_wer: float | None = None
    p_value: float | None = None
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Number of words and both word error rates, by test set."""
    added: list[str] = field(default_factory=list)
    """Test sets that are not frozen: they did not count."""
    decoders: dict[str, str] = field(default_factory=dict)
    """Decoders of `champion` and `challenger`: each decodes with its own, language model included."""
    changed: dict[str, int] = field(default_factory=dict)
    """Number of utterances in which the challenger has fewer errors (`better`) and more (`worse`)."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """The utterances whose errors changed most, with both hypotheses."""
    forced: bool = False
    """Whether a user overrode or skipped the comparison."""
    untrained: bool = False
    """Whether the model is not champion because it has learned nothing."""

    def numbers(self) -> dict[str, str]:
        """Tags of the challenger's version."""
        values = {"champion": self.champion or None, "forced": "true" if self.forced else None}
        rates = {name: getattr(self, name) for name in ("champion_wer", "challenger_wer", "p_value")}
        return {f"promotion.{name}": str(value) for name, value in (values | rates).items() if value is not None}


@dataclass(frozen=True)
class PromotionOptions:
    """Options of a promotion."""

    force: bool = False
    """Promote regardless of the comparison."""
    new_tests: bool = False
    """Compare on the challenger's test sets even if they are not the frozen ones, and freeze them."""
    reason: str = ""
    """Reason; required with `force`."""
    named: bool = False
    """Whether the user gave the version's number, which allows to promote one that was rolled back."""


def tests_tag(run: Run) -> str:
    """Digests of a run's test sets, in the format of tags."""
    return json.dumps(tests_of(run), sort_keys=True)


def _rows(run: Run, champion: Path | None, name: str) -> list[dict[str, Any]]:
    """Hypotheses of a test set by this run's model, or by the champion."""
    if champion is None:
        return read_table(run.result("decode").output, f"{name}.parquet")
    decode = own_decoder(champion)

    def on_progress(done: int, total: int) -> None:
        progress.report("register", done, total, f"the champion on {name}")

    decoded = decode_with(run, champion, name, decode, own=False, on_progress=on_progress, on_damage=known_damage(run))
    rows = [asdict(entry) for entry in decoded]
    stages = {"features", "decode"} & run.results.keys()
    if any(run.results[stage].record.get("quarantined_shards") for stage in stages):
        # leave out what this run's model could not read, so that both have the same utterances
        wanted = {row["id"] for row in read_table(run.result("decode").output, f"{name}.parquet")}
        rows = [row for row in rows if row["id"] in wanted]
    return rows


def known_damage(run: Run) -> Callable[[ShardError], None]:
    """Returns a function that ignores damaged shards which this run's model has skipped, too, and raises for others."""

    def check(error: ShardError) -> None:
        known = {entry["shard"] for entry in DECODE.record(run).get("quarantined_shards", ())}
        if error.shard is None or error.shard.name not in known:
            raise error

    return check


def count_errors(run: Run, champion: Path | None) -> Counts:
    """Word errors and reference words of each utterance, by test set, for the champion or this run's model."""
    counts: Counts = {}
    for name in scored_sets(run):
        report = score_rows(sorted(_rows(run, champion, name), key=lambda row: str(row["id"])))
        counts[name] = SetErrors(report.errors().tolist(), report.words().tolist(), tuple(report.utterances))
    return counts


def decoder_text(decode: DecodeConfig, has_lm: bool) -> str:
    """A decoder in a few words."""
    return f"{decode.kind} with a language model" if has_lm else decode.kind


def _decoders(run: Run, champion: Path) -> dict[str, str]:
    """The decoder of the champion's bundle, and that of this run."""
    theirs, own = own_decoder(champion), run.config.decoder
    return {
        "champion": decoder_text(theirs, has_lm(theirs)),
        "challenger": decoder_text(own, has_lm(own) or uses_stage(own, run.config.lm)),
    }


def has_lm(decode: DecodeConfig) -> bool:
    """Whether a decoder's files have a language model: one of its own, or one in a graph."""
    return not {"lm", "graph"}.isdisjoint(decode.files())


def decide(run: Run, champion: Any | None, added: Collection[str] = ()) -> Decision:
    """Compare this run's model with the champion on this run's test sets.

    Args:
        run: The run that registered the model.
        champion: The champion's version; None if there is none.
        added: Test sets that are not frozen, which both models recognize, but which do not count.
    """
    if champion is None:
        return _decide_first(run)
    challenger = count_errors(run, None)
    with tempfile.TemporaryDirectory() as folder:
        bundle = download_bundle(f"models:/{champion.name}/{champion.version}", Path(folder))
        reigning, decoders = count_errors(run, bundle), _decoders(run, bundle)
    own, words = _joined(challenger, added)
    theirs, _ = _joined(reigning, added)
    level = 1.0 - run.config.register_as.significance
    comparison = compare_systems(theirs, own, words, level=level, seed=run.config.seed)
    total = max(1, sum(words))
    wer_a, wer_b = sum(theirs) / total, sum(own) / total
    verdict = {"b": "beats", "a": "is beaten by", None: "does not differ significantly from"}[comparison.better]
    reason = (
        f"WER {percent(wer_b)} {verdict} version {champion.version}'s {percent(wer_a)} "
        f"({p_value_text(comparison.p_value)})"
    )
    if decoders["champion"] != decoders["challenger"]:
        reason += f"; decoded by {decoders['challenger']}, the champion by {decoders['champion']}"
    sets = {name: _set_rates(challenger[name], reigning[name]) for name in challenger}
    if added:
        reason += f". Not frozen, so without effect: {_added_text(sets, added)}"
    return Decision(
        promoted=comparison.better == "b",
        reason=reason,
        champion=str(champion.version),
        champion_wer=wer_a,
        challenger_wer=wer_b,
        p_value=comparison.p_value,
        sets=sets,
        added=sorted(added),
        decoders=decoders,
        changed=_changed(own, theirs),
        changes=_changes(challenger, reigning),
    )


def _decide_first(run: Run) -> Decision:
    """The first champion needs to have learned something, since there is nothing to compare it with."""
    config = run.config.register_as
    why = "" if config.accept_untrained else learned_nothing(run)
    if not why:
        return _good_enough(run)
    return Decision(
        False,
        f"stays challenger, although there is no champion: {why}, so it has learned nothing yet. {LEARN_MORE}. "
        f"`starling promote {run.config.model_name} --force --reason TEXT` makes it champion nevertheless",
        untrained=True,
    )


def _good_enough(run: Run) -> Decision:
    """The first champion's WER must be one that the configuration accepts."""
    (errors, words), most = total_errors(SCORE.record(run)["sets"]), run.config.register_as.first_max_wer
    if errors <= most * words:
        return Decision(True, "became champion: there was none before")
    return Decision(
        False,
        f"stays challenger, although there is no champion: WER {percent(errors / words)} is above "
        f"register.first_max_wer, {percent(most)}. {LEARN_MORE}. `starling promote {run.config.model_name} --force "
        "--reason TEXT` makes it champion nevertheless",
    )


def _changed(own: list[int], theirs: list[int]) -> dict[str, int]:
    """Number of utterances with fewer and with more errors than the champion's."""
    pairs = list(zip(own, theirs, strict=True))
    return {"better": sum(a < b for a, b in pairs), "worse": sum(a > b for a, b in pairs)}


def _changes(challenger: Counts, reigning: Counts) -> list[dict[str, Any]]:
    """The utterances whose number of errors changed most."""
    changes: list[dict[str, Any]] = [
        {
            **{"set": name, "id": own.id, "ref": own.ref, "champion": before.hyp, "challenger": own.hyp},
            **{"champion_errors": before.counts.errors, "challenger_errors": own.counts.errors},
        }
        for name, scored in challenger.items()
        for own, before in zip(scored.utterances, reigning[name].utterances, strict=True)
        if own.counts.errors != before.counts.errors
    ]
    return sorted(changes, key=lambda change: -abs(change["challenger_errors"] - change["champion_errors"]))[:_CHANGES]


def _joined(counts: Counts, added: Collection[str]) -> tuple[list[int], list[int]]:
    """Concatenate the errors and the words of all test sets that count."""
    pairs = [pair for name, pair in counts.items() if name not in added]
    return [n for pair in pairs for n in pair.errors], [n for pair in pairs for n in pair.words]


def _set_rates(own: SetErrors, theirs: SetErrors) -> dict[str, float]:
    words = sum(own.words)
    return {
        "words": words,
        "challenger_wer": sum(own.errors) / max(1, words),
        "champion_wer": sum(theirs.errors) / max(1, words),
    }


def _added_text(sets: dict[str, dict[str, float]], added: Collection[str]) -> str:
    """Both error rates on test sets that do not count."""
    rates = ((name, sets[name]["challenger_wer"], sets[name]["champion_wer"]) for name in sorted(added))
    return ", ".join(f"{name} {percent(own)} instead of {percent(theirs)}" for name, own, theirs in rates)


def added_tests(run_tests: str, frozen: str) -> list[str]:
    """Test sets of a run besides the frozen ones; empty if none are frozen."""
    return sorted(json.loads(run_tests).keys() - json.loads(frozen).keys()) if frozen else []


def refusal(run_tests: str, frozen: str) -> str:
    """Reason why a model that was not scored on the frozen test sets is not compared; empty if it can be."""
    if not frozen or run_tests == frozen:
        return ""
    ours, theirs = json.loads(run_tests), json.loads(frozen)
    changed = sorted(name for name in theirs if ours.get(name) != theirs[name])
    if not changed:
        return ""
    differ = sorted({*changed, *(ours.keys() - theirs.keys())})
    return (
        f"not compared: the test sets are not the frozen ones ({', '.join(differ)} differ); "
        "`starling promote --new-tests` compares both models on the new ones and freezes these"
    )


def lm_refusal(run: Run) -> str:
    """Reason why a model whose language model may have read the test sets is not compared; empty if it can be."""
    config = run.config
    read = {"lm": config.lm if uses_stage(config.decoder, config.lm) else None, "rescoring": config.rescoring}
    for section, lm in read.items():
        if lm is not None and lm.text.allow_test_text:
            return (
                f"not compared: its language model may have read the test sets ({section}.text.allow_test_text is "
                "true); set it to false and run the pipeline again"
            )
    return ""


def promotion_decision(
    api: mlflow.MlflowClient, run: Run, version: Any, champion: Any | None, options: PromotionOptions
) -> Decision:
    """Decide whether to promote a version, given the champion; changes nothing in the registry."""
    if champion is not None and str(champion.version) == str(version.version):
        return Decision(True, "it is already the champion", champion=str(champion.version))
    if ROLLED_BACK_TAG in version.tags and not options.named:
        return Decision(False, f"it was rolled back ({version.tags[ROLLED_BACK_TAG]}); name its version to try again")
    frozen = frozen_tests(api, version.name) if champion is not None and not options.new_tests else ""
    tests = tests_tag(run)
    why = refusal(tests, frozen) or lm_refusal(run)
    if why and options.force:
        decision = Decision(False, why, champion=str(champion.version) if champion is not None else "")
    elif why:
        return Decision(False, why)
    else:
        decision = decide(run, champion, added_tests(tests, frozen))
    if options.force and not decision.promoted:
        reason = f"forced: {options.reason} ({brief(decision.reason)})"
        return replace(decision, promoted=True, forced=True, reason=reason)
    return decision
