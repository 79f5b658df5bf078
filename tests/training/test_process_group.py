"""A node of several learners: the same weights, step for step, as torch's DistributedDataParallel gives."""

import logging
import textwrap
from contextlib import contextmanager

import pytest
import torch
from ranks import run_ranks
from torch.distributed import FileStore

from training.node.collectives import NodeCollectives
from training.node.process_group import GradientReducer, NodeGroup
from training.strategies.requests import Mix

RANKS = 3
PROGRAM = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from ranks import device_of
    from training.config import AdamWConfig
    from training.learner.flat import FlatParameters
    from training.node.process_group import GradientReducer, NodeGroup
    from training.learner.optim import build_optimizer

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    device = device_of(rank)
    group = NodeGroup(rank, size, folder / "meet", device)

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)

    ours, theirs = network(), network()
    flat = FlatParameters(ours)
    reducer = GradientReducer(group, flat, bucket=20)  # several buckets
    assert len(reducer._buckets) > 3
    ddp = DistributedDataParallel(theirs)
    cfg = AdamWConfig(lr=0.02)
    optimizers = build_optimizer(cfg, ours), build_optimizer(cfg, theirs)
    for step in range(20):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(5 + rank, 6, generator=generator).to(device)  # ranks have batches of different sizes
        tokens = sum(n for (n,) in group.gather_numbers([float(len(x))]))
        flat.zero_grad()
        ours(x).square().sum().backward()
        reducer.finish()
        flat.grads.div_(tokens)
        optimizers[0].step()
        optimizers[1].zero_grad()
        # DDP divides the sum over ranks by their number
        (ddp(x).square().sum() * size / tokens).backward()
        optimizers[1].step()
        for a, b in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # a rank without a batch still takes part
    flat.zero_grad()
    if rank:
        ours(torch.ones(1, 6, device=device)).sum().backward()
    reducer.finish()
    every = [torch.zeros_like(flat.grads) for _ in range(size)]
    dist.all_gather(every, flat.grads)
    assert all(torch.equal(one, every[0]) for one in every) and every[0].abs().sum() > 0
    # orders, texts, votes, shares
    assert group.tell({"do": "step", "rows": [1, 2], "rank": rank}) == {"do": "step", "rows": [1, 2], "rank": 0}
    assert group.gather_text(f"tcp://host:{rank}") == [f"tcp://host:{r}" for r in range(size)]
    assert group.all(True) and not group.all(rank == 1)
    start, stop = group.share(10)
    whole = group.gather_shares(torch.arange(start, stop, dtype=torch.float32, device=device), 10)
    assert whole.tolist() == list(range(10))
    group.close()
    print("fine", flush=True)
    os._exit(0)  # as training.node.rank ends: Gloo sometimes aborts while the interpreter takes it down
    """
)


def test_node_gives_the_same_weights_as_ddp(tmp_path):
    run_ranks(PROGRAM, RANKS, tmp_path)


@pytest.mark.gpu(2)
def test_node_of_two_gpus_gives_the_same_weights_as_ddp(tmp_path):
    run_ranks(PROGRAM, 2, tmp_path, "cuda")


@pytest.mark.gpu
def test_node_on_one_gpu_gives_the_same_weights_as_ddp(tmp_path):
    run_ranks(PROGRAM, 2, tmp_path, "cuda", "shared")


def test_a_node_of_one_needs_no_process_group(tmp_path):
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    assert group.tell({"do": "wait"}) == {"do": "wait"}
    assert group.gather_text("x") == ["x"]
    assert group.share(7) == (0, 7)
    assert group.all(True)
    assert group.gather_shares(torch.ones(7), 7).sum() == 7
    group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("bucket", [1, 10, 10**9])
def test_buckets_cover_all_gradients_once(tmp_path, bucket):
    from training.learner.flat import FlatParameters

    flat = FlatParameters(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    reducer = GradientReducer(NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu")), flat, bucket)
    covered = sorted(i for start, stop in reducer._buckets for i in range(start, stop))
    assert covered == list(range(flat.num_parameters))


class RecordedCalls:
    """Stands for torch.distributed, and for CUDA's current device and streams: records calls in order."""

    def __init__(self):
        self.log = []

    def note(self, name, answer=None):
        def call(*args, **fields):
            self.log.append((name, args, fields))
            return answer

        return call

    def names(self):
        return [name for name, _, _ in self.log]


def register_other_rank(path, rank, device, size=2):
    """Register the device of another rank, as if it had started before."""
    FileStore(str(path), size).set(f"device-{rank}", device)


@pytest.fixture
def calls(monkeypatch):
    """Without a GPU, tensors are on the CPU, and calls to torch.distributed are recorded."""
    calls = RecordedCalls()
    monkeypatch.setattr("training.node.process_group.gpu_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr("training.node.process_group.dist.init_process_group", calls.note("init"))
    monkeypatch.setattr("training.node.process_group.dist.new_group", calls.note("control", "the control group"))
    monkeypatch.setattr("training.node.process_group.dist.all_reduce", lambda x: calls.note("all_reduce")(x.add_(1)))
    monkeypatch.setattr(
        "training.node.process_group.torch.ones", lambda size, device: calls.note("ones", torch.tensor([1.0]))(device)
    )
    return calls


def test_node_with_gpus_and_cpus_is_refused_before_ranks_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "training.node.process_group.dist.init_process_group", lambda *_, **__: pytest.fail("it has begun")
    )
    register_other_rank(tmp_path / "meet", 0, "cuda GPU-0")
    with pytest.raises(ValueError, match=r"those of rank 1 on a CPU: use train\.device=cpu, or a GPU for each"):
        NodeGroup(1, 2, tmp_path / "meet", torch.device("cpu"))


def test_process_group_on_gpus_is_bound_to_the_device_and_warmed_up(tmp_path, calls):
    gpu = torch.device("cuda", 1)
    register_other_rank(tmp_path / "meet", 0, "cuda GPU-0")
    assert not NodeGroup(1, 2, tmp_path / "meet", gpu).shares_gpu
    assert calls.names() == ["init", "control", "ones", "all_reduce"]
    _, (backend,), fields = calls.log[0]
    assert (backend, fields["device_id"], fields["rank"], fields["world_size"]) == ("nccl", gpu, 1, 2)
    assert calls.log[1][2]["backend"] == "gloo"
    assert calls.log[2][1] == (gpu,)
    calls.log.clear()
    register_other_rank(tmp_path / "meet2", 1, "cpu ")
    assert not NodeGroup(0, 2, tmp_path / "meet2", torch.device("cpu")).shares_gpu
    assert calls.names() == ["init", "control"]
    assert (calls.log[0][1], calls.log[0][2]["device_id"]) == (("gloo",), None)


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (2, 1)])
def test_all_ranks_of_a_node_use_gloo_if_any_two_share_a_gpu(tmp_path, calls, caplog, rank, number):
    """Ranks 0 and 1 share the first GPU; rank 2, maybe on another machine, has one of its own."""
    caplog.set_level(logging.INFO)
    for other, gpu in enumerate(("GPU-0", "GPU-0", "GPU-1")):
        if other != rank:
            register_other_rank(tmp_path / "meet", other, f"cuda {gpu}", 3)
    assert NodeGroup(rank, 3, tmp_path / "meet", torch.device("cuda", number)).shares_gpu
    assert calls.names() == ["init", "control"]  # no first collective: only NCCL needs it
    assert (calls.log[0][1], calls.log[0][2]["device_id"]) == (("gloo",), None)
    assert ("the 3 learners of this node share 2 GPU(s): Gloo averages" in caplog.text) is (rank == 0)


def test_ranks_that_share_a_gpu_send_to_neighbours_from_main_memory(tmp_path, monkeypatch):
    """Gloo sends and receives no tensors of a GPU; a tensor on `meta` stands for one."""
    sent = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape))
    monkeypatch.setattr(
        "training.node.collectives.dist.P2POp", lambda call, tensor, peer: (call.__name__, tensor, peer)
    )
    monkeypatch.setattr("training.node.collectives.dist.batch_isend_irecv", lambda wishes: sent.extend(wishes) or [])
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    group.size, group.shares_gpu = 3, True
    collectives = NodeCollectives(group)
    mixed = collectives.finish(collectives.begin(Mix(torch.zeros(4, device="meta"), "ring")))
    assert [(name, peer) for name, _, peer in sent] == [("isend", 1), ("isend", 2), ("irecv", 1), ("irecv", 2)]
    assert {tensor.device.type for _, tensor, _ in sent} == {"cpu"}
    assert mixed.device.type == "meta"


def test_hook_stream_runs_between_backward_pass_and_update(monkeypatch):
    from devices.choice import SideStream

    calls, gpu = RecordedCalls(), torch.device("cuda", 1)

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            calls.log.append((f"{self.name} waits for the mark", event, None))

        def wait_stream(self, other):
            calls.log.append((f"{self.name} waits for {other.name}", other, None))

    class Event:
        def record(self, stream):
            calls.log.append((f"mark {stream.name}", self, None))

    @contextmanager
    def entered(name):
        calls.log.append((f"on {name}", None, None))
        yield

    monkeypatch.setattr("torch.cuda.Stream", lambda device: Stream("side"))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream("main"))
    monkeypatch.setattr("torch.cuda.default_stream", lambda device: Stream("default"))
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.device", lambda device: entered(str(device)))
    monkeypatch.setattr("torch.cuda.stream", lambda stream: entered(stream.name))
    side = SideStream(gpu)
    with side.after(side.mark()):
        calls.log.append(("hook", None, None))
    side.join()
    assert calls.names() == [
        *("mark main", "on cuda:1", "on side", "side waits for the mark", "hook", "main waits for side")
    ]
    calls.log.clear()
    default = SideStream(gpu, own=False)
    with default.after(default.mark()):
        calls.log.append(("hook", None, None))
    default.join()
    assert calls.names() == [
        *("mark main", "on cuda:1", "on default", "default waits for the mark", "hook", "main waits for default")
    ]
    calls.log.clear()
    nothing = SideStream(torch.device("cpu"))
    with nothing.after(nothing.mark()):
        pass
    nothing.join()
    assert not calls.log


@pytest.mark.parametrize(("shares_gpu", "stream"), [(False, "its own"), (True, "default")])
def test_reducer_runs_hooks_on_its_side_stream(tmp_path, monkeypatch, shares_gpu, stream):
    from torch.futures import Future

    from training.learner.flat import FlatParameters
    from training.node.comm_hooks import CommHook

    steps = []

    class Side:
        def __init__(self, device, own):
            steps.append(f"{device.type}, {'its own' if own else 'default'}")

        def mark(self):
            steps.append("mark")
            return "mark"

        @contextmanager
        def after(self, mark):
            steps.append(f"after {mark}")
            yield
            steps.append("out")

        def join(self):
            steps.append("join")

    def hook(state, bucket):
        steps.append("hook")
        future = Future()
        future.set_result(bucket.buffer().clone())
        return future

    monkeypatch.setattr("training.node.process_group.SideStream", Side)
    flat = FlatParameters(torch.nn.Linear(3, 2))
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    group.size, group.shares_gpu = 2, shares_gpu  # as far as anything asks; only the hook would speak with the other
    reducer = GradientReducer(group, flat, hook=CommHook(hook))
    flat.grads.fill_(1.5)
    reducer.finish()
    assert steps == [f"cpu, {stream}", "mark", "after mark", "hook", "out", "join"]
    assert flat.grads.tolist() == [3.0] * 8
