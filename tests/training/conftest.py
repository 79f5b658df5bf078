"""Fixtures of the training tests; `tones` has the rest."""

from support import load_beside

tones = load_beside(__file__, "tones.py")
load_beside(__file__, "aligned_tones.py")
load_beside(__file__, "bookkeeping.py")
load_beside(__file__, "running_training.py")
load_beside(__file__, "parameter_servers.py")
load_beside(__file__, "emulated_device.py")
load_beside(__file__, "emulated_exchange.py")
load_beside(__file__, "emulated_gpu.py")
load_beside(__file__, "exchange_ring.py")
load_beside(__file__, "peer_learners.py")
load_beside(__file__, "ranks.py")
load_beside(__file__, "recordings.py")
load_beside(__file__, "regression.py")
emulated_nodes = load_beside(__file__, "emulated_nodes.py")
make_coordinator_process, make_node = emulated_nodes.make_coordinator_process, emulated_nodes.make_node
corpus, trained = tones.corpus, tones.trained
