"""Memory of a GPU that other processes read: what is asked of torch, and the memory itself where there is a GPU."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from support import ROOT

from training.exchange import device
from training.exchange.device import CudaPeerMemory, PeerMemoryError

GPU = torch.device("cuda", 0)
TUPLE = (0, b"c\0\xff" * 22, 40, 512, b"/torch_1_2_3", 7, b"event", True)
"""What torch says about shared memory of ten values."""


@pytest.fixture
def calls(monkeypatch):
    """Calls of torch, which are recorded instead."""
    made = []

    def allocate(length, device):
        made.append(("allocate", length, device))
        return SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: TUPLE))

    class Storage:
        @staticmethod
        def _new_shared_cuda(*parts):
            made.append(("open", *parts))
            return "storage"

        @staticmethod
        def _release_ipc_counter_cuda(*parts):
            made.append(("release", *parts))

    empty = SimpleNamespace(set_=lambda *view: view)
    names = SimpleNamespace(
        zeros=allocate,
        empty=lambda *_, **__: empty,
        float32=torch.float32,
        UntypedStorage=Storage,
        cuda=SimpleNamespace(synchronize=lambda device: made.append(("synchronize", device))),
        _C=SimpleNamespace(_accelerator_setAllocatorSettings=lambda text: made.append(("settings", text))),
    )
    monkeypatch.setattr(device, "torch", names)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return made


def test_handle_passes_through_json_and_is_opened_without_an_event(calls):
    _, handle = CudaPeerMemory(GPU).allocate(10)
    memory = CudaPeerMemory(torch.device("cuda", 3)).open(json.loads(json.dumps(handle)), 10)
    assert memory == ("storage", 0, (10,), (1,))
    assert (
        calls
        == [
            ("allocate", 10, GPU),
            ("synchronize", GPU),  # the handle may be sent at once
            ("open", 3, *TUPLE[1:6], b"", False),
        ]
    )


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_is_allocated_without_expandable_segments(calls, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    CudaPeerMemory(GPU).allocate(10)
    assert calls[:3] == [
        ("settings", "max_split_size_mb:64,expandable_segments:False"),
        ("allocate", 10, GPU),
        ("settings", "max_split_size_mb:64,expandable_segments:True"),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": "another"}, "another machine"),
        ({"bytes": 44}, "44 bytes instead of 40"),
        ({"offset": -1}, "instead of"),
        ({"handle": "?"}, ""),
        ({"handle": None}, ""),
        ({"bytes": "many"}, ""),
    ],
)
def test_unsuitable_handles_are_not_opened(calls, changes, said):
    _, handle = CudaPeerMemory(GPU).allocate(10)
    with pytest.raises(PeerMemoryError, match=said or None):
        CudaPeerMemory(GPU).open(handle | changes, 10)
    with pytest.raises(PeerMemoryError, match="machine"):
        CudaPeerMemory(GPU).open({}, 10)
    assert not any(call[0] == "open" for call in calls)


def test_closing_gives_up_memory_that_nobody_has_opened(calls):
    memory = CudaPeerMemory(GPU)
    memory.allocate(10)
    memory.close()
    memory.close()
    assert calls[2:] == [("release", *TUPLE[4:6])]


OWNER = """
import json, time, torch
from training.exchange.device import CudaPeerMemory
memory, handle = CudaPeerMemory(torch.device("cuda", 0)).allocate(5_000_000)
memory.fill_(3)
torch.cuda.synchronize()
print(json.dumps(handle), flush=True)
time.sleep(60)
"""

READER = """
import json, subprocess, sys, torch
from training.exchange.device import CudaPeerMemory
torch.zeros(1, device="cuda")
owner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
memory = CudaPeerMemory(torch.device("cuda", 0)).open(json.loads(owner.stdout.readline()), 5_000_000)
assert bool((memory == 3).all()), "before"
owner.kill()
owner.wait()
for _ in range(20):
    assert bool((memory == 3).all()), "after"
del memory
torch.cuda.synchronize()
print("fine")
"""


@pytest.mark.gpu
def test_memory_can_be_read_after_its_owner_was_killed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as ranks have it
    words = [sys.executable, "-c", textwrap.dedent(READER), OWNER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
