"""`starling score`: the error rates of any recognizer's transcripts."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configurable.wording import counted
from flows.cli.common import JsonOption, friendly, out, print_json, print_line, say
from flows.cli.configs import CONFIG_SUFFIXES, complete_path, packaged_configs
from flows.cli.run import instead

if TYPE_CHECKING:
    from speech.scoring import PairingRules, ScoringRules

_NAMED = 5

CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="HYP2",
        help="Test whether this system is better or worse.",
        autocompletion=complete_path,
    ),
]
GlmOption = Annotated[
    Path | None,
    typer.Option("--glm", help="NIST's global mapping rules for both texts.", autocompletion=complete_path),
]


class MissingOption(StrEnum):
    """What to do with utterances without a hypothesis."""

    refuse = "refuse"
    delete = "delete"


class ExtraOption(StrEnum):
    """What to do with hypotheses without a reference."""

    refuse = "refuse"
    insert = "insert"
    ignore = "ignore"


@friendly
def score(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="REF HYP", help="Two transcripts.", show_default=False, autocompletion=complete_path),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME[,NAME]", help="trn, kaldi, jsonl, ctm or stm; one for both, or REF,HYP."
        ),
    ] = "",
    compare: CompareOption = None,
    optional: Annotated[
        bool, typer.Option("--optional", "-D", help="Words in parentheses may be left out (sclite -D).")
    ] = False,
    fragments: Annotated[
        bool, typer.Option("--fragments", "-F", help="Fragments such as wor- equal words they begin (sclite -F).")
    ] = False,
    case: Annotated[bool, typer.Option("--case-sensitive", "-s", help="Upper and lower case differ.")] = False,
    words: Annotated[bool, typer.Option("--words", help="Braces and @ are words, not alternatives.")] = False,
    hyphens: Annotated[
        bool, typer.Option("--split-hyphens", help="Hyphens within words are spaces (csrfilt -dh).")
    ] = False,
    glm: GlmOption = None,
    missing: Annotated[
        MissingOption, typer.Option("--missing", help="Utterances without a hypothesis.")
    ] = MissingOption.refuse,
    extra: Annotated[ExtraOption, typer.Option("--extra", help="Hypotheses without a reference.")] = ExtraOption.refuse,
    json_output: JsonOption = False,
) -> None:
    """Score a recognizer's transcript against the reference as NIST's sclite does."""
    _check_transcripts(files or [])
    assert files
    from speech.scoring import PairingRules, ScoringRules, read_glm

    ref_format, _, hyp_format = kind.partition(",")
    pairing = PairingRules(
        ref_format,
        hyp_format or ref_format,
        missing.value,
        extra.value,
        read_glm(glm) if glm else None,
        hyphens,
    )
    rules = ScoringRules(not words, optional, fragments, not case)
    result, text = score_files(files[0], files[1], compare, rules, pairing)
    _show(result, text, json_output)


def _check_transcripts(files: Sequence[Path]) -> None:
    """Check that there are two files and no unknown options, which the command takes for files.

    Raises:
        ValueError: If not; for a configuration, which was scored by this command, it names the command to use.
    """
    words = [str(path) for path in files]
    unknown = [word for word in words if word.startswith("-")]
    config = [path for path in files if path.suffix in CONFIG_SUFFIXES or path.name in packaged_configs()]
    if config and (len(files) == 1 or unknown):
        raise ValueError(f"{config[0]} is a configuration; to score its test sets: {instead('score', words)}")
    if unknown:
        raise ValueError(f"there is no option {unknown[0]}: see starling score --help")
    if len(files) != 2:
        raise ValueError("give a reference and a hypothesis: starling score REF HYP")


def _show(result: dict[str, Any], text: str, json_output: bool) -> None:
    from flows.score_tables import comparison_text, label_table, print_scores

    for what, names in (("without a hypothesis", result["missing"]), ("without a reference", result["extra"])):
        if names:
            say(f"{len(names)} {what}: {', '.join(names)}")
    if overlaps := result["overlaps"]:
        more = f"; and {len(overlaps) - _NAMED} more" if len(overlaps) > _NAMED else ""
        say(
            f"warning: {counted(len(overlaps), 'pair')} of segments at the same time on one channel: "
            f"{'; '.join(overlaps[:_NAMED])}{more}. As in sclite, all words of these times belong to the earlier "
            "segment, of either speaker, so the error rate is too high: give each speaker a channel of their own in "
            "both files, or exclude these times with IGNORE_TIME_SEGMENT_IN_SCORING"
        )
    if json_output:
        print_json(result)
        return
    out.print(text, markup=False, highlight=False)
    print_scores(result["sets"], out)
    print_line(f"speakers: {result['speakers'] or 'unknown, so there are no intervals over speakers'}")
    if any(result["labels"].values()):
        out.print(label_table(result["labels"]))
    if result["comparison"]:
        print_line(comparison_text(result["comparison"]))


def score_files(
    ref: Path, hyp: Path, other: Path | None, rules: "ScoringRules", pairing: "PairingRules"
) -> tuple[dict[str, Any], str]:
    """Score one or two transcripts against a reference.

    Args:
        ref: The reference.
        hyp: The hypothesis.
        other: The hypothesis of another system, to compare with the first.
        rules: How texts are read and words compared.
        pairing: Formats, text rules, and what to do with utterances that one side lacks.

    Returns:
        Scores by set (one for each hypothesis, named after its file), and the first one's text report.

    Raises:
        ValueError: If a file cannot be read, or the utterances differ and that is refused.
    """
    from speech.scoring import load_pairs, matched_pairs, score_sets, share_extra, text_report
    from tasks.scores import summarize

    result: dict[str, Any] = {"sets": {}, "labels": {}, "missing": [], "extra": [], "overlaps": []}
    result |= {"speakers": "", "comparison": None}
    reports = []
    paths = (hyp, other) if other else (hyp,)
    paired = [load_pairs(ref, path, rules, pairing) for path in paths]
    for path, pairs in zip(paths, share_extra(paired), strict=True):
        report = score_sets(pairs.rows, rules)
        result |= {"speakers": pairs.speakers, "overlaps": pairs.overlaps}
        name = path.stem if path.stem not in result["sets"] else str(path)
        result["sets"][name] = summarize(report, 0)
        titles = pairs.titles or {label: label for label in report.labels}
        result["labels"][name] = {
            title: report.labels[label].to_dict() for label, title in titles.items() if label in report.labels
        }
        result["missing"] += [utterance for utterance in pairs.missing if utterance not in result["missing"]]
        result["extra"] += [utterance for utterance in pairs.extra if utterance not in result["extra"]]
        reports.append(report)
    if other:
        a, b = result["sets"]
        result["comparison"] = {"a": a, "b": b, **matched_pairs(*reports).to_dict()}
    return result, text_report(reports[0])
