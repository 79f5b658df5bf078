"""Fixtures that several known issues share."""

import pytest
from support import load_beside, tiny_bundle


@pytest.fixture(scope="module")
def tones():
    """The tiny corpus of the training tests, and training on it in this process."""
    return load_beside(__file__, "../training/tones.py")


@pytest.fixture(scope="module")
def ranks():
    """Runs programs as the ranks of a node."""
    return load_beside(__file__, "../training/ranks.py")


@pytest.fixture(scope="module")
def invoke():
    """Runs the command line in this process."""
    return load_beside(__file__, "../flows/command_line.py").invoke


@pytest.fixture(scope="module")
def corpus(tones, tmp_path_factory):
    return tones.make_corpus(tmp_path_factory.mktemp("tones"))


@pytest.fixture
def bundle(tmp_path):
    """A folder with a tiny model, not trained."""
    tiny_bundle(tmp_path, provenance={"loss": 1.25})
    return tmp_path
