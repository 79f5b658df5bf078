"""Stage score: word and character error rates by set, speaker, corpus, domain and language, intervals, alignments."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from configurable.addresses import address_content
from speech.scoring import (
    ErrorCounts,
    ScoreReport,
    count_confusions,
    score_sets,
    text_report,
    worst_utterances,
)
from speech.text import NormalizerConfig, normalizer_of
from storage.index import ShardIndex
from storage.stages import StageOutput, digest_json
from tasks.dataset.tables import read_table
from tasks.figures import percent
from tasks.scores import GROUPS, SAMPLES, summarize
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageRecord, StageResult
from tasks.stages.decode import DECODE
from tasks.stages.prepare import PREPARE

Row = dict[str, Any]
RATES = (
    *("wer", "wer_low", "wer_high", "wer_speaker_low", "wer_speaker_high", "cer"),
    *("wer_normalized", "cer_normalized"),
)
"""Rates of a set that are metrics; intervals over speakers exist only for sets with several, and normalized rates for
transcripts with capitals or punctuation."""
_NORMALIZER = NormalizerConfig(kind="basic")
"""What leaves capitals and punctuation out, in any language."""


def score_rows(rows: list[Row]) -> ScoreReport:
    """Score decoded utterances; a speaker's name that several corpora have is given with the corpus."""
    corpora: dict[str, set[str]] = {}
    for row in rows:
        corpora.setdefault(row["speaker"], set()).add(row.get("corpus", ""))

    def speaker_of(row: Row) -> str:
        name: str = row["speaker"]
        return f"{row['corpus']}/{name}" if name and len(corpora[name]) > 1 else name

    return score_sets([(row["id"], row["ref"], row["hyp"], speaker_of(row), row["domain"]) for row in rows])


def normalized_rates(rows: list[Row]) -> dict[str, float | None]:
    """Rates of decoded utterances without capitals and punctuation, which their texts have."""
    normalize = normalizer_of(_NORMALIZER).normalize
    report = score_rows([row | {"ref": normalize(row["ref"]), "hyp": normalize(row["hyp"])} for row in rows])
    return {"wer_normalized": report.wer, "cer_normalized": report.cer}


def by_group(report: ScoreReport, groups: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Error counts of each group of utterances, sorted by name.

    Args:
        report: The scored utterances.
        groups: Of each utterance.
    """
    counts: dict[str, ErrorCounts] = {}
    for group, utterance in zip(groups, report.utterances, strict=True):
        counts[group] = counts.get(group, ErrorCounts()) + utterance.counts
    return {group: counts[group].to_dict() for group in sorted(counts)}


def _spoken(run: Run, name: str) -> dict[str, str]:
    """Language of each utterance of a set; empty if all have the same."""
    index = ShardIndex.read(run.result("shard").store.child(name))
    if len(pc.unique(index.values("language"))) < 2:
        return {}
    languages = (language or "" for language in index.values("language").to_pylist())
    return dict(zip(index.values("id").to_pylist(), languages, strict=True))


def figures(record: "ScoreRecord") -> dict[str, float]:
    """Metrics of a score stage's record: rates of each set, and of its corpora and domains if it has several.

    Names are like `test.wer` and `test.domain.read.wer`; characters not allowed in a metric's name become underscores.
    """
    rates = {f"{name}.{rate}": scores.get(rate) for name, scores in record["sets"].items() for rate in RATES}
    for name, kinds in record.get("groups", {}).items():
        for kind, members in kinds.items():
            for member, counts in members.items():
                place = re.sub(r"[^\w.-]", "_", member or "unnamed", flags=re.ASCII)
                rates[f"{name}.{GROUPS[kind]}.{place}.wer"] = counts["wer"]
    return {name: value for name, value in rates.items() if value is not None}


def total_errors(sets: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Errors and words of all sets; `sets` is what `summarize` returns for each."""
    errors = sum(scores[kind] for scores in sets.values() for kind in ("sub", "ins", "del"))
    return errors, sum(scores["words"] for scores in sets.values())


def nothing_correct(scores: dict[str, Any]) -> bool:
    """Whether a set has words, and none of them was recognized correctly."""
    return bool(0 < scores["words"] <= scores["sub"] + scores["del"])


def learned_nothing(run: Run) -> str:
    """What the test sets show of a model that has learned nothing; empty for one that has learned something.

    It has learned something if it is better than the same answer to all utterances: none, or their commonest text.
    """
    sets = SCORE.record(run)["sets"]
    if nothing_correct({part: sum(scores[part] for scores in sets.values()) for part in ("words", "sub", "del")}):
        return "no word of the test sets was recognized correctly"
    decoded = run.result("decode").output
    rows = [row for name in sets for row in read_table(decoded, f"{name}.parquet")]
    if len({row["hyp"] for row in rows}) == 1 < len({row["ref"] for row in rows}):
        return f"all utterances of the test sets were recognized as {rows[0]['hyp']!r}"
    (commonest, _), *others = Counter(row["ref"] for row in rows).most_common()
    answered = score_rows([row | {"hyp": commonest} for row in rows]).total
    errors, words = total_errors(sets)
    least, answer = min((answered.errors, repr(commonest)), (words, "no word"))
    if others and words and errors >= least:
        return (
            f"its WER is {percent(errors / words)} on the test sets, and that of answering {answer} every time "
            f"{percent(least / words)}"
        )
    return ""


def _inputs(run: Run) -> Inputs:
    config: dict[str, Any] = {"bootstrap": SAMPLES, "seed": run.config.seed}
    if run.config.data.normalizer.keeps_form:
        config["normalized"] = address_content(_NORMALIZER)
    if len(PREPARE.record(run).get("text", ())) > 1:  # else no set has several languages
        config["by language"] = True
    if len({source.corpus_name for source in run.config.data.sources}) > 1:  # whose speakers may have the same names
        config["speakers by corpus"] = True
    damaged = DECODE.record(run).get("quarantined_shards")  # the decode output's address does not depend on these
    return config, {"decode": run.result("decode").key} | ({"damaged": digest_json(damaged)} if damaged else {})


class ScoreRecord(StageRecord):
    """Error rates of the scored sets."""

    sets: dict[str, dict[str, Any]]
    """What `summarize` returns for each set."""
    groups: dict[str, dict[str, dict[str, dict[str, Any]]]]
    """Error counts by set, kind of group (`corpora`, `domains`) and group, where a set has several."""


def _work(run: Run, output: StageOutput) -> ScoreRecord:
    decoded = run.result("decode").output
    sets: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in DECODE.record(run)["sets"]:
        rows = read_table(decoded, f"{name}.parquet")
        report = score_rows(rows)
        sets[name] = summarize(report, run.config.seed)
        if run.config.data.normalizer.keeps_form:
            sets[name] |= normalized_rates(rows)
        spoken = _spoken(run, name)
        details[name] = {
            "speakers": {who: counts.to_dict() for who, counts in report.speakers.items()},
            "domains": {which: counts.to_dict() for which, counts in report.domains.items()},
            "corpora": by_group(report, (row["corpus"] for row in rows)),
            **({"languages": by_group(report, (spoken.get(row["id"], "") for row in rows))} if spoken else {}),
            "confusions": count_confusions(report).to_dict(limit=20),
            "worst": [entry.to_dict() for entry in worst_utterances(report, 20)],
        }
        output.store.write(f"{name}.alignments.txt", text_report(report).encode())
    output.store.write_json("scores.json", {"sets": sets, "details": details})
    errors, words = total_errors(sets)
    groups = {name: {kind: by for kind in GROUPS if len(by := details[name].get(kind, {})) > 1} for name in sets}
    return {
        "counts": {"words": words, "errors": errors},
        "sets": sets,
        "groups": {name: kinds for name, kinds in groups.items() if kinds},
    }


def score_table(result: StageResult) -> list[dict[str, Any]]:
    """Rows of a table: sets, and below them their corpora and domains where they have several."""
    rows = [
        {"set": name, **{k: percent(v) if k in RATES else v for k, v in scores.items()}}
        for name, scores in result.record["sets"].items()
    ]
    for name, kinds in result.record.get("groups", {}).items():
        for kind, members in kinds.items():
            for member, counts in members.items():
                place = f"{name}, {GROUPS[kind]} {member or '–'}"
                rows.append({"set": place, "wer": percent(counts["wer"]), "words": counts["ref_words"]})
    return rows


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    yield Artifact(score_table(result), "Word error rates")


SCORE = Stage(
    "score",
    5,
    _inputs,
    _work,
    artifacts=_artifacts,
    figures=figures,
    evaluates=True,
    reads="hypotheses",
    writes="`scores.json`, alignments with every error marked",
)
