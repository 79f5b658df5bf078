"""Follows an alias of a registered model: loads each version that gets it beside the one in use, in the background."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from mlflow.exceptions import MlflowException

from recognition.serving.models import LoadedModel, ModelSwitch
from tasks.tracking.fetching import download_bundle
from tasks.tracking.registry import version_of
from tasks.tracking.runs import client

log = logging.getLogger(__name__)
_LONGEST_PAUSE = 32
"""A version that cannot be loaded is tried again after 1, 2, 4 and so on looks, at most so many."""

Load = Callable[[str, Path, Callable[[], object]], LoadedModel]
"""Makes a version ready for use from its number, the folder of its bundle, and what removes that folder."""


def load_version(name: str, version: str, load: Load) -> LoadedModel:
    """Fetch a version into a folder of its own, which is removed after its use, and load it.

    A folder of its own, since the version may be deleted from the registry while it is in use.

    Args:
        name: Registered model.
        version: Its number.
        load: Loads the bundle.

    Raises:
        ValueError: The registry does not have it, or it cannot be loaded.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"starling-serve-{name}-{version}-"))

    def discard() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    loaded = False
    try:
        model = load(version, download_bundle(f"models:/{name}/{version}", folder), discard)
        loaded = True
        return model
    except Exception as error:
        # the name of the folder differs at each try, and means nothing to anybody
        raise ValueError((str(error) or type(error).__name__).replace(f"{folder}/", "")) from error
    finally:
        if not loaded:
            discard()


class AliasFollower:
    """Keeps a switch at the version that has an alias.

    Args:
        name: Registered model.
        alias: The alias, such as `champion`.
        load: Loads a version.
        switch: Gets new versions; if one cannot be loaded, it keeps the old one and gets the reason.
    """

    def __init__(self, name: str, alias: str, load: Load, switch: ModelSwitch) -> None:
        self.name, self.alias = name, alias
        self._load, self._switch = load, switch
        self._failed, self._failures, self._pause = "", 0, 0

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Look at the registry again and again.

        Args:
            every_s: Time between two looks.
            stop: Ends it.
        """
        while not stop.wait(every_s):
            self.look()

    def look(self) -> None:
        """Load the version that has the alias now, unless it is in use, or could not be loaded a short time ago."""
        try:
            version = version_of(client(), self.name, self.alias)
        except (MlflowException, OSError) as error:
            self._switch.fail(f"the registry does not answer: {_first_line(error)}")
            return
        if version is None:
            self._switch.fail(f"no version of {self.name} is @{self.alias} any more")
            return
        number = str(version.version)
        if number == self._switch.current.version:
            self._failed = ""
            self._switch.recovered()
            return
        if number == self._failed and self._pause > 0:
            self._pause -= 1
            return
        self._replace(number)

    def _replace(self, number: str) -> None:
        try:
            self._switch.replace(load_version(self.name, number, self._load))
            self._failed = ""
        except Exception as error:  # whatever is wrong with the new version, the old one goes on
            self._failures = self._failures + 1 if number == self._failed else 0
            self._failed, self._pause = number, min(2**self._failures, _LONGEST_PAUSE)
            self._switch.fail(f"version {number} of {self.name} cannot be loaded: {_first_line(error)}")
            log.warning("%s; version %s goes on", self._switch.problem, self._switch.current.version)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:300]
