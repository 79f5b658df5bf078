"""NIST's own tests of sclite, sc_stats and csrfilt, on their data and against the outputs that come with them.

STARLING_SCTK_DATA names a checkout of the repository usnistgov/SCTK; without it, these tests are skipped. The tables
below list every case of NIST's tsclite.sh, tsc_stats.sh and RunTests.pl: either its files and options, or the reason
why it is not supported.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from nist_tools import read_alignments, read_label_table, read_mapsswe, read_prints, read_speaker_table, run_sclite

from speech.scoring import (
    FORMATS,
    ErrorCounts,
    PairingRules,
    ScoreReport,
    ScoringError,
    ScoringRow,
    ScoringRules,
    TranscriptError,
    align_texts,
    load_pairs,
    matched_pairs,
    read_glm,
    score_sets,
)
from speech.scoring.formats import TimedWord

ROOT = os.environ.get("STARLING_SCTK_DATA", "")
DATA = Path(ROOT) / "src" / "sclite" / "testdata"

pytestmark = pytest.mark.skipif(not ROOT, reason="STARLING_SCTK_DATA names no checkout of usnistgov/SCTK")


class Case(NamedTuple):
    """A case of tsclite.sh: its files and options, and the outputs whose names begin like it."""

    name: str
    ref: str
    hyp: str
    options: str = ""

    @property
    def kinds(self) -> tuple[str, str]:
        return ("stm", "ctm") if self.hyp.endswith(".ctm") else ("trn", "trn")

    @property
    def rules(self) -> ScoringRules:
        given = self.options.split()
        return ScoringRules(True, "-D" in given, "-F" in given, ignore_case="-s" not in given)

    def output(self, kind: str) -> str | None:
        """An expected output of a kind, if the case has it."""
        path = DATA / "base" / f"{self.name}.{kind}"
        return path.read_text(encoding="utf-8") if path.exists() else None

    @cache  # noqa: B019 - cases live as long as the tests
    def report(self) -> ScoreReport:
        pairing = PairingRules(*self.kinds, missing="delete" if "missall" in self.hyp else "refuse")
        pairs = load_pairs(DATA / self.ref, DATA / self.hyp, self.rules, pairing)
        return score_sets(pairs.rows, self.rules)


UTF8 = "-e utf-8"
CASES = [
    Case("test1", "csrnab.ref", "csrnab.hyp"),
    Case("test1d", "csrnab.ref", "csrnab.hyp"),
    Case("test1e", "csrnab.ref", "csrnab.hyp", UTF8),
    Case("test3", "lvc_ref.stm", "lvc_hyp.ctm"),
    Case("test3a", "lvc_refe.stm", "lvc_hyp.ctm"),
    Case("test3b", "lvc_ref.stm", "lvc_hypc.ctm"),
    Case("test3c", "lvc_refm.stm", "lvc_hypm.ctm"),
    Case("test7", "tests.ref", "tests.hyp", "-F -D"),
    Case("test7_r", "tests.hyp", "tests.ref", "-F -D"),
    Case("test7_noD", "tests.ref", "tests.hyp", "-F"),
    Case("test7_6", "tests.ref", "tests.hyp", f"-F -D {UTF8}"),
    # letters of two bytes that differ only in case are different ones here: without a language, sclite keeps their case
    Case("test7-utf8-2bytes", "tests.ref.utf8-2bytes", "tests.hyp.utf8-2bytes", f"-F -D {UTF8} -s"),
    *[
        Case(f"test7-utf8-{n}bytes", f"tests.ref.utf8-{n}bytes", f"tests.hyp.utf8-{n}bytes", f"-F -D {UTF8}")
        for n in (3, 4)
    ],
    Case("test15_a", "test.cantonese.stm", "test.cantonese.ctm", UTF8),
    Case("test15_c", "test.turkish.ref", "test.turkish.hyp", f"{UTF8} babel_turkish"),
    Case("test15_d", "test.ukranian.ref", "test.ukranian.hyp", f"{UTF8} ukrainian"),  # codespell:ignore ukranian
    *[
        Case(f"test16_{number}", "stm2ctm_missing.ref.stm", f"stm2ctm_missing.hyp{name}.ctm")
        for number, name in enumerate(
            [
                "-missall",
                "-missfile1",
                "-missfile1chanA",
                "-missfile1chanb",
                "-missfile2",
                "-missfile2chanA",
                "-missfile2chanB",
            ],
            2,
        )
    ],
    Case("test16_9", "stm2ctm_missing.ref.stm", "stm2ctm_missing.hyp.ctm"),
    Case("test17", "test.vietnamese.ref.trn", "test.vietnamese.hyp.trn", f"{UTF8} babel_vietnamese"),
]
REFUSED = [Case("test16_1", "stm2ctm_missing.ref.stm", "stm2ctm_missing.hyp-extra.ctm")]
"""Cases that sclite refuses."""
UNSUPPORTED = {
    "reports of an alignment in SGML (-P)": ["1a"],
    "weights of words, from a file or a language model (-w, -L)": ["1b", "1c"],
    "alignment by diff (-d), not compiled into Debian's sclite either": ["2", "4", "5", "6"],
    "words split and joined with a lexicon (-S)": ["7_1", "7_2", "7_2a", "7_3", "7_4", "11", "12"],
    "characters as words (-c)": ["7_5", "8", "9", "9_1", "10", "10_1", "15_b"],
    "a reference in ctm": ["13", "13_D", "13_a", "13_aD"],
    "files cut to the stretches that both cover (-m)": ["14_a", "14_b", "14_c", "14_d", "14_e"],
}


def case_id(case: Case) -> str:
    return case.name


def test_every_case_is_listed():
    outputs = {path.name.partition(".")[0] for path in (DATA / "base").iterdir()}
    listed = [case.name for case in CASES + REFUSED] + [
        f"test{number}" for names in UNSUPPORTED.values() for number in names
    ]
    assert sorted(listed) == sorted(outputs)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_counts_equal_those_of_nist(case):
    report = case.report()
    compared = 0
    by_id = {utterance.id.lower(): utterance for utterance in report.utterances}
    if prints := case.output("pra"):
        theirs = read_prints(prints)
        assert {
            id_: (utterance.counts.cor, utterance.counts.sub, utterance.counts.dele, utterance.counts.ins)
            for id_, utterance in by_id.items()
        } == {id_: counts for id_, (_, counts) in theirs.items()}
        # sclite takes the speaker from the id in several ways
        spoken = [
            ScoringRow(utterance.id, utterance.ref, utterance.hyp, theirs[id_][0], labels=utterance.labels)
            for id_, utterance in by_id.items()
        ]
        report = score_sets(spoken, case.rules)
        compared += 1
    if table := case.output("raw"):
        assert {
            name: tuple(map(float, raw_row(counts))) for name, counts in rows(report).items()
        } == read_speaker_table(table)
        compared += 1
    if table := case.output("sys"):
        assert {name: percentages(counts) for name, counts in rows(report).items()} == read_speaker_table(table)
        compared += 1
    if table := case.output("lur"):
        labelled = [(counts.ref_words, round(100 * counts.wer, 1)) for counts in report.labels.values()]
        assert labelled == read_label_table(table)
        compared += 1
    for kind in ("sgml", "nl.sgml"):
        if sgml := case.output(kind):
            assert alignments(report, case.rules) == read_alignments(sgml)
            compared += 1
    assert compared


def rows(report: ScoreReport) -> dict[str, ErrorCounts]:
    return {name.lower(): counts for name, counts in report.speakers.items()} | {"sum": report.total}


def raw_row(counts: ErrorCounts) -> tuple[int, ...]:
    return (
        counts.utterances,
        counts.ref_words,
        counts.cor,
        counts.sub,
        counts.dele,
        counts.ins,
        counts.errors,
        counts.wrong_utterances,
    )


def percentages(counts: ErrorCounts) -> tuple[float, ...]:
    # without words in the reference, sclite prints the counts
    words = counts.ref_words or 100
    shares = [
        round(100 * count / words, 1) for count in (counts.cor, counts.sub, counts.dele, counts.ins, counts.errors)
    ]
    return counts.utterances, counts.ref_words, *shares, round(100 * counts.wrong_utterances / counts.utterances, 1)


def alignments(report: ScoreReport, rules: ScoringRules) -> dict[str, list]:
    return {utterance.id.lower(): align_texts(utterance.ref, utterance.hyp, rules) for utterance in report.utterances}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_alignments_equal_those_of_nist(case):
    sgml = run_sclite(DATA / case.ref, [DATA / case.hyp], *case.options.split(), kinds=case.kinds)
    if not sgml:
        pytest.skip(f"this sclite does not know {case.options}")
    assert dotted(alignments(case.report(), case.rules)) == dotted(read_alignments(sgml))


def dotted(aligned: dict[str, list]) -> str:
    """Alignments with dots on every i: the lower case of I depends on the language only for sclite."""
    return str(sorted(aligned.items())).replace("ı", "i")


@pytest.mark.parametrize("case", REFUSED, ids=case_id)
def test_cases_with_missing_utterances_are_refused(case):
    assert case.output("pra") is None
    with pytest.raises(ScoringError, match="lacks"):
        case.report()


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_cases_are_skipped(reason):
    pytest.skip(f"{len(UNSUPPORTED[reason])} cases need {reason}: {', '.join(UNSUPPORTED[reason])}")


SUITE = Path(ROOT) / "src" / "test_suite"
FILTERS = [
    ("stm", "test.stm.in", "test.stm.out", False),
    ("stm", "test.stm.in", "test.stm.-dh.out", True),
    ("trn", "test.trn.in", "test.trn.out", False),
    ("trn", "test.trn.in", "test.trn.-dh.out", True),
    ("trn", "test.in", "test.out", True),
    ("ctm", "test_ctm.in", "test_ctm.out", False),
    ("ctm", "test_ctm.in", "test_ctm.-dh.out", True),
]
"""Cases of csrfilt's RunTests.pl: format, input, output, and whether hyphens are split; those of rttm are missing."""


def texts(kind: str, name: str, change: Callable[[str], str] = str) -> list[str]:
    """Texts of a transcript in upper case, after a change, with spaces around braces."""
    lines = [line for line in (SUITE / name).read_text(encoding="utf-8").splitlines() if not line.startswith(";;")]
    # an id may occur twice
    parts = [lines] if kind == "ctm" else [[line] for line in lines if line.strip()]
    read = [FORMATS[kind].read(part, name, "ref") for part in parts]
    written = [
        entry.text for file in read for entry in (*file.utterances, *file.segments, *file.words) if is_word(entry)
    ]
    changed = [change(text).upper() for text in written]
    spaced = [re.sub(r"([{}/])", r" \1 ", text).split() for text in changed]
    return [word for words in spaced for word in words] if kind == "ctm" else [" ".join(words) for words in spaced]


def is_word(entry: object) -> bool:
    """Whether an entry is no word of a line with two words, which ctm does not allow and sclite cannot read."""
    return not (isinstance(entry, TimedWord) and any(low <= entry.start < high for low, high in TWO_WORDS))


TWO_WORDS = (5.44, 5.8), (18.88, 19.1)


@pytest.mark.parametrize(("kind", "given", "made", "hyphens"), FILTERS)
def test_global_mapping_equals_csrfilt(kind, given, made, hyphens):
    change = read_glm(SUITE / "example.glm").filter(kind, "ref", split_hyphens=hyphens)
    assert texts(kind, given, change) == texts(kind, made)


def test_parentheses_that_csrfilt_refuses():
    pairing = PairingRules("stm", "ctm", glm=read_glm(SUITE / "example.glm"))
    with pytest.raises(TranscriptError, match=r"test_ctm\.errors\.in, line \d+: parentheses .* do not match"):
        load_pairs(SUITE / "test.stm.in", SUITE / "test_ctm.errors.in", Case("", "", "").rules, pairing)


@pytest.mark.parametrize(
    ("glm", "name"),
    [
        ("test.arb2004.glm", "test.arb2004.txt"),
        ("test.cantonese.glm", "test.cantonese.stm"),
        ("test.cantonese.glm", "test.cantonese.ctm"),
    ],
)
def test_rules_as_rfilter1_applies_them(glm, name):
    change = read_glm(SUITE / glm).filter("txt", "ref", ignore_case=False)
    given, made = ((SUITE / file).read_text(encoding="utf-8").splitlines() for file in (name, f"{name}.rfilter1"))
    compared = 0
    for line, expected in zip(given, made, strict=True):
        try:
            assert change(line).split() == expected.split()
        except ValueError:
            assert "((" in line, "only csrfilt, not rfilter1, wants parentheses to match"
        else:
            compared += 1
    assert compared > len(given) / 2


@pytest.mark.parametrize("name", ["rttm", "test.man2004"])
def test_unsupported_filters_are_refused(name):
    reasons = {"rttm": "3 cases of csrfilt have files in rttm", "test.man2004": "1 case of rfilter1 is not in UTF-8"}
    pytest.skip(reasons[name])


@pytest.mark.parametrize(("case", "files"), [("test1a", ("file1", "file2")), ("test1b", ("file2", "file1"))])
def test_matched_pairs_equal_sc_stats(case, files):
    rules = ScoringRules(alternatives=True, optional=True, fragments=True, ignore_case=True)
    reports = []
    for name in files:
        steps = read_alignments((DATA / f"{name}.sgml").read_text(encoding="utf-8"))
        rows = [(id_, join(of_utterance, 1), join(of_utterance, 2), "", "") for id_, of_utterance in steps.items()]
        reports.append(score_sets(rows, rules))
        assert alignments(reports[-1], rules) == steps
    comparison = matched_pairs(*reports)
    segments, mean, deviation, z, significant = read_mapsswe(
        (DATA / "base_sc_stats" / f"{case}.stats.mapsswe").read_text(encoding="utf-8")
    )
    assert comparison.segments == segments
    assert (comparison.mean, comparison.deviation, comparison.z) == pytest.approx((mean, deviation, z), abs=0.00051)
    assert (comparison.better is not None) == significant


def join(steps: list, side: int) -> str:
    return " ".join(step[side] for step in steps if step[side])
