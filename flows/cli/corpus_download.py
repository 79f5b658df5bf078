"""`starling corpus download`: fetch a public corpus."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import JsonOption, friendly, out, print_json, progress_bars
from flows.cli.configs import complete_path


@friendly
def download(
    name: Annotated[str, typer.Argument(help="Corpus, as `starling corpus list` names it.", show_default=False)],
    to: Annotated[
        Path, typer.Option("--to", help="Parent of the corpus' folder.", autocompletion=complete_path)
    ] = Path("corpora"),
    part: Annotated[
        list[str] | None, typer.Option("--part", "-p", help="Only this part; repeatable. Default: the usual ones.")
    ] = None,
    keep_archives: Annotated[bool, typer.Option("--keep-archives", help="Keep archives after unpacking.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Fetch a public corpus: resumes, checks the digest, unpacks safely, and marks it when complete."""
    from storage.corpora.download import download_corpus
    from tasks.stages import progress

    def tell(file: str, done: int, total: int) -> None:
        progress.report("download", done / 1e6, total / 1e6, f"{file} (MB)")

    with progress_bars():
        downloaded = download_corpus(
            name, to.expanduser().resolve(), part or (), keep_archives=keep_archives, on_progress=tell
        )
    if json_output:
        print_json(downloaded)
        return
    for label, entry in downloaded["parts"].items():
        state = "already there" if entry["present"] else f"{entry['files']:,} files, {entry['bytes'] / 1e6:,.0f} MB"
        out.print(f"{name} {label}: {state}", highlight=False)
    out.print(
        f"Use it as a source: kind: {downloaded['kind']}, path: {downloaded['path']}", soft_wrap=True, highlight=False
    )
