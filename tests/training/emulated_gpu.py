"""A GPU that computes on the CPU, and notes where the host would wait for it.

A tensor on it is an `OnGpu`, which says that its device is `cuda:0`, so that the code for GPUs runs. What is computed
from it is on the GPU, too. The host waits where it reads values (`item`, `tolist`), needs a shape that depends on them
(`nonzero`, masks as indices), copies to the host, or copies from memory that is not page-locked.
"""

import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from devices.padding import frame_multiple
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.node.worker import build_stepper

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
READS = {
    *("item", "tolist", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal"),
    *("__bool__", "__float__", "__int__", "__index__", "is_nonzero", "allclose", "bincount", "masked_scatter"),
    *("__contains__", "__repr__", "__format__"),
}
"""Functions that give the host values, or a shape that depends on them."""
MASKED = {"__getitem__", "__setitem__", "index_put_", "index_put"}
VIEWS = {"__getitem__", "view", "squeeze", "unsqueeze", "transpose", "expand", "narrow", "unbind", "split", "detach"}
"""Functions whose result is in the same memory."""


class OnGpu(torch.Tensor):
    """A tensor on the emulated GPU."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)


class Pinned(torch.Tensor):
    """A tensor of the host in page-locked memory; what is computed from it is not."""


def plain(value):
    return value.as_subclass(torch.Tensor) if isinstance(value, OnGpu | Pinned) else value


def _device(name):
    """A device; None for a string that names none."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None


def as_kind(kind, result):
    """Tensors of a result as another class; they share memory and history."""
    return tree_map(lambda leaf: leaf.as_subclass(kind) if isinstance(leaf, torch.Tensor) else leaf, result)


class EmulatedGpu(TorchFunctionMode):
    """Context in which tensors on `cuda` can be made and computed.

    Attributes:
        mode: That of `torch.cuda.set_sync_debug_mode`; not 0 at the start, so that waits are faults.
        waits: Number of waits by function and place, without those in mode 0.
        expected: Places of the waits in mode 0, in order.
    """

    def __init__(self):
        super().__init__()
        self.mode, self.waits, self.expected = 2, Counter(), []

    @contextmanager
    def noting_afresh(self):
        """Context at whose start what was noted before is forgotten."""
        self.waits.clear()
        self.expected.clear()
        yield

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__" or func in (torch.Tensor.as_subclass, torch.Tensor.requires_grad_):
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        here, pinned = (any(isinstance(leaf, kind) for leaf in leaves) for kind in (OnGpu, Pinned))
        if func is torch.autograd.grad:  # its inputs must stay the same objects
            return as_kind(OnGpu, func(*args, **kwargs))
        if name == "pin_memory":
            return as_kind(Pinned, plain(args[0]))
        target = self._target(name, args, kwargs)
        self._check(name, args, kwargs, here, target)
        kwargs.pop("pin_memory", None)
        args, kwargs = tree_map(
            lambda argument: HOST if isinstance(argument, torch.device) else plain(argument), (args, kwargs)
        )
        result = func(*args, **kwargs)
        if "pack_padded" in name or "pad_packed" in name:
            return as_kind(OnGpu, result[0]) if here else result[0], result[1]  # sizes are on the host
        if name not in ("cpu", "numpy") and (here if target is None else target.type == "cuda"):
            return as_kind(OnGpu, result)
        return as_kind(Pinned, result) if pinned and name in VIEWS else result

    @staticmethod
    def _target(name, args, kwargs):
        """The device that a call names."""
        if name in ("cpu", "copy_"):
            return HOST if name == "cpu" else args[0].device
        named = [
            _device(argument) for argument in (*args[1:], *kwargs.values()) if isinstance(argument, torch.device | str)
        ]
        if name == "to":
            named += [
                argument.device for argument in (*args[1:2], kwargs.get("other")) if isinstance(argument, torch.Tensor)
            ]
        return next((device for device in named if device), None)

    def _check(self, name, args, kwargs, here, target):
        if name in ("to", "cpu", "copy_") and target is not None:
            self._check_copy(name, args[1] if name == "copy_" else args[0], target, kwargs.get("non_blocking", False))
        elif name in ("tensor", "as_tensor") and target == GPU:
            self._wait(f"{name} of numbers")
        elif here and name in READS:
            self._wait(name)
        elif here and name in MASKED:
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
            if any(index.dtype == torch.bool for index in indices):
                self._wait("mask as an index")
            elif any(not isinstance(index, OnGpu) for index in indices):
                self._wait("index on the host")
        elif here and name == "repeat_interleave" and "output_size" not in kwargs:
            self._wait(name)
        elif here and name == "ctc_loss":  # it copies lengths from pageable memory, after reading those on the GPU
            self._wait("ctc_loss with lengths on the GPU" if any(isinstance(a, OnGpu) for a in args[2:4]) else name)

    def _check_copy(self, name, source, target, non_blocking):
        if isinstance(source, OnGpu):
            if target.type == "cpu":
                self._wait(f"{name} to the host")
            return
        locked = isinstance(source, Pinned)
        if target.type == "cuda" and source.numel() and not (locked and non_blocking):
            self._wait(f"{name} that blocks" if locked else f"{name} from pageable memory")

    def _wait(self, what):
        rooms = ("/devices/", "/speech/", "/recognition/", "/training/")
        ours = [call for call in traceback.extract_stack() if any(room in call.filename for room in rooms)]
        ours = [call for call in ours if "/tests/" not in call.filename]
        place = f"{what} in {ours[-1].filename.split('/')[-1]}: {ours[-1].name}" if ours else what
        if self.mode:
            self.waits[place] += 1
        else:
            self.expected.append(place)


@contextmanager
def emulated_gpu(monkeypatch):
    """Run the code for GPUs on the CPU; yields the `EmulatedGpu`."""
    gpu = EmulatedGpu()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: gpu.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(gpu, "mode", mode))
    with gpu:
        yield gpu


def move_to_gpu(learner):
    """Move a learner to the emulated GPU; its model's parameters are the same memory."""
    learner.device, learner.frame_multiple = GPU, frame_multiple(GPU)
    flat = learner.flat
    flat.weights, flat.grads = (as_kind(OnGpu, tensor) for tensor in (flat.weights, flat.grads))


def node_of_one(job, device):
    """A learner with the strategy that applies its gradients."""
    learner = Learner(job, device)
    ring = NodeExchange(0, NodeGroup(0, 1, None, device), learner.flat, None)
    return learner, build_stepper(job, ring, learner, epoch_steps=10)


def steps(learner, stepper, strict=nullcontext):
    """Losses, norms and weights of a step that is made three times: at first, tables are copied, then graphs recorded.

    Args:
        learner: The learner.
        stepper: Its strategy.
        strict: Makes a context for the last time.
    """
    stepper.start(0)
    data = open_set(learner.job, "train")
    load = Loader(data, learner.task, learner.device)
    figures = []
    for context in (nullcontext, nullcontext, strict):
        batch = load([0, 3, 5, 9, 20, 31][: len(data)], 1)
        with context():
            losses = learner.gradient(batch, 1)
            stepper.step(losses, False, 1e-3)
        figures += [losses.loss, stepper.results()[0].norm]
    return torch.tensor(figures), learner.flat.weights
