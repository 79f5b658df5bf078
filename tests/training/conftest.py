"""Fixtures of the training tests; `tones` has the rest."""

import pytest
from support import load_beside

tones = load_beside(__file__, "tones.py")
load_beside(__file__, "bookkeeping.py")
load_beside(__file__, "running_training.py")
load_beside(__file__, "parameter_servers.py")
load_beside(__file__, "emulated_device.py")
load_beside(__file__, "emulated_exchange.py")
load_beside(__file__, "exchange_ring.py")
load_beside(__file__, "peer_learners.py")
load_beside(__file__, "ranks.py")
load_beside(__file__, "recordings.py")
load_beside(__file__, "regression.py")
emulated_nodes = load_beside(__file__, "emulated_nodes.py")
make_coordinator_process, make_node = emulated_nodes.make_coordinator_process, emulated_nodes.make_node


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
