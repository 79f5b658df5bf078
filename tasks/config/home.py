"""The data folder: where everything goes that no configuration sends elsewhere."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.disks import system_folders
from storage.retries import disk_named


def home() -> Path:
    """$STARLING_HOME, by default `.starling` in the user's home folder; made if it is missing."""
    folder = _home()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _home() -> Path:
    return Path(os.environ.get("STARLING_HOME") or Path.home() / ".starling").expanduser().resolve()


@contextmanager
def own_disks_named(*more: Path) -> Iterator[None]:
    """Turns what full, read-only or forbidden disks make of the block into an error that says which and what to do.

    Args:
        *more: Folders that the block writes to besides the data folder and the system's own.

    Raises:
        DiskError: One of the disks is in trouble.
    """
    with disk_named(*more, _home(), *system_folders()):
        yield


def work_folder(stage: str, key: str) -> Path:
    """Local folder of what a stage keeps while it makes an output: scratch files; of a training, its journal and logs.

    Args:
        stage: The stage, or what else works there.
        key: Address of the output.
    """
    return home() / "work" / f"{stage}-{key}"


def objects_url(configured: str) -> str:
    """The object store's URL: the configured one, $STARLING_OBJECTS, or the folder `objects` in the data folder."""
    return configured or os.environ.get("STARLING_OBJECTS") or str(home() / "objects")


def mlflow_uri() -> str:
    """Where MLflow keeps runs and models: $MLFLOW_TRACKING_URI, or SQLite in the data folder."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    return given or f"sqlite:///{home() / 'mlflow' / 'mlflow.db'}"


def shown_mlflow_uri() -> str:
    """The same, fit to be printed: without user and password."""
    return re.sub(r"://[^/@]*@", "://", mlflow_uri())


def studies_file() -> Path:
    """The SQLite database of the studies of searches, unless another one is named."""
    return home() / "search" / "studies.db"


def mlflow_artifacts() -> Path:
    """Local folder of MLflow's artifacts; used where MLflow is on SQLite in the data folder."""
    folder = home() / "mlflow" / "artifacts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
