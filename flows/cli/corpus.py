"""`starling corpus`: lists corpus layouts, inspects corpora, and fetches public ones."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from flows.cli import corpus_download
from flows.cli.commands import CommandGroup
from flows.cli.common import JsonOption, friendly, out, print_json, print_line
from flows.cli.configs import complete_config_or_file, complete_path
from flows.cli.found_corpus import HELP, corpus_and_seed
from flows.cli.tables import print_table
from tasks.figures import speakers_text

if TYPE_CHECKING:
    from storage.corpora import Utterance
    from tasks.config.data import DataConfig
    from tasks.dataset.sets import Unused
    from tasks.stages.prepare import Checked

app = CommandGroup("Inspect corpora, and fetch public ones.")

app.command("download")(corpus_download.download)


@app.command("list")
@friendly
def list_layouts(json_output: JsonOption = False) -> None:
    """List the supported corpus layouts, and the corpora that `starling corpus download` fetches."""
    from storage.corpora import READERS, reader_class
    from storage.corpora.catalog import CATALOG
    from tasks.dataset.sources import layouts

    plain_layouts = {kind: layout.replace("`", "") for kind, layout in layouts().items()}
    options = {kind: sorted(reader_class(kind).OPTIONS) for kind in READERS}
    if json_output:
        print_json(
            {
                "layouts": plain_layouts,
                "options": options,
                "downloads": {
                    name: {"kind": d.kind, "licence": d.licence, "link": d.link, "parts": _sizes(d)}
                    for name, d in CATALOG.items()
                },
            }
        )
        return
    columns = {"kind": [*plain_layouts], "layout": [*plain_layouts.values()]}
    columns["options"] = [", ".join(options.get(kind, ())) for kind in plain_layouts]
    print_table(columns, ("options",), "Layouts")
    columns = {"corpus": [*CATALOG], "licence": [corpus.licence for corpus in CATALOG.values()]}
    columns["link"] = [corpus.link for corpus in CATALOG.values()]
    parts = [_sizes(corpus) for corpus in CATALOG.values()]
    columns["parts (MB)"] = [", ".join(f"{part} {size:,}" for part, size in own.items()) for own in parts]
    print_table(columns, ("link", "licence"), "Downloads")


def _sizes(download: Any) -> dict[str, int]:
    """Size of each part in megabytes."""
    return {part: archive.size for part, archive in download.parts.items()}


@app.command("inspect")
@friendly
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="CORPUS", help=HELP, show_default=False, autocompletion=complete_config_or_file)
    ],
    kind: Annotated[str, typer.Option("--kind", "-k", help="Layout. Default: detected.")] = "",
    limit: Annotated[int, typer.Option("--limit", help="Read only this many utterances; 0: all.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Read a corpus, check every utterance, and report what would be used and what would be quarantined."""
    from tasks.config.pipeline import worker_count
    from tasks.dataset.policies import DuplicatesConfig
    from tasks.dataset.sets import Unused
    from tasks.stages.prepare import Checked, check_all, leaves_out, unused_entries
    from tasks.stages.sources import left_out, open_source, select

    data, seed = corpus_and_seed(path, kind)
    data = data.model_copy(update={"duplicates": DuplicatesConfig(fingerprint=False)})
    readers = [open_source(source) for source in data.sources]
    numbers, unused = deque[int](), Unused()

    def selected() -> Iterator[tuple[int, "Utterance"]]:
        for number, (source, reader) in enumerate(zip(data.sources, readers, strict=True)):
            for utterance in select(number, source, reader):
                yield number, utterance

    def offered() -> Iterator["Utterance"]:
        for number, utterance in islice(selected(), limit or None):
            if not leaves_out(number, data.sources[number], utterance, seed, unused):
                numbers.append(number)
                yield utterance

    good: list[tuple[int, Checked]] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for result in check_all(offered(), data, worker_count(0)):
        number = numbers.popleft()  # results are in the order of the utterances
        if isinstance(result, Checked):
            good.append((number, result))
        else:
            reasons[result.reason] += 1
            examples.setdefault(result.reason, f"{result.id}: {result.detail}")
    for name, reason, detail in chain.from_iterable(reader.problems for reader in readers):
        reasons[reason] += 1
        examples.setdefault(reason, f"{name}: {detail}")
    used, undivided = leave_out(good, data, seed, unused)
    kinds = ", ".join(dict.fromkeys(source.kind for source in data.sources))
    report = describe(kinds, used, reasons, unused.total()) | {"examples": examples} | left_out(readers)
    report |= {"unused": unused_entries(data, unused), "undivided": unused_entries(data, undivided)}
    if json_output:
        print_json(report)
        return
    print_inspected(path, report)


def leave_out(
    good: "list[tuple[int, Checked]]", data: "DataConfig", seed: int, unused: "Unused"
) -> "tuple[list[Checked], Unused]":
    """Leave out the training utterances that `min_confidence` or `share` of their source keep out.

    Args:
        good: Usable utterances, each with the position of its source.
        data: The sources.
        seed: Seed of the shares.
        unused: Gets the numbers of those that are left out.

    Returns:
        The others, and the numbers of those among them that are left out, too, if they become training utterances when
        a run divides what has no set, or takes a validation set from the corpus' own training set.
    """
    from tasks.dataset.sets import VALID, Unused, kept_out_by
    from tasks.dataset.splits import TRAIN

    parts = {checked.utterance.split or "" for _, checked in good}
    divided = {""} if "" in parts or VALID in parts or not data.valid_share else {"", TRAIN}
    used, undivided = list[Any](), Unused()
    for number, checked in good:
        utterance, source = checked.utterance, data.sources[number]
        part = utterance.split or ""
        field = kept_out_by(source, utterance.id, utterance.confidence, seed) if part in ("", TRAIN) else ""
        if field and (part not in divided or source.set == TRAIN):
            unused[number, field] += 1
            continue
        used.append(checked)
        if field:
            undivided[number, field] += 1
    return used, undivided


def describe(kind: str, good: list[Any], reasons: Counter[str], unused: int = 0) -> dict[str, Any]:
    """Statistics of a corpus, as a whole and by set.

    Args:
        kind: Layout.
        good: Utterances that are used (`Checked`).
        reasons: Number of entries that cannot be used, by reason.
        unused: Number of training utterances that their source leaves out.
    """
    refused = sum(reasons.values())
    sets: dict[str, list[Any]] = {}
    for entry in good:
        sets.setdefault(entry.utterance.split or "", []).append(entry)
    return {
        "kind": kind,
        "read": len(good) + refused + unused,
        "written": len(good),
        "quarantined": refused,
        "reasons": dict(reasons),
        **_figures(good),
        "sets": {name: {"utterances": len(members), **_figures(members)} for name, members in sorted(sets.items())},
    }


def _figures(good: list[Any]) -> dict[str, Any]:
    seconds = sorted(entry.duration for entry in good)
    return {
        **_speakers(good),
        "hours": round(sum(seconds) / 3600, 3),
        "median_seconds": round(seconds[len(seconds) // 2], 2) if seconds else 0.0,
        "longest_seconds": round(seconds[-1], 2) if seconds else 0.0,
        "words": sum(len(entry.text.split()) for entry in good),
        "different_words": len({word for entry in good for word in entry.text.split()}),
        "sample_rates": {str(k): v for k, v in sorted(Counter(entry.sample_rate for entry in good).items())},
    }


def _speakers(good: list[Any]) -> dict[str, Any]:
    """Number of speakers, None if it is unknown, and of utterances that name none, if there are any."""
    named = {entry.utterance.speaker for entry in good} - {""}
    unnamed = sum(not entry.utterance.speaker for entry in good)
    return {"speakers": len(named) or (None if unnamed else 0)} | ({"unnamed": unnamed} if unnamed else {})


def print_inspected(path: Path, report: dict[str, Any]) -> None:
    """Print the statistics of a corpus in words, by set, and why entries cannot be used."""
    from tasks.stages.quarantined import left_out_lines

    usable = f"{report['written']:,} of {report['read']:,} utterances can be used"
    print_line(f"{path}: layout {report['kind']}; {usable}")
    if report["sets"]:
        out.print(_set_table(report))
    if report["reasons"]:
        table = Table("reason", "not used", Column("the first", overflow="fold"), header_style="bold")
        for reason, count in sorted(report["reasons"].items(), key=lambda item: -item[1]):
            table.add_row(reason, f"{count:,}", escape(report.get("examples", {}).get(reason, "")))
        out.print(table)
        out.print("docs/corpora.md explains the reasons", highlight=False)
    for line in left_out_lines(report):
        print_line(line)
    if set(report["sets"]) == {""}:
        out.print("The corpus has no sets: a run divides it into training, validation and test.", soft_wrap=True)


def _set_table(report: dict[str, Any]) -> Table:
    """Figures of each set, one column a set: many figures and few sets fit a terminal best so."""
    sets = {name or "no set": figures for name, figures in report["sets"].items()}
    if len(sets) > 1:
        sets["all"] = report | {"utterances": report["written"]}
    table = Table("set", header_style="bold")
    for name in sets:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "utterances": lambda figures: f"{figures['utterances']:,}",
        "speakers": lambda figures: speakers_text(figures["speakers"], figures.get("unnamed", 0)),
        "hours": lambda figures: f"{figures['hours']:.2f}",
        "median duration (s)": lambda figures: f"{figures['median_seconds']:.1f}",
        "longest (s)": lambda figures: f"{figures['longest_seconds']:.1f}",
        "words": lambda figures: f"{figures['words']:,}",
        "different words": lambda figures: f"{figures['different_words']:,}",
        "sample rate (Hz)": lambda figures: _rates(figures["sample_rates"]),
    }
    for label, shown in rows.items():
        table.add_row(label, *(shown(figures) for figures in sets.values()))
    return table


def _rates(counts: dict[str, int]) -> str:
    """Sample rates; with the number of utterances if there are several."""
    if len(counts) == 1:
        return f"{int(next(iter(counts))):,}"
    return "\n".join(f"{int(rate):,} in {count:,}" for rate, count in counts.items())


@app.command("collected")
@friendly
def collected(
    folder: Annotated[
        Path, typer.Argument(help="Folder of `starling serve MODEL --collect FOLDER`.", autocompletion=complete_path)
    ],
    json_output: JsonOption = False,
) -> None:
    """Offer what a server has collected for transcription: adds new utterances to FOLDER/metadata.csv.

    Correct the column text there, and put an x into the column checked. What is there already stays as it is.
    """
    from recognition.serving.collecting import CHECKED, MARK, offer_rows

    made = offer_rows(folder)
    if json_output:
        print_json(asdict(made) | {"path": str(made.path)})
        return
    print_line(f"{made.path}: {made.new:,} new utterances of {made.rows:,}; {made.checked:,} are checked")
    if made.other_marks:
        marks = ", ".join(map(repr, made.other_marks[:5]))
        print_line(f"the column {CHECKED} also has {marks}: only rows with {MARK} are read")
    if made.checked:
        source = f"{{kind: table, path: {folder.resolve()}, where: {{{CHECKED}: {MARK}}}, set: train}}"
        print_line(f"as a source of a configuration: {source}")
