"""Names of configurations on the command line: YAML files, or those that come with the package, such as `demo`."""

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

YAML_SUFFIXES = (".yaml", ".yml")
CONFIG_SUFFIXES = (*YAML_SUFFIXES, ".json")


def packaged_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    folder = Path(str(files("starling"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(path: Path | None) -> Path | None:
    """The file of a configuration that is given as a path or as a packaged name.

    A file of that name comes first. A path that does not exist is returned as it is.

    Raises:
        BadParameter: If a bare word is neither a file nor a packaged configuration, or if it is a folder.
    """
    if path is None or path.is_file() or len(path.parts) > 1 or path.suffix in CONFIG_SUFFIXES:
        return path
    packaged = packaged_configs()
    if path.name in packaged:
        return packaged[path.name]
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: give a YAML file, or let `starling init {path}` write one")
    near = get_close_matches(path.name, packaged, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise typer.BadParameter(
        f"{str(path)!r} is neither a file nor a packaged configuration ({', '.join(packaged)}){hint}"
    )


def find_configs(paths: list[Path] | None) -> list[Path] | None:
    """The files of several configurations, as `find_config` finds each."""
    return [config for path in paths if (config := find_config(path)) is not None] if paths else paths


def complete_path(incomplete: str) -> Iterator[str]:
    """Files and folders that a shell's unfinished word may mean; folders end in a slash."""
    _, _, start = incomplete.rpartition("/")
    prefix = incomplete[: len(incomplete) - len(start)]
    folder = Path(prefix or ".").expanduser()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            yield f"{prefix}{path.name}{'/' if path.is_dir() else ''}"


def complete_config(incomplete: str) -> Iterator[str]:
    """Packaged configurations, YAML files and folders that an unfinished word may mean."""
    yield from (name for name in packaged_configs() if name.startswith(incomplete))
    for path in complete_path(incomplete):
        if path.endswith(("/", *CONFIG_SUFFIXES)):
            yield path


def complete_config_or_file(incomplete: str) -> Iterator[str]:
    """Packaged configurations, and files of any kind and folders, that an unfinished word may mean."""
    yield from (name for name in packaged_configs() if name.startswith(incomplete))
    yield from complete_path(incomplete)


_HELP = "YAML configuration, or the name of a packaged one, such as demo."
ConfigArgument = Annotated[
    Path,
    typer.Argument(help=_HELP, show_default=False, callback=find_config, autocompletion=complete_config),
]
OptionalConfigArgument = Annotated[
    Path | None,
    typer.Argument(help=_HELP, show_default=False, callback=find_config, autocompletion=complete_config),
]
