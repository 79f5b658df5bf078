"""`starling init`: a first configuration for one's own recordings."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configurable.wording import counted
from flows.cli.common import JsonOption, friendly, print_json, print_line, say
from flows.cli.configs import complete_path
from tasks.figures import percent

if TYPE_CHECKING:
    from tasks.dataset.discovery import FoundCorpus, FoundSource
    from tasks.stages.starter import Survey

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="FIELD=COLUMN",
        help="Column of the table for a field, such as speaker=who. Default: guessed by its name. Repeatable.",
    ),
]


@friendly
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of recordings with transcripts; or a table, a manifest, a Kaldi data folder.",
            show_default=False,
            autocompletion=complete_path,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: NAME.yaml here.", autocompletion=complete_path),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the model. Default: the folder's.")] = "",
    language: Annotated[
        str, typer.Option("--language", help="Language of the transcripts, such as de. Default: guessed.")
    ] = "",
    column: ColumnOption = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(
            "--pretrained",
            help="Folder of a pretrained model in Hugging Face's format that training begins with, such as Whisper.",
            autocompletion=complete_path,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Look at your recordings, say what was found, and write a commented configuration that runs."""
    from tasks.config.pipeline import load_config
    from tasks.dataset.discovery import find_sources
    from tasks.dataset.sources import checked_name
    from tasks.stages.starter import Starter, begin_with, config_name, survey

    name = checked_name(name) or config_name(folder.expanduser())
    path = output or Path(f"{name}.yaml")
    if path.exists() and not force:
        raise ValueError(f"{path} exists: name another file with --output, or overwrite it with --force")
    begins = begin_with(pretrained.expanduser().resolve()) if pretrained else None
    corpus = find_sources(folder.expanduser(), columns=_columns(column or []))
    surveyed = survey(corpus.sources, language)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Starter(name, corpus.sources, surveyed, begins).text(path.parent, path.name), encoding="utf-8")
    load_config(path)  # a mistake of ours shows here, not in the user's first run
    if json_output:
        documents = [source.document() | {"path": str(source.path), "set": source.set} for source in corpus.sources]
        print_json({"config": str(path), "sources": documents, "survey": asdict(surveyed)})
        return
    for line in (*_said(corpus, surveyed, begins is not None), f"written: {path}"):
        print_line(line)
    if not surveyed.sets.keys() & {"", "train"}:
        say("there is no training data: score a model with `starling evaluate MODEL CORPUS`")
        return
    print_line(f"next:    starling run {path}")


def _columns(given: list[str]) -> dict[str, str]:
    """Columns by field.

    Raises:
        ValueError: If one is not of the form FIELD=COLUMN.
    """
    pairs = [text.partition("=") for text in given]
    if wrong := next((field for field, _, name in pairs if not (field and name)), None):
        raise ValueError(f"--column {wrong}: give a field and the column that it is in, such as speaker=who")
    return {field: name for field, _, name in pairs}


def _speaker_hint(sources: "list[FoundSource]") -> str:
    """What to do if a column that is not used has the speakers; empty if there is no such column."""
    unused = list(dict.fromkeys(name for source in sources for name in source.unused))
    if not unused:
        return ""
    shown = ", ".join(unused)
    what = f"column {shown} is" if len(unused) == 1 else f"columns {shown} are"
    column = unused[0] if len(unused) == 1 else "COLUMN"
    return f"the {what} not used; if one has the speakers, add --force --column speaker={column} to this command"


_TEST_HINT = (
    "if more recordings will follow, add a source with set: test to the file now: a test set that is drawn changes "
    "with them, and models that were tested on different ones cannot be compared"
)


def _said(corpus: "FoundCorpus", surveyed: "Survey", pretrained: bool) -> list[str]:
    """What was found, in words, and what to expect of a training."""
    from tasks.config.data import DataConfig
    from tasks.dataset.sets import VALID
    from tasks.dataset.splits import TRAIN
    from tasks.stages.quarantined import left_out_lines

    lines = [f"found:   {source.description()}" for source in corpus.sources]
    lines.append(
        f"         {counted(surveyed.utterances, 'utterance')}, about {surveyed.hours:.2g} hours, {surveyed.who}, "
        f"{counted(surveyed.different_words, 'different word')}, {surveyed.rates}"
    )
    if surveyed.why_language:
        lines.append(f"         language {surveyed.language}, {surveyed.why_language}: --language names another one")
    named = {name or "without a set": count for name, count in sorted(surveyed.sets.items())}
    if list(named) != ["without a set"]:
        lines.append("         " + ", ".join(f"{name} {count:,}" for name, count in named.items()))
    lines += (f"warning: {line}" for line in (*_lost(surveyed), *left_out_lines(surveyed.left_out)))
    if surveyed.too_little and not pretrained:
        lines.append(f"warning: {surveyed.too_little}")
    if surveyed.unusable > (limit := DataConfig.model_fields["max_quarantined"].default):
        lines.append(
            f"warning: about {percent(surveyed.unusable, 0)} cannot be used, and a run stops at more than "
            f"{percent(limit, 0)}: mend them, leave them out, or raise data.max_quarantined in the file"
        )
    if expected := surveyed.expected(pretrained):
        lines.append(f"expect:  {expected}")
    if corpus.warning:
        lines.append(f"warning: {corpus.warning}")
    if surveyed.speakers is None and (hint := _speaker_hint(corpus.sources)):
        lines.append(f"hint:    {hint}")
    if set(surveyed.sets) <= {"", TRAIN, VALID}:
        lines.append(f"hint:    {_TEST_HINT}")
    return lines


_LACKS = {"missing-audio": "no audio", "missing-transcript": "no transcript"}


def _lost(surveyed: "Survey") -> list[str]:
    """A line for each reason for which entries cannot be used, with the first of them."""
    from tasks.stages.quarantined import examples_text

    lines = []
    for reason, count in surveyed.lost_reasons.items():
        entries, has = ("entry", "has") if count == 1 else ("entries", "have")
        what = f"{has} {_LACKS[reason]}" if reason in _LACKS else f"cannot be used, {reason}"
        lines.append(f"{count:,} {entries} {what}: {examples_text(surveyed.lost_examples[reason], count)}")
    for reason, count in surveyed.refused.items():
        examples = examples_text(surveyed.refused_examples[reason], count)
        lines.append(f"{count:,} of {surveyed.sample:,} decoded utterances cannot be used, {reason}: {examples}")
    return lines
