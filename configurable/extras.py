"""What to type when an optional part of Starling is not installed."""


def install_remedy(extra: str) -> str:
    """The command that installs an extra.

    It names a folder instead of the project: the package index has another project named `starling`.

    Args:
        extra: Name of the extra, as in pyproject.toml.
    """
    return f"pip install '.[{extra}]' in Starling's source folder"
