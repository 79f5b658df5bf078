"""Names of registered models, as users write them."""

import json
import re
from pathlib import Path

from tasks import STAGES

_NAME = re.compile(r"(?P<name>[^@/\s]*)(?:@(?P<alias>[^@/\s]+)|/(?P<version>[0-9]+))")


_FILES = ("bundle.json", "config.json")
"""A folder with one of these is a bundle, or a pretrained model."""


def is_model(folder: Path) -> bool:
    """Whether a folder is a bundle, or a pretrained model in Hugging Face's format."""
    return any((folder / name).is_file() for name in _FILES)


def registered_uri(model: str, own: str = "") -> str:
    """The URI of a registered model; empty if the text names none, but perhaps a folder.

    Args:
        model: `models:/…`, `NAME@ALIAS` or `NAME/VERSION`, or `@ALIAS` of the model `own`.
        own: Name of the configuration's own model; empty if there is none.
    """
    if model.startswith("models:/"):
        return model
    match = _NAME.fullmatch(model)
    name = (match["name"] or own) if match else ""
    if match is None or not name:
        return ""
    return f"models:/{name}@{match['alias']}" if match["alias"] else f"models:/{name}/{match['version']}"


def initial_overrides(model: str) -> list[str]:
    """The assignments of `--from MODEL`: training begins with that model.

    Args:
        model: A registered model's name, or the folder or URL of a bundle or pretrained model; empty for none.

    Raises:
        ValueError: If it is neither.
    """
    if not model:
        return []
    folder = Path(model).expanduser()
    if is_model(folder):
        model = str(folder.resolve())
    elif not registered_uri(model, "own") and "://" not in model:
        raise ValueError(
            f"--from {model!r} is neither a stage ({', '.join(STAGES)}) nor a model: give @champion, NAME@ALIAS, "
            "NAME/VERSION, models:/…, or the folder or URL of a bundle or pretrained model"
        )
    return [f"train.init={json.dumps(model)}"]
