"""`starling lexicon`: how a configuration's words are pronounced, and what looks wrong."""

import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import normalize

import typer
from rich.table import Table

from configurable.wording import counted
from flows.cli.commands import CommandGroup
from flows.cli.common import JsonOption, SetOption, friendly, interruptible, out, print_json, progress_bars, say
from flows.cli.configs import ConfigArgument, complete_path
from tasks.figures import percent

if TYPE_CHECKING:
    from speech.lexicon import Built, Coverage
    from speech.lexicon.check import Suspicion
    from tasks.config.pipeline import PipelineConfig

app = CommandGroup("Look at pronunciations.")
_DECODER, _LM = "decoder's words", "language model's words"
_SHOWN = 10
"""Suspicious entries of each kind that are shown."""


@app.command("show")
@friendly
def show(
    config: ConfigArgument,
    words: Annotated[
        list[str] | None, typer.Argument(help="Words to pronounce; without any, phones with counts.")
    ] = None,
    overrides: SetOption = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write Kaldi's lexicon.txt, too.", autocompletion=complete_path),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write lexiconp.txt, with probabilities.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Show a configuration's lexicon: its phones with counts, or the pronunciations of some words."""
    words = [normalize("NFC", word) for word in words or []]  # as transcripts are
    built, _ = _build(config, overrides or [], words)
    if write is not None:
        built.lexicon.write(write, probabilities)
    pronunciations = {word: [" ".join(pronunciation.phones) for pronunciation in built.lexicon[word]] for word in words}
    phones = dict(built.lexicon.phones())
    if json_output:
        print_json({"record": built.record(), "phones": phones, "words": pronunciations})
        return
    for word, variants in pronunciations.items():
        origin = built.coverage.origins[word]
        for phones_text in variants:
            out.print(f"{word}  {phones_text}" + ("" if origin == "file" else f"  ({origin})"), highlight=False)
    if not words:
        table = Table(
            "phone", "count", title=f"{len(built.lexicon):,} words, {len(phones)} phones", title_justify="left"
        )
        for phone, count in phones.items():
            table.add_row(phone, f"{count:,}")
        out.print(table)
    _say_notes(built)
    _say_quarantined(built)


@app.command("check")
@friendly
def check(
    config: ConfigArgument,
    overrides: SetOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all suspicious entries.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Say which words have a pronunciation (of transcripts, decoder, language model), and which entries look wrong."""
    from speech.lexicon.check import suspicions

    built, parts = _build(config, overrides or [], [])
    coverages = {name: built.coverage.part(counts) for name, counts in parts.items()}
    suspicious = suspicions(built)
    if json_output:
        sets = {name: coverage.to_dict() for name, coverage in coverages.items()}
        print_json(
            {"record": built.record(), "sets": sets, "suspicious": [suspicion.to_dict() for suspicion in suspicious]}
        )
        return
    out.print(_coverage_table(coverages))
    if built.coverage.unknown:
        named = ", ".join(f"{word} ({count})" for word, count in built.coverage.unknown.most_common(20))
        out.print(f"unknown: {named}", markup=False, highlight=False)
    if suspicious:
        _print_suspicions(suspicious, everything)
    else:
        out.print("no entry looks wrong" if built.coverage.unknown else "nothing looks wrong")
    _say_notes(built)


def _build(config_path: Path, overrides: list[str], words: list[str]) -> "tuple[Built, dict[str, Counter[str]]]":
    """The lexicon for all words of a configuration and some more, and the words by set."""
    from speech.lexicon import build_lexicon
    from tasks.config.pipeline import load_config

    with redirect_stdout(sys.stderr), interruptible():
        config = load_config(config_path, overrides)
        parts = _words(config)
        counts = sum(parts.values(), Counter(dict.fromkeys(words, 1)))
        for word in [*parts.get(_DECODER, ()), *parts.get(_LM, ())]:  # they may be in no transcript
            counts.setdefault(word, 0)
        return build_lexicon(config.lexicon, counts), parts


def _words(config: "PipelineConfig") -> dict[str, Counter[str]]:
    """Words by set, the decoder's, and the language model's; the corpora are read unless a run has done it."""
    from flows.names import new_run_id
    from tasks.dataset.words import decoder_words, transcript_words
    from tasks.stages.base import Run
    from tasks.stages.lm import coming_words
    from tasks.stages.prepare import PREPARE

    with progress_bars():
        prepared = PREPARE.execute(Run(config, new_run_id(config)))
    parts = transcript_words(prepared.output)
    listed = {_DECODER: decoder_words(config.decode), _LM: coming_words(config, prepared.output)}
    return parts | {name: Counter(dict.fromkeys(words, 0)) for name, words in listed.items() if words}


def _coverage_table(coverages: "dict[str, Coverage]") -> Table:
    """A line for each set and origin, with shares of all words and of running words."""
    table = Table("set", "from", "words", "", "running words", "", title="Coverage", title_justify="left")
    for name, coverage in coverages.items():
        for origin, types in sorted(coverage.types.items()):
            running, total = coverage.running[origin], coverage.running.total()
            occurrences = (f"{running:,}", percent(running / total)) if total else ("–", "–")
            table.add_row(name, origin, f"{types:,}", percent(types / coverage.types.total(), 1), *occurrences)
    return table


def _print_suspicions(suspicious: "list[Suspicion]", everything: bool) -> None:
    counts = Counter(suspicion.kind for suspicion in suspicious)
    shown: Counter[str] = Counter()
    table = Table("what", "entry", "detail", title="Suspicious entries", title_justify="left")
    for suspicion in suspicious:
        shown[suspicion.kind] += 1
        if everything or shown[suspicion.kind] <= _SHOWN:
            table.add_row(suspicion.kind, suspicion.word, suspicion.detail)
    out.print(table)
    if not everything and any(count > _SHOWN for count in counts.values()):
        out.print(f"of {', '.join(f'{count} {kind}' for kind, count in counts.items())}; all with --all")


def _say_notes(built: Any) -> None:
    for note in built.notes:
        say(note)


def _say_quarantined(built: Any) -> None:
    if built.bad_lines:
        say(f"quarantined: {counted(len(built.bad_lines), 'line')} of the file; `starling lexicon check` names them")
