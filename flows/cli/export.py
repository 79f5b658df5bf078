"""`starling export`: a model as ONNX files, for recognition without torch."""

import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, friendly, print_json, print_line
from flows.cli.configs import complete_path
from flows.cli.streams import ChunkOption


class FileFormat(StrEnum):
    """Format of the files."""

    onnx = "onnx"


class FileLayout(StrEnum):
    """What reads the files."""

    auto = "auto"
    sherpa = "sherpa-onnx"
    plain = "plain"


@friendly
def export(
    model: Annotated[
        str,
        typer.Argument(
            help="NAME (its champion), NAME@ALIAS, NAME/VERSION, models:/…, or a bundle's folder.", show_default=False
        ),
    ],
    to: Annotated[
        Path, typer.Option("--to", help="New folder for the files.", show_default=False, autocompletion=complete_path)
    ],
    kind: Annotated[FileFormat, typer.Option("--format", "-f", help="Format of the files.")] = FileFormat.onnx,
    layout: Annotated[
        FileLayout,
        typer.Option(
            "--layout",
            help="For sherpa-onnx, or plain: for onnxruntime, with the features as a file of their own. Default: for "
            "sherpa-onnx if it can run the model.",
        ),
    ] = FileLayout.auto,
    no_int8: Annotated[
        bool, typer.Option("--no-int8", help="Leave out the files with weights in int8, a fourth of the size.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Write it to recognize speech as it comes, with a state between chunks.")
    ] = False,
    chunk_ms: ChunkOption = 640,
    json_output: JsonOption = False,
) -> None:
    """Write a model as ONNX files that need no torch, with its tokens and a script that recognizes with them."""
    from flows.models import fetch_model, model_uri
    from recognition.export import check_target, export_bundle
    from tasks.tracking.model_card import exported_card

    target = to.expanduser()
    check_target(target)
    with redirect_stdout(sys.stderr):
        uri = model_uri(model)
        bundle = fetch_model(uri)
        about, card = exported_card(uri)
        chosen: Any = None if layout is FileLayout.auto else layout.value
        chunk = chunk_ms if stream else 0.0
        described = export_bundle(bundle, target, chosen, not no_int8, about, card, chunk)
    if json_output:
        print_json({"folder": str(to), **described})
        return
    how = f", in chunks of {described['stream']['chunk_ms']:g} ms" if stream else ""
    print_line(f"{to}: {described['system']} model for {described['layout']}{how}")
    for name, facts in described["files"].items():
        print_line(f"  {name:<20} {facts['bytes'] / 1e6:8.1f} MB, differs from torch by {facts['difference']:.1g}")
    print_line(f"recognize with it: python {to / 'recognize.py'} FILE.wav (README.md says more)")
