"""`starling transcribe`: text from audio files, by a registered model or a bundle."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, err, friendly, out, print_json

AUDIO = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".sph"}


@friendly
def transcribe(
    files: Annotated[list[Path], typer.Argument(help="Audio files, or folders of them.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", help="models:/NAME@ALIAS, models:/NAME/VERSION, or a bundle's folder.")
    ] = "models:/starling-demo@champion",
    json_output: JsonOption = False,
) -> None:
    """Recognize speech in audio files.

    A file that cannot be read gets its error and stops no other; the exit status is then 1.
    """
    from speech.transcriber import Transcriber

    paths = find_audio(files)
    transcriber = Transcriber(fetch_model(model))
    entries: list[dict[str, Any]] = []
    for path in paths:
        found = transcriber.transcribe([path])[0]
        entries.append({"file": str(path), **vars(found)})
        if json_output:
            continue
        if found.error:
            err.print(f"[red]{path}: {found.error}[/red]", highlight=False, soft_wrap=True)
        else:
            prefix = f"{path}: " if len(paths) > 1 else ""
            out.print(f"{prefix}{found.text}", highlight=False, markup=False, soft_wrap=True)
    if json_output:
        print_json({"model": model, "files": entries})
    if any(entry["error"] for entry in entries):
        raise typer.Exit(1)


def find_audio(files: list[Path]) -> list[Path]:
    """The files themselves, and every audio file below the folders.

    Raises:
        ValueError: If there is none.
    """
    found: list[Path] = []
    for path in files:
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in AUDIO) if path.is_dir() else [path]
        found += inside
    if not found:
        raise ValueError(f"there is no audio file in {', '.join(map(str, files))}: give files or folders of {AUDIO}")
    return found


def fetch_model(model: str) -> Path:
    """The local folder of a model's bundle.

    Raises:
        ValueError: If the registry has no such model.
    """
    if not model.startswith("models:/"):
        return Path(model)
    import mlflow
    from mlflow.exceptions import MlflowException

    from flows.services import connect_mlflow
    from tasks.tracking import client

    connect_mlflow()
    client()
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=model))
    except (MlflowException, OSError) as error:
        raise ValueError(
            f"{model} is not in the registry at {mlflow.get_tracking_uri()}: run a pipeline first (`starling run "
            f"configs/demo.yaml`), or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    return next(local.rglob("bundle.json")).parent
