"""Learners in processes of their own, whose exchange keeps the weights on a device, for tests."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from emulated_device import EmulatedCudaExchange

from benchmarks.peers.starling import exchange_config
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.processes.children import end_with_parent

SIZE = 20_000
CONFIG = {"kind": "cuda", "encrypt": False, "chunk_kb": 16, "per_step": 1}
ROOT = Path(__file__).parents[2]
_REPLY_S = 240.0


class PeerLearner:
    """The live weights of a process, and their exchange; `serve` obeys the test."""

    def __init__(self, number, device, folder, timeout_s):
        cfg, gossip = exchange_config(CONFIG | {"timeout_s": timeout_s})
        setup = ExchangeSetup(number, 0, SIZE, None, Path(folder), gossip=gossip)
        self.exchange = EmulatedCudaExchange(cfg, setup) if device == "emulated" else build_exchange(cfg, setup)
        self.device = torch.device("cpu" if device == "emulated" else device)
        generator = torch.Generator().manual_seed(number)
        self.live = (torch.randn(SIZE, generator=generator) + number).to(self.device)
        self.number, self.step, self.delta = number, 0, None

    def obey(self, what, *values):
        getattr(self, what)(*values)
        return self.exchange.stats()

    def view(self, view):
        self.exchange.set_view(View.from_dict(view))

    def start(self):
        self.exchange.start(self.live, self.step)

    def steps(self, count, gradient, tick=True):
        """Steps as training makes them, with a constant gradient step."""
        for _ in range(count):
            self.step += 1
            self.take()
            self.live += gradient
            self.exchange.give(self.live, self.step)
            if tick:
                self.exchange.tick(self.step)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            time.sleep(0.002)

    def tick(self):
        self.exchange.tick(self.step)

    def take(self):
        if self.exchange.ready():
            self.delta = self.exchange.take().clone()
            self.live += self.delta
            self.exchange.release()

    def spoil(self, place):
        self.live[place] = float("nan")


def serve(number, device, folder, timeout_s, file, parent):
    """Main function of a learner's process; all arguments are words of the command line."""
    end_with_parent(int(parent))
    torch.set_num_threads(1)
    pipe, learner = Connection(int(file)), PeerLearner(int(number), device, folder, float(timeout_s))
    pipe.send(learner.exchange.endpoint)
    while (command := pipe.recv()) != ("end",):
        if command == ("weights",):
            pipe.send((learner.live.cpu().numpy(), None if learner.delta is None else learner.delta.cpu().numpy()))
        else:
            pipe.send(learner.obey(*command))
    learner.exchange.close()


class PeerRing:
    """The processes of a ring, as the test sees them."""

    def __init__(self, count, device, folder, timeout_s):
        self.pipes, self.processes = [], []
        self.all = list(range(count))
        for number in self.all:
            self._start(number, device, folder, timeout_s)

    def begin(self):
        self.endpoints = [self.hear(number) for number in self.all]
        self.join(self.all)
        self.do("start")

    def _start(self, number, device, folder, timeout_s):
        from forks import Forkable  # the processes import this module, too, and have no tests/ on their path

        ours, theirs = socket.socketpair()
        words = [str(number), device, str(folder), str(timeout_s), str(theirs.fileno()), str(os.getpid())]
        program = Forkable("import sys\nfrom peer_learners import serve\nserve(*sys.argv[1:])")
        own = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, own))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if device == "cuda":
            env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as ranks have it
        with theirs:
            command = [sys.executable, "-c", program, *words]
            self.processes.append(subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]))
        self.pipes.append(Connection(ours.detach()))

    def join(self, nodes, number=1):
        members = tuple(Member(node, f"once-{node}", (self.endpoints[node],)) for node in nodes)
        self.do("view", View(number, members).to_dict(), nodes=nodes)

    def hear(self, number):
        assert self.pipes[number].poll(_REPLY_S), f"learner {number} does not answer"
        return self.pipes[number].recv()

    def tell(self, number, *command):
        self.pipes[number].send(command)

    def do(self, *command, nodes=None):
        """Have learners obey at the same time; returns their statistics."""
        nodes = self.all if nodes is None else nodes
        for node in nodes:
            self.tell(node, *command)
        return [self.hear(node) for node in nodes]

    def weights(self, nodes=None):
        """Live weights [nodes, size] in double precision."""
        return torch.stack([torch.from_numpy(live).double() for live, _ in self.do("weights", nodes=nodes)])

    def deltas(self):
        return [torch.from_numpy(delta) for _, delta in self.do("weights")]


@contextmanager
def peer_ring(count, device, folder, timeout_s=60.0):
    """A ring whose processes end with the test; exchanges fail after a time that no busy machine takes by default."""
    ring = PeerRing(count, device, folder, timeout_s)
    try:
        ring.begin()
        yield ring
        for number, process in enumerate(ring.processes):
            if process.poll() is None:
                ring.tell(number, "end")
                assert process.wait(240) == 0
    finally:
        for process in ring.processes:
            process.kill()
            process.wait()
