"""A rank's address had 512 bytes: those of sixteen daemons on a host with a long name did not fit, in Gloo's words."""

PROGRAM = """
import sys
from pathlib import Path

import torch

from training.node.process_group import NodeGroup

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
group = NodeGroup(rank, size, folder / "meet", torch.device("cpu"))
addresses = [" ".join(f"tcp://gpu-017.cluster.internal:{port}" for port in range(50000, 50000 + n)) for n in (1, 16)]
assert len(addresses[1]) > 512
assert group.gather_text(addresses[rank]) == addresses
assert group.gather_text("") == ["", ""]
group.close()
print("fine")
"""


def test_addresses_of_any_length_are_gathered(ranks, tmp_path):
    ranks.run_ranks(PROGRAM, 2, tmp_path)
