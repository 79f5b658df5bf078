"""The command `starling`, as a console script and as `python -m starling`."""

import sys
from importlib.util import find_spec

_NEEDED = ("mlflow", "prefect", "pyarrow", "torchaudio", "typer")
"""Packages of the extra `pipeline` by which an installation of the training engine alone is recognized."""


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: With status 1 and a message, if the pipeline is not installed.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        from configurable.extras import install_remedy

        sys.exit(
            f"error: the command needs the pipeline ({', '.join(missing)} not installed): "
            f"{install_remedy('pipeline')}, or '.[demo]' for `starling run demo`"
        )
    from flows.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
