"""Four processes train a small network on a table together; one of them is killed in the middle.

    python examples/tabular.py run1 --processes 4 --kill

Each process is a learner of the ring in the folder `run1`. Three seconds after the last heartbeat of the killed one,
its rows are given to the others; those that it had begun are trained again, and counted as repeated.

The same under torchrun, where the two processes of an agent are one node: they average gradients at every step, and the
two nodes average weights (run both lines at the same time):

    torchrun --nproc-per-node 2 examples/tabular.py run2 --nodes 2
    torchrun --nproc-per-node 2 --master-port 29501 examples/tabular.py run2 --nodes 2
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from starling import Ring, RingConfig

ROWS, SHARDS = 2000, 40
CONFIG = RingConfig(membership={"dead_after_s": 3.0})  # the default of 10 s suits busy machines


def make_table() -> tuple[torch.Tensor, torch.Tensor]:
    """A table of eight columns, and what to predict from them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 8, generator=generator)
    return inputs, torch.tanh(inputs @ torch.randn(8, 1, generator=generator) / 3)


def learn(folder: Path, nodes: int, epochs: int) -> None:
    """Train as one learner of a ring."""
    torch.set_num_threads(1)
    inputs, targets = make_table()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained = 0
    with Ring(model, optimizer, folder=folder, learners=nodes, config=CONFIG) as ring:
        for _, _, rows in ring.leases([ROWS // SHARDS] * SHARDS, epochs=epochs, batch=25):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            trained += len(rows)
            time.sleep(0.02)  # a larger model would take longer
        loss = nn.functional.mse_loss(model(inputs), targets).item()
        print(f"node {ring.node}: {trained} rows in {ring.steps} steps, loss {loss:.4f}", flush=True)


def tell_lost(journal: Path) -> None:
    """Print which learners were lost, and how many rows were trained again."""
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for node, reason in line["left"].items() if line["kind"] == "view" else ():
            if reason != "left":
                print(f"node {node} was lost after {line['elapsed']:.0f} s: {reason}")
    print(f"{sum(line['repeated'] for line in lines if line['kind'] == 'epoch')} rows were repeated")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="learners to start, each a node of its own")
    parser.add_argument("--nodes", type=int, default=0, help="nodes to wait for; by default the processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kill", action="store_true", help="kill the second process in the middle")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    folder, nodes, epochs = arguments.folder, arguments.nodes or arguments.processes, arguments.epochs
    if arguments.processes == 1:
        learn(folder, nodes, epochs)
        return
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=learn, args=(folder, nodes, epochs)) for _ in range(arguments.processes)]
    for process in processes:
        process.start()
    journal = folder / "journal.jsonl"
    if arguments.kill:
        while not (journal.exists() and '"kind": "epoch"' in journal.read_text(encoding="utf-8")):
            time.sleep(0.05)
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        print("one process is killed", flush=True)
    for process in processes:
        process.join()
    tell_lost(journal)


if __name__ == "__main__":
    main()
