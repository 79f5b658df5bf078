"""Fixtures that several known issues share."""

import pytest
from support import load_beside

from recognition.bundle import BundleSpec, save_bundle
from speech.features import LogMelConfig
from speech.models import BlstmConfig
from speech.tokens import TokenConfig, train_tokenizer


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
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(), ["a b"]).to_dict(),
        model=BlstmConfig(dim=8, layers=1, channels=1),
        provenance={"loss": 1.25},
    )
    save_bundle(tmp_path, spec, dict(spec.build_model().state_dict()))
    return tmp_path
