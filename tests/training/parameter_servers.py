"""Parameter servers in threads, and clients of them, for tests."""

import threading
from contextlib import contextmanager

import torch
import zmq
from torch import nn

from training.config import AdamWConfig, SgdConfig
from training.learner.flat import FlatParameters
from training.parameter_server.client import ServerClient
from training.parameter_server.layout import layout
from training.parameter_server.messages import read_answer
from training.parameter_server.server import ShareServer, note_file
from training.parameter_server.service import ShareService
from training.parameter_server.share import Share
from training.processes.sockets import read_address

ADAMW = AdamWConfig(weight_decay=0.5)
SGD = SgdConfig(weight_decay=0.5, momentum=0.9)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 37), nn.BatchNorm1d(37), nn.Conv1d(5, 7, 3), nn.Linear(37, 23, bias=False))


def gradients(flat, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(flat.num_parameters, generator=generator) * 10 ** (n % 3 - 1) for n in range(count)]


def service(folder, number, servers, cfg=SGD, run="run-1", fresh=False):
    share = Share(layout(FlatParameters(network()), number, servers), cfg)
    return ShareService(share, run, folder / f"server-{number}.safetensors", fresh)


@contextmanager
def serving(folder, servers=1, cfg=SGD, key=None, fresh=False):
    """Servers in threads; their addresses."""
    begun = [
        ShareServer(
            service(folder, number, servers, cfg, fresh=fresh), "tcp://127.0.0.1:0", key, note_file(folder, number)
        )
        for number in range(servers)
    ]
    threads = [threading.Thread(target=server.run, daemon=True) for server in begun]
    for thread in threads:
        thread.start()
    try:
        yield [read_address(note_file(folder, number)) for number in range(servers)]
    finally:
        for server, thread in zip(begun, threads, strict=True):
            server.stop()
            thread.join(240)


def client_of(addresses, name="a", key=None, patience_s=240.0, flat=None):
    size = (flat or FlatParameters(network())).weights.numel()
    return ServerClient(addresses, key, name, size, patience_s)


@contextmanager
def raw_socket(address):
    """A raw connection, to send malformed messages."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{address}")
        yield socket


def ask_raw(socket, frames, patience_s=240):
    socket.send_multipart(frames)
    assert socket.poll(1000 * patience_s), "no answer"
    header, *values = socket.recv_multipart(copy=False)
    return read_answer(header), b"".join(value.bytes for value in values)
