"""Fixtures of the training tests; `tones` has the rest."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    """A module beside this one: tests/ is not on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


tones = _load("tones")
_load("disturbed")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> "tones.Corpus":
    return tones.make_corpus(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="session")
def trained(corpus: "tones.Corpus", tmp_path_factory: pytest.TempPathFactory) -> "tones.Trained":
    """A Conformer that knows the six words."""
    spec = corpus.spec("conformer", model=tones.bare("conformer"))
    folder = tmp_path_factory.mktemp("trained")
    job = corpus.job(folder, spec=spec, epochs=10, average=2, optimizer={"lr": 1e-2}, **tones.LEARNS)
    return tones.train_here(job)
