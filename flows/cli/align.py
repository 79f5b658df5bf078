"""`starling align`: when each word and phone of transcribed speech is spoken, and which transcripts look wrong."""

import csv
import hashlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.common import (
    JsonOption,
    SetOption,
    friendly,
    interruptible,
    out,
    print_json,
    print_line,
    progress_bars,
    say,
)
from flows.cli.configs import YAML_SUFFIXES, complete_config_or_file, complete_path
from flows.cli.found_corpus import HELP, corpus_data

if TYPE_CHECKING:
    from speech.alignments import AlignedUtterance
    from tasks.alignment import AlignedCorpus
    from tasks.stages.align import AlignmentModel

_SHOWN = 20
_LONGEST_NAME = 255
"""Bytes of a file's name."""

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="YAML configuration with a section align, the folder of such a stage's output, or a CTC model: NAME "
        "(its champion), NAME@ALIAS, NAME/VERSION, models:/… or a bundle's folder.",
        show_default=False,
    ),
]
DataArgument = Annotated[Path, typer.Argument(metavar="CORPUS", help=HELP, autocompletion=complete_config_or_file)]


@friendly
def align(
    model: ModelArgument,
    data: DataArgument,
    overrides: SetOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the files.", autocompletion=complete_path)
    ] = Path("aligned"),
    deviations: Annotated[
        float,
        typer.Option(
            "--deviations", min=0, help="Report scores more than this many times the usual spread below the median."
        ),
    ] = 5.0,
    device: Annotated[str, typer.Option("--device", help="Device of a CTC model: cpu, cuda, cuda:1.")] = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Align transcripts with speech, and report transcripts that are probably wrong.

    Writes words.ctm, phones.ctm (or tokens.ctm), a TextGrid for each utterance, suspicious.csv, and utterances.csv, a
    source of a configuration from which min_confidence leaves out doubtful transcripts. A configuration's model is
    trained first if necessary.
    """
    from speech.alignments import confidence_limit, suspicious

    _check_output(output)
    with redirect_stdout(sys.stderr), interruptible(), progress_bars():
        corpus = _aligned(model, data, overrides or [], device)
    wrong = suspicious(corpus.utterances, deviations)
    files = write_files(corpus, wrong, output)
    summary: dict[str, Any] = {
        "aligned": len(corpus.alignments),
        "failed": len(corpus.utterances) - len(corpus.alignments),
        "quarantined": corpus.quarantined,
        "suspicious": [
            {"id": utterance.id, "reason": reason, "transcript": utterance.text, "heard": utterance.heard}
            for utterance, reason in wrong
        ],
        "files": [str(path) for path in files],
    }
    if json_output:
        print_json(summary)
        return
    _show(wrong)
    counts = ", ".join(f"{summary[name]:,} {name}" for name in ("aligned", "failed", "quarantined"))
    print_line(f"{counts}; files in {output}")
    if corpus.alignments:
        limit = confidence_limit(alignment.confidence for alignment in corpus.alignments)
        source = f"{{kind: table, path: {files[-1].resolve()}, min_confidence: {limit:.2f}}}"
        print_line(f"as a source that leaves out confidences below half the median: {source}")


def _check_output(output: Path) -> None:
    """Check that the files can be written to a folder, before hours of work.

    Raises:
        ValueError: It is a file, or below one.
        OSError: Its disk is full or read-only, or this user may not write there.
    """
    from storage.disks import disk_state, standing

    place = standing(output)
    if not place.is_dir():
        raise ValueError(f"{place} is a file, so no folder {output} can be made: name another folder with --output")
    if number := disk_state(place):
        raise OSError(number, os.strerror(number), str(place))


def _aligned(model: str, data: Path, overrides: list[str], device: str) -> "AlignedCorpus":
    from flows.models import fetch_model, model_uri
    from tasks.alignment import CtcCorpusAligner, GmmCorpusAligner, align_corpus
    from tasks.stages import progress
    from tasks.stages.align import AlignmentModel, is_alignment_model

    def report(done: float, total: float) -> None:
        progress.report("align", done, total, data.name)

    sources = corpus_data(data, sets=False).sources
    if model.endswith(YAML_SUFFIXES):
        from tasks.config.pipeline import load_config

        config = load_config(Path(model), overrides)
        with _model_of(config) as trained:
            return align_corpus(GmmCorpusAligner(trained), sources, report, config)
    if overrides:
        raise ValueError(f"--set overrides fields of a configuration, and {model} is a model: remove --set")
    if is_alignment_model(Path(model)):
        return align_corpus(GmmCorpusAligner(AlignmentModel.load(Path(model))), sources, report)
    return align_corpus(CtcCorpusAligner(fetch_model(model_uri(model)), device), sources, report)


@contextmanager
def _model_of(config: Any) -> "Iterator[AlignmentModel]":
    """The model of a configuration's stage align, which runs if it has not."""
    from flows.names import new_run_id
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages.align import AlignmentModel
    from tasks.stages.base import Run

    if config.align is None:
        raise ValueError("the configuration has no section align: add `align: {}`, or give a CTC model")
    run = Run(config, new_run_id(config))
    run_plainly(run, "align")
    with tempfile.TemporaryDirectory() as folder:
        yield AlignmentModel.fetch(run.result("align").output, Path(folder))


def write_files(corpus: "AlignedCorpus", wrong: "list[tuple[AlignedUtterance, str]]", output: Path) -> list[Path]:
    """Write CTM files, TextGrids, the report and the table of all utterances; returns paths without the TextGrids'.

    Args:
        corpus: The alignments.
        wrong: Utterances whose transcripts are probably wrong, with the reasons.
        output: The folder.
    """
    from configurable.files import replace_file
    from speech.alignments import ctm_lines, distinct_names, textgrid
    from storage.corpora.table import KNOWN_COLUMNS, write_table

    grids = output / "textgrids"
    grids.mkdir(parents=True, exist_ok=True)
    names = distinct_names(alignment.id for alignment in corpus.alignments)
    tiers = [
        {"words": alignment.timed(alignment.words), corpus.units: alignment.timed(alignment.units)}
        for alignment in corpus.alignments
    ]
    files = []
    for tier in ("words", corpus.units):
        lines = (ctm_lines(name, of_utterance[tier]) for name, of_utterance in zip(names, tiers, strict=True))
        files.append(output / f"{tier}.ctm")
        replace_file(files[-1], "".join(lines).encode())
    for alignment, of_utterance in zip(corpus.alignments, tiers, strict=True):
        replace_file(grids / _grid_name(alignment.id), textgrid(alignment.duration, of_utterance).encode())
    report = output / "suspicious.csv"
    replace_file(report, _table(wrong).encode())
    everything, reasons = output / "utterances.csv", {utterance.id: reason for utterance, reason in wrong}
    rows = ((utterance, _scored(aligned, reasons)) for utterance, aligned in corpus.original())
    write_table(everything, rows, list(KNOWN_COLUMNS), ("score", "suspicious"))
    return [*files, report, everything]


def _scored(aligned: "AlignedUtterance", reasons: dict[str, str]) -> dict[str, str]:
    """Further columns of an utterance: its score, and why it is suspicious, if it is."""
    score = "" if aligned.alignment is None else f"{aligned.alignment.score:.3f}"
    return {"score": score, "suspicious": reasons.get(aligned.id, "")}


def _grid_name(utterance: str) -> str:
    """The file of an utterance's TextGrid; ids may have slashes, and each has a file of its own."""
    name, suffix = utterance.replace("%", "%25").replace("/", "%2F"), ".TextGrid"
    if len(f"{name}{suffix}".encode()) > _LONGEST_NAME:
        suffix = f"-{hashlib.sha256(utterance.encode()).hexdigest()[:16]}{suffix}"
        name = name.encode()[: _LONGEST_NAME - len(suffix)].decode(errors="ignore")
    return name + suffix


def _table(wrong: "list[tuple[AlignedUtterance, str]]") -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "reason", "score", "confidence", "duration", "transcript", "heard"])
    for utterance, reason in wrong:
        writer.writerow([utterance.id, reason, *_figures(utterance), utterance.text, utterance.heard or ""])
    return text.getvalue()


def _figures(utterance: "AlignedUtterance") -> tuple[str, str, str]:
    """Score, confidence and seconds of an alignment; empty if there is none."""
    alignment = utterance.alignment
    if alignment is None:
        return "", "", ""
    return f"{alignment.score:.3f}", f"{alignment.confidence:.3f}", f"{alignment.duration:.2f}"


def _show(wrong: "list[tuple[AlignedUtterance, str]]") -> None:
    """Table of the worst utterances, with what was said and what the model heard instead."""
    if not wrong:
        out.print("no transcript looks wrong")
        return
    out.print("Suspicious transcripts", style="italic")
    for utterance, reason in wrong[:_SHOWN]:
        score, confidence, seconds = _figures(utterance)
        figures = f"; score {score}, confidence {confidence}, {seconds} s" if score else ""
        print_line(f"{utterance.id}: {reason}{figures}", "bold")
        print_line(f"  transcript: {utterance.text}")
        if utterance.heard is not None:
            print_line(f"  heard:      {utterance.heard or '(nothing)'}")
    if len(wrong) > _SHOWN:
        say(f"{len(wrong) - _SHOWN} more are in suspicious.csv")
