"""Names of registered models, as users write them."""

import re

_NAME = re.compile(r"(?P<name>[^@/\s]*)(?:@(?P<alias>[^@/\s]+)|/(?P<version>[0-9]+))")


def registered_uri(model: str, own: str = "") -> str:
    """The URI of a registered model; empty if the text names none, but perhaps a folder.

    Args:
        model: `models:/…`, `NAME@ALIAS` or `NAME/VERSION`, or `@ALIAS` of the model `own`.
        own: Name of the configuration's own model; empty if there is none.
    """
    if model.startswith("models:/"):
        return model
    found = _NAME.fullmatch(model)
    name = (found["name"] or own) if found else ""
    if found is None or not name:
        return ""
    return f"models:/{name}@{found['alias']}" if found["alias"] else f"models:/{name}/{found['version']}"
