"""Stage score: word and character error rates by set, speaker, corpus and domain, intervals, and alignments."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from speech.scoring import (
    ErrorCounts,
    ScoreReport,
    count_confusions,
    score_sets,
    text_report,
    worst_utterances,
)
from storage.stages import StageOutput, digest_json
from tasks.dataset.tables import read_table
from tasks.figures import percent
from tasks.scores import SAMPLES, summarize
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageRecord, StageResult
from tasks.stages.decode import DECODE

Row = dict[str, Any]
GROUPS = {"corpora": "corpus", "domains": "domain"}
"""Groups besides speakers: plural in the record, and singular in metrics."""
RATES = ("wer", "wer_low", "wer_high", "wer_speaker_low", "wer_speaker_high", "cer")
"""Rates of a set that are metrics; intervals over speakers exist only for sets with several."""


def score_rows(rows: list[Row]) -> ScoreReport:
    """Score decoded utterances."""
    return score_sets([(row["id"], row["ref"], row["hyp"], row["speaker"], row["domain"]) for row in rows])


def by_corpus(report: ScoreReport, rows: list[Row]) -> dict[str, ErrorCounts]:
    """Error counts of each corpus, sorted by name."""
    corpora: dict[str, ErrorCounts] = {}
    for row, utterance in zip(rows, report.utterances, strict=True):
        corpora[row["corpus"]] = corpora.get(row["corpus"], ErrorCounts()) + utterance.counts
    return dict(sorted(corpora.items()))


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
    config = {"bootstrap": SAMPLES, "seed": run.config.seed}
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
        details[name] = {
            "speakers": {who: counts.to_dict() for who, counts in report.speakers.items()},
            "domains": {which: counts.to_dict() for which, counts in report.domains.items()},
            "corpora": {which: counts.to_dict() for which, counts in by_corpus(report, rows).items()},
            "confusions": count_confusions(report).to_dict(limit=20),
            "worst": [entry.to_dict() for entry in worst_utterances(report, 20)],
        }
        output.store.write(f"{name}.alignments.txt", text_report(report).encode())
    output.store.write_json("scores.json", {"sets": sets, "details": details})
    errors, words = total_errors(sets)
    groups = {name: {kind: details[name][kind] for kind in GROUPS} for name in sets}
    groups = {name: {kind: by for kind, by in kinds.items() if len(by) > 1} for name, kinds in groups.items()}
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
