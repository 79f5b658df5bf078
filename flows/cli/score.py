"""`starling score`: the error rates of a configuration's test sets, or of any two trn files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, SetOption, friendly, out, print_json
from flows.cli.run import PlainOption, execute, finish


@friendly
def score(
    config: Annotated[Path | None, typer.Argument(help="YAML configuration.", show_default=False)] = None,
    overrides: SetOption = None,
    ref: Annotated[Path | None, typer.Option("--ref", help="NIST trn file of the references.")] = None,
    hyp: Annotated[Path | None, typer.Option("--hyp", help="NIST trn file of the hypotheses.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Score again even if it is done.")] = False,
    plain: PlainOption = False,
    json_output: JsonOption = False,
) -> None:
    """Score a configuration's test sets, or, with --ref and --hyp, any recognizer's output."""
    if (config is None) == (ref is None or hyp is None):
        raise ValueError("give either a configuration, or both --ref and --hyp")
    if config is not None:
        finish(execute(config, overrides or [], "score" if again else "", "score", plain), json_output)
        return
    assert ref is not None
    assert hyp is not None
    sets, text = score_files(ref, hyp)
    if json_output:
        print_json({"sets": sets})
        return
    from flows.summary import score_table

    out.print(text, markup=False, highlight=False)
    out.print(score_table(sets))


def score_files(ref: Path, hyp: Path) -> tuple[dict[str, Any], str]:
    """Score one trn file against another.

    Returns:
        Scores by set (one set, named after the hypothesis file), and the text report.

    Raises:
        ValueError: If the files do not contain the same utterances.
    """
    from speech.scoring import read_trn, score_sets, text_report
    from tasks.stages.score import summarize

    said, heard = read_trn(ref), read_trn(hyp)
    if missing := sorted(set(said) ^ set(heard)):
        where = hyp if missing[0] in said else ref
        raise ValueError(f"{len(missing)} utterance(s) are in one file only; {missing[0]!r} is missing from {where}")
    report = score_sets([(name, said[name], heard[name], name.split("-")[0], "") for name in sorted(said)])
    return {hyp.stem: summarize(report, 1000, 0)}, text_report(report)
