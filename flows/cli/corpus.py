"""`starling corpus`: which corpus layouts there are, and what a corpus holds."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.cli.common import JsonOption, friendly, out, print_json

app = typer.Typer(help="Look at corpora.", no_args_is_help=True)

LAYOUTS = {
    "librispeech": "SPEAKER/CHAPTER/*.flac (or opus, ogg, wav, mp3) with SPEAKER-CHAPTER.trans.txt",
    "kaldi": "a Kaldi data folder: wav.scp, text, utt2spk, optionally segments",
    "table": "CSV, TSV or JSON lines with audio path, text, and optionally speaker, id, split, …",
    "synthetic": "spoken commands, synthesized by eSpeak NG; needs no files",
}


@app.command("list")
@friendly
def list_layouts(json_output: JsonOption = False) -> None:
    """List the corpus layouts that can be read."""
    if json_output:
        print_json({"layouts": LAYOUTS})
        return
    table = Table("kind", "layout", header_style="bold")
    for kind, layout in LAYOUTS.items():
        table.add_row(kind, layout)
    out.print(table)


@app.command("inspect")
@friendly
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder or table of a corpus.", show_default=False)],
    kind: Annotated[str, typer.Option("--kind", "-k", help="Layout; found out by itself if left out.")] = "",
    limit: Annotated[int, typer.Option("--limit", help="Look at the first so many utterances; 0 is all.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Read a corpus, check every utterance, and say what would be used and what would be quarantined."""
    from storage.corpora import guess_kind, reader_class
    from tasks.config import DataConfig, SourceConfig
    from tasks.prepare import Checked, check_all, open_source, select, worker_count

    kind = kind or guess_kind(str(path))
    reader_class(kind)  # an unknown kind is answered with the nearest right one
    source = SourceConfig.model_validate({"kind": kind, "path": str(path.resolve()), "limit": limit})
    reader = open_source(source)
    data = DataConfig(sources=(source,))
    good: list[Checked] = []
    reasons: Counter[str] = Counter()
    for result in check_all(select(source, reader), data, worker_count(0)):
        if isinstance(result, Checked):
            good.append(result)
        else:
            reasons[result.reason] += 1
    reasons.update(reason for _, reason, _ in reader.problems)
    report = describe(kind, good, reasons)
    if json_output:
        print_json(report)
        return
    table = Table(title=str(path), title_justify="left", show_header=False)
    for name, value in report.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, text or "none")
    out.print(table)


def describe(kind: str, good: list[Any], reasons: Counter[str]) -> dict[str, Any]:
    """Counts of a corpus."""
    seconds = sorted(entry.duration for entry in good)
    refused = sum(reasons.values())
    return {
        "kind": kind,
        "read": len(good) + refused,
        "written": len(good),
        "quarantined": refused,
        "reasons": dict(reasons),
        "speakers": len({entry.utterance.speaker for entry in good}),
        "hours": round(sum(seconds) / 3600, 3),
        "median_seconds": round(seconds[len(seconds) // 2], 2) if seconds else 0.0,
        "longest_seconds": round(seconds[-1], 2) if seconds else 0.0,
        "words": sum(len(entry.text.split()) for entry in good),
        "sample_rates": {str(k): v for k, v in sorted(Counter(entry.sample_rate for entry in good).items())},
    }
