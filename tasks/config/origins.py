"""A configuration with all its values, and where each came from: a line of its file, `--set`, or a default."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.config.given import Place, find_given
from tasks.config.pipeline import PipelineConfig, load_config
from tasks.config.yaml_text import one_line


def origins(path: Path, overrides: Sequence[str] = ()) -> tuple[PipelineConfig, dict[Place, str]]:
    """Load a configuration, and find out where each of its values came from.

    Args:
        path: YAML file.
        overrides: Assignments of `--set`.

    Returns:
        The configuration, and by the place of each value `FILE:LINE`, `--set` or `default`.

    Raises:
        ConfigError: If the configuration cannot be loaded.
    """
    config = load_config(path, overrides)
    given = find_given(path.read_text(encoding="utf-8"), path.name, overrides).values
    document = config.model_dump(mode="json", by_alias=True)
    return config, {place: _origin(place, given) for place in leaves(document)}


def leaves(value: Any, at: Place = ()) -> Iterator[Place]:
    """Places of all values that are neither mappings nor lists of mappings."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, (*at, name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, (*at, number))
    else:
        yield at


def annotated(config: PipelineConfig, origins: dict[Place, str]) -> str:
    """The configuration as YAML, with each value's origin as a comment; it can be run as it is."""
    lines = list(_written(config.model_dump(mode="json", by_alias=True), (), origins))
    width = min(60, max(len(line) for line, origin in lines if origin))
    return "".join(f"{line:{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def _written(value: dict[str, Any], at: Place, origins: dict[Place, str]) -> Iterator[tuple[str, str]]:
    """Lines of a mapping, without the indentation of the place, and their origins."""
    for name, item in value.items():
        here = (*at, name)
        if here in origins:
            yield f"{one_line(name)}: {one_line(item)}", origins[here]
        elif isinstance(item, dict):
            yield f"{one_line(name)}:", ""
            yield from ((f"  {line}", origin) for line, origin in _written(item, here, origins))
        else:
            yield f"{one_line(name)}:", ""
            for number, entry in enumerate(item):
                for count, (line, origin) in enumerate(_written(entry, (*here, number), origins)):
                    yield f"  {'  ' if count else '- '}{line}", origin


def _origin(place: Place, given: dict[Place, str]) -> str:
    if place in given:
        return given[place]
    # `strategy: adpsgd` stands for `strategy: {kind: adpsgd}`
    return given.get(place[:-1], "default") if place[-1:] == ("kind",) else "default"
