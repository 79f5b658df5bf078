"""Fixtures that every room's tests share."""

import os
from pathlib import Path

import pytest

# Two cores serve the whole suite: a test must not oversubscribe them with one thread pool per process.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def find_shared_data() -> Path | None:
    """The folder of real speech: $STARLING_SHARED_DATA, or shared/data beside the checkout; None without one."""
    given = os.environ.get("STARLING_SHARED_DATA")
    for folder in [Path(given)] if given else [Path(__file__).resolve().parents[2] / "shared" / "data"]:
        if (folder / "README.md").is_file():
            return folder
    return None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real human speech with transcripts; the test is skipped where there is none."""
    folder = find_shared_data()
    if folder is None:
        pytest.skip("no real speech here: set STARLING_SHARED_DATA to the folder that holds it")
    return folder
