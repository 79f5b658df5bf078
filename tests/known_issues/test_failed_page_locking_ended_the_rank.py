"""A failed page-locking left its CUDA error pending, which the next kernel raised; nothing was logged."""

import ctypes
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.exchange import device
from training.exchange.device import CudaCopies

GPU = torch.device("cuda", 0)


class Runtime:
    """A CUDA runtime that refuses to lock some buffers; their error stays pending until a kernel raises it."""

    def __init__(self, refused):
        self.refused, self.pending, self.unlocked = refused, 0, []

    def lock(self, address, length, flags):
        self.pending = 2 if address in self.refused else self.pending
        return self.pending and 2

    def unlock(self, address):
        self.unlocked.append(address)

    def kernel(self, *shape, device):
        code, self.pending = self.pending, 0
        if code:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("refused", [0, 3])
def test_error_of_page_locking_is_cleared_and_logged_once(monkeypatch, caplog, refused):
    parts = [np.zeros(8, np.float32) for _ in range(4)]
    addresses = [part.ctypes.data for part in parts]
    runtime, streams = Runtime(addresses[:refused]), []
    names = SimpleNamespace(cudaHostRegister=runtime.lock, cudaHostUnregister=runtime.unlock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: names)
    monkeypatch.setattr(torch.cuda, "Stream", streams.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(device.torch, "zeros", runtime.kernel)
    caplog.set_level(logging.WARNING)
    copies = CudaCopies(GPU, SimpleNamespace(weights=parts[:2], deltas=parts[2:]))
    assert set(streams) == {GPU}
    assert runtime.pending == 0
    said = [f"{refused} of the 4 buffers", "CUDA error 2", "ulimit -l"]
    assert len(caplog.messages) == (1 if refused else 0)
    assert all(words in message for message in caplog.messages for words in said)
    copies.close()
    assert runtime.unlocked == addresses[refused:]


def test_threads_wait_for_copies_without_keeping_a_core_busy(monkeypatch):
    made = []
    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **fields: made.append(fields) or event)
    device._CudaPoint(None)
    assert made == [{"blocking": True}]


@pytest.mark.gpu
def test_kernels_run_after_a_page_locking_that_failed(caplog):
    memory = np.frombuffer((ctypes.c_char * 4096)(), np.float32)
    cudart = torch.cuda.cudart()
    torch.zeros(1, device=GPU)
    assert int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        mailbox = SimpleNamespace(weights=(memory, memory), deltas=())  # what is locked already cannot be locked again
        copies = CudaCopies(GPU, mailbox)
        assert torch.ones(3, device=GPU).sum().item() == 3
        assert "2 of the 2 buffers" in caplog.text
        point = copies.copy("down", torch.from_numpy(memory), torch.full((1024,), 7.0, device=GPU), (copies.mark(),))
        point.wait()
        assert (memory == 7).all()
        copies.close()
    finally:
        cudart.cudaHostUnregister(memory.ctypes.data)
