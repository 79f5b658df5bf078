"""Device selection for machines with any number of GPUs; none is needed here."""

import logging
from types import SimpleNamespace

import pytest
import torch

from devices.choice import (
    Inventory,
    best_device,
    claim,
    gpu_trouble,
    gpu_uuid,
    inventory,
    is_out_of_memory,
    pick_device,
    seed_device,
    share_gpu,
    spare_device,
)
from devices.gpus import Driver, Gpus
from training.node import agent
from training.node.agent import allocator_settings

CPU = torch.device("cpu")


def gpu(number):
    return torch.device("cuda", number)


def test_auto_selects_a_gpu_if_available():
    assert pick_device("auto", 0, Inventory(0)) == CPU
    assert pick_device("cpu", 0, Inventory(2)) == CPU
    assert [pick_device("auto", number, Inventory(2)) for number in range(3)] == [gpu(0), gpu(1), gpu(0)]


def test_missing_required_gpu_is_an_error_with_the_cause():
    with pytest.raises(ValueError, match=r"train\.device is 'cuda' but torch sees no GPU: use 'auto' or 'cpu'"):
        pick_device("cuda", 0, Inventory(0))
    with pytest.raises(ValueError, match="torch sees no GPU: the driver is too old"):
        pick_device("cuda", 0, Inventory(0, "the driver is too old"))


def test_evaluator_falls_back_to_the_cpu_with_a_warning(caplog):
    assert best_device("cuda", 3, Inventory(2)) == gpu(1)
    with caplog.at_level(logging.WARNING):
        assert best_device("cuda", 0, Inventory(0)) == CPU
    assert "this runs on its CPU" in caplog.text


@pytest.mark.parametrize(("learners", "gpus", "number"), [(1, 2, 1), (2, 4, 2), (0, 1, 0), (1, 1, 0), (4, 4, 0)])
def test_evaluator_prefers_a_gpu_that_no_learner_uses(learners, gpus, number):
    assert spare_device("auto", learners, Inventory(gpus)) == gpu(number)


def test_gpus_are_told_apart_by_their_uuid_and_not_by_their_number(monkeypatch):
    """Two processes may see two GPUs under the same number (`CUDA_VISIBLE_DEVICES`)."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    assert gpu_uuid(gpu(1)) == "u1"
    assert gpu_uuid(CPU) == ""


OLD = Driver(2, "535.104", (12, 2))


@pytest.mark.parametrize(
    ("driver", "wheel", "visible", "said"),
    [
        (Driver(), "13.0", None, ""),
        (OLD, "13.0", "", ""),
        (OLD, "13.0", "-1", ""),
        (
            OLD,
            "13.0",
            "0",
            "CUDA 12.2, too old for this torch (CUDA 13.0): install a driver of version 580",
        ),
        (OLD, None, None, "a build without CUDA"),
        # a driver serves every release of its major version
        (OLD, "12.8", None, "torch can use none: look at `nvidia-smi`"),
        (Driver(1, "999", None), "13.0", None, "torch can use none"),
        (OLD, "14.0", None, "install a driver for CUDA 14.0"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_explained(driver, wheel, visible, said):
    trouble = gpu_trouble(driver, wheel, visible)
    assert (said in trouble) if said else trouble == ""


def test_inventory_reports_a_driver_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Gpus, "driver", lambda self: OLD)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = inventory()
    assert machine.gpus == 0
    assert "too old" in machine.trouble
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert inventory() == Inventory(3)


def test_process_selects_its_gpu_as_current_device(monkeypatch):
    claimed = []
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    claim(CPU)
    claim(gpu(1))
    assert claimed == [gpu(1)]


@pytest.mark.parametrize(
    ("device", "learners", "gpus", "share"),
    [
        (gpu(0), 1, 1, None),
        (gpu(0), 4, 1, 0.225),
        (gpu(0), 3, 2, 0.45),  # the first GPU has learners 0 and 2
        (gpu(1), 3, 2, None),
        (gpu(1), 2, 4, None),
        (CPU, 4, 1, None),
    ],
)
def test_learners_that_share_a_gpu_share_its_memory(monkeypatch, device, learners, gpus, share):
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    share_gpu(device, learners, Inventory(gpus))
    assert limits == ([] if share is None else [(pytest.approx(share), device)])


def test_log_says_whether_sharing_learners_compute_at_the_same_time(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: None)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    caplog.set_level(logging.INFO)
    share_gpu(gpu(0), 2, Inventory(1))
    (tmp_path / "control").touch()
    share_gpu(gpu(0), 2, Inventory(1))
    assert "2 learners share cuda:0, each with at most 45 % of its memory; they compute in turns" in caplog.messages[0]
    assert "MPS lets them compute at the same time" in caplog.messages[1]


def test_allocator_is_configured_unless_the_environment_does(monkeypatch):
    assert allocator_settings({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator_settings({name: "max_split_size_mb:128"}) == {}
        monkeypatch.delenv(name, raising=False)
    assert agent._environment("start")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA out of memory"), False),
        (MemoryError(), False),
    ],
)
def test_out_of_memory_is_distinguished_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.gpu
def test_every_gpu_has_a_uuid_of_its_own():
    uuids = [gpu_uuid(gpu(number)) for number in range(torch.cuda.device_count())]
    assert len(set(uuids)) == len(uuids)
    assert all(uuid.count("-") == 4 for uuid in uuids)  # and is no address in memory


@pytest.mark.gpu
def test_claimed_gpu_is_the_current_device():
    claim(gpu(torch.cuda.device_count() - 1))
    assert torch.cuda.current_device() == torch.cuda.device_count() - 1
    claim(gpu(0))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, device="cuda")
    assert is_out_of_memory(caught.value)


# --- seeds


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
def test_a_seed_gives_the_random_numbers_that_torch_gives(device):
    drawn = []
    for seed in (lambda number: seed_device(device, number), torch.manual_seed):
        seed(2**62 + 5)
        drawn.append((torch.rand(4), torch.rand(4, device=device)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("used", ["cpu", "cuda", "mps"])
def test_only_the_device_in_use_is_seeded_besides_the_cpu(used, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeded.append(("cuda", seed)))
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: seeded.append(("mps", seed)))
    seed_device(torch.device(used), 3)
    assert seeded == ([] if used == "cpu" else [(used, 3)])
    assert torch.initial_seed() == 3
