"""`starling corpus`: lists corpus layouts, inspects corpora, and fetches public ones."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from flows.cli import corpus_download
from flows.cli.commands import CommandGroup
from flows.cli.common import JsonOption, friendly, out, print_json
from flows.cli.configs import complete_path

app = CommandGroup("Inspect corpora, and fetch public ones.")

app.command("download")(corpus_download.download)

LAYOUTS = {
    "librispeech": "SPEAKER/CHAPTER/*.flac (or opus, ogg, wav, mp3) with SPEAKER-CHAPTER.trans.txt",
    "mls": "Multilingual LibriSpeech: LANGUAGE/PART/transcripts.txt and audio/SPEAKER/BOOK/*",
    "commonvoice": "Common Voice: clips/*.mp3 with train.tsv, dev.tsv, test.tsv, validated.tsv",
    "peoples_speech": "People's Speech: manifests of JSON lines with training_data; audio in folders or tars",
    "tedlium": "TED-LIUM 1 to 3: stm/*.stm with sph/*.sph (or wav, flac)",
    "an4": "AN4 and SphinxTrain's layout: etc/*.fileids, etc/*.transcription, wav/ or raw/",
    "telephone": "Switchboard, Fisher and the like as a Kaldi data folder with segments and two channels",
    "speechocean762": "speechocean762: Kaldi data folders train and test beside WAVE/",
    "fsdd": "Free Spoken Digit Dataset: recordings/DIGIT_SPEAKER_TAKE.wav",
    "gigaspeech": "GigaSpeech.json: long recordings with segments",
    "kaldi": "a Kaldi data folder: wav.scp, text, utt2spk, optionally segments",
    "nemo": "NeMo's manifest: JSON lines with audio_filepath, duration, text, offset; tarred or not",
    "lhotse": "lhotse's and icefall's recordings and supervisions, or cuts: *.jsonl, *.jsonl.gz",
    "table": "CSV, TSV, JSON lines or Parquet with audio path, text, and optionally speaker, id, split, …",
    "webdataset": "uncompressed tars of KEY.flac (wav, …) with KEY.json, KEY.txt or KEY.cls",
    "sidecar": "a folder of audio files, each with a text file of its name (NAME.wav, NAME.txt)",
    "synthetic": "spoken commands, synthesized by eSpeak NG; needs no files",
}


@app.command("list")
@friendly
def list_layouts(json_output: JsonOption = False) -> None:
    """List the supported corpus layouts, and the corpora that `starling corpus download` fetches."""
    from storage.corpora import READERS, reader_class
    from storage.corpora.catalog import CATALOG

    options = {kind: sorted(reader_class(kind).OPTIONS) for kind in READERS}
    if json_output:
        print_json(
            {
                "layouts": LAYOUTS,
                "options": options,
                "downloads": {
                    name: {"kind": d.kind, "licence": d.licence, "link": d.link, "parts": _sizes(d)}
                    for name, d in CATALOG.items()
                },
            }
        )
        return
    table = Table("kind", "layout", "options", header_style="bold", title="Layouts", title_justify="left")
    for kind, layout in LAYOUTS.items():
        table.add_row(kind, layout, ", ".join(options.get(kind, ())))
    out.print(table)
    table = Table(
        "corpus",
        "licence",
        Column("link", overflow="fold"),
        "parts (MB)",
        header_style="bold",
        title="Downloads",
        title_justify="left",
    )
    for name, download in CATALOG.items():
        parts = ", ".join(f"{part} {size:,}" for part, size in _sizes(download).items())
        table.add_row(name, download.licence, download.link, parts)
    out.print(table)


def _sizes(download: Any) -> dict[str, int]:
    """Size of each part in megabytes."""
    return {part: archive.size for part, archive in download.parts.items()}


@app.command("inspect")
@friendly
def inspect(
    path: Annotated[
        Path, typer.Argument(help="Folder or table of a corpus.", show_default=False, autocompletion=complete_path)
    ],
    kind: Annotated[str, typer.Option("--kind", "-k", help="Layout; detected if left out.")] = "",
    limit: Annotated[int, typer.Option("--limit", help="Read only this many utterances; 0: all.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Read a corpus, check every utterance, and report what would be used and what would be quarantined."""
    from storage.corpora import guess_kind, reader_class
    from tasks.config.pipeline import DataConfig
    from tasks.dataset.policies import DuplicatesConfig
    from tasks.dataset.sources import SourceConfig
    from tasks.stages.prepare import Checked, check_all, open_source, select, worker_count

    kind = kind or guess_kind(str(path))
    reader_class(kind)  # its error for an unknown kind suggests the closest one
    source = SourceConfig.model_validate({"kind": kind, "path": str(path.resolve()), "limit": limit})
    reader = open_source(source)
    data = DataConfig(sources=(source,), duplicates=DuplicatesConfig(fingerprint=False))
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
    """Statistics of a corpus: counts, reasons for quarantine, durations, sample rates."""
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
