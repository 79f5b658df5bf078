"""Fixtures of the training tests; `tones` has the rest."""

import pytest
from support import load_beside

tones = load_beside(__file__, "tones.py")
load_beside(__file__, "bookkeeping.py")
load_beside(__file__, "disturbed.py")
load_beside(__file__, "parameter_servers.py")
load_beside(__file__, "pretended_copies.py")
load_beside(__file__, "bare_learners.py")
load_beside(__file__, "exchange_ring.py")
load_beside(__file__, "ranks.py")
load_beside(__file__, "regression.py")
pretending = load_beside(__file__, "pretending.py")
make_store, make_node = pretending.make_store, pretending.make_node


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
