"""`starling align`: when each word and phone of transcribed speech is spoken, and which transcripts look wrong."""

import csv
import io
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
    from recognition.timings import TimedUtterance
    from tasks.forced_alignment import Alignments
    from tasks.stages.align_model import AlignmentModel

_SHOWN = 20

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

    Writes words.ctm, phones.ctm (or tokens.ctm), a TextGrid for each utterance, and suspicious.csv. A configuration's
    model is trained first if necessary.
    """
    with redirect_stdout(sys.stderr), interruptible(), progress_bars():
        found = _aligned(model, data, overrides or [], device)
    files = write_files(found, output, deviations)
    suspicious = found.suspicious(deviations)
    summary: dict[str, Any] = {
        "aligned": len(found.found),
        "failed": len(found.failures),
        "quarantined": found.quarantined,
        "suspicious": [
            {"id": name, "reason": reason, "transcript": found.texts.get(name, ""), "heard": found.heard.get(name)}
            for name, reason, _ in suspicious
        ],
        "files": [str(path) for path in files],
    }
    if json_output:
        print_json(summary)
        return
    _show(suspicious, found.texts, found.heard)
    counts = ", ".join(f"{summary[name]:,} {name}" for name in ("aligned", "failed", "quarantined"))
    print_line(f"{counts}; files in {output}")


def _aligned(model: str, data: Path, overrides: list[str], device: str) -> "Alignments":
    from flows.models import fetch_model, model_uri
    from tasks.forced_alignment import align_with_ctc, align_with_gmm
    from tasks.stages import progress
    from tasks.stages.align_model import AlignmentModel, is_alignment_model

    def report(done: float, total: float) -> None:
        progress.report("align", done, total, data.name)

    sources = corpus_data(data, sets=False).sources
    if model.endswith(YAML_SUFFIXES):
        from tasks.config.pipeline import load_config

        config = load_config(Path(model), overrides)
        with _model_of(config) as found:
            return align_with_gmm(found, sources, report, config)
    if overrides:
        raise ValueError(f"--set overrides fields of a configuration, and {model} is a model: remove --set")
    if is_alignment_model(Path(model)):
        return align_with_gmm(AlignmentModel.load(Path(model)), sources, report)
    return align_with_ctc(fetch_model(model_uri(model)), sources, device, report)


@contextmanager
def _model_of(config: Any) -> "Iterator[AlignmentModel]":
    """The model of a configuration's stage align, which runs if it has not."""
    from flows.names import new_run_id
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages.align_model import AlignmentModel
    from tasks.stages.base import Run

    if config.align is None:
        raise ValueError("the configuration has no section align: add `align: {}`, or give a CTC model")
    run = Run(config, new_run_id(config))
    run_plainly(run, "align")
    with tempfile.TemporaryDirectory() as folder:
        yield AlignmentModel.fetch(run.result("align").output, Path(folder))


def write_files(found: "Alignments", output: Path, deviations: float) -> list[Path]:
    """Write CTM files, TextGrids and the report; returns their paths without the TextGrids'."""
    from configurable.files import replace_file
    from recognition.timings import ctm_lines, distinct_names, textgrid

    grids = output / "textgrids"
    grids.mkdir(parents=True, exist_ok=True)
    words, units = (output / f"{name}.ctm" for name in ("words", found.units))
    named = list(zip(distinct_names(one.id for one in found.found), found.found, strict=True))
    replace_file(words, "".join(ctm_lines(name, one.words) for name, one in named).encode())
    replace_file(units, "".join(ctm_lines(name, one.units) for name, one in named).encode())
    for one in found.found:
        text = textgrid(one.duration, {"words": one.words, found.units: one.units})
        replace_file(grids / _grid_name(one.id), text.encode())
    report = output / "suspicious.csv"
    replace_file(report, _table(found, deviations).encode())
    return [words, units, report]


def _grid_name(utterance: str) -> str:
    """The file of an utterance's TextGrid; ids may have slashes, and each has a file of its own."""
    return utterance.replace("%", "%25").replace("/", "%2F") + ".TextGrid"


def _table(found: "Alignments", deviations: float) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "reason", "score", "confidence", "duration", "transcript", "heard"])
    for name, reason, one in found.suspicious(deviations):
        writer.writerow([name, reason, *_figures(one), found.texts.get(name, ""), found.heard.get(name, "")])
    return text.getvalue()


def _figures(one: "TimedUtterance | None") -> tuple[str, str, str]:
    return (f"{one.score:.3f}", f"{one.confidence:.3f}", f"{one.duration:.2f}") if one else ("", "", "")


def _show(
    suspicious: "list[tuple[str, str, TimedUtterance | None]]", texts: dict[str, str], heard: dict[str, str]
) -> None:
    """Table of the worst utterances, with what was said and what the model heard instead."""
    if not suspicious:
        out.print("no transcript looks wrong")
        return
    out.print("Suspicious transcripts", style="italic")
    for name, reason, one in suspicious[:_SHOWN]:
        score, confidence, seconds = _figures(one)
        figures = f"; score {score}, confidence {confidence}, {seconds} s" if one else ""
        print_line(f"{name}: {reason}{figures}", "bold")
        print_line(f"  transcript: {texts.get(name, '')}")
        if name in heard:
            print_line(f"  heard:      {heard[name] or '(nothing)'}")
    if len(suspicious) > _SHOWN:
        say(f"{len(suspicious) - _SHOWN} more are in suspicious.csv")
