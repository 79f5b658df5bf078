"""A checkpoint with a missing object or a torn state.json stopped every resume instead of being passed over."""

import pytest
import torch
from torch import nn

from storage.objects import ObjectStore
from training.checkpoint import TrainState, checkpoint_steps, load_checkpoint, save_checkpoint
from training.config import OptimizerConfig
from training.optim import build_optimizer


def learner():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, build_optimizer(OptimizerConfig(), model)


def save(store, step, keep=2):
    save_checkpoint(store, *learner(), TrainState(step=step), "r", keep)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_missing_object_is_passed_over(tmp_path, name):
    store = ObjectStore(str(tmp_path))
    save(store, 1)
    save(store, 2)
    store.delete(f"checkpoints/step-000000002/{name}")
    assert load_checkpoint(store, *learner(), "r").step == 1


def test_a_torn_state_is_passed_over(tmp_path):
    store = ObjectStore(str(tmp_path))
    save(store, 1)
    save(store, 2)
    store.write("checkpoints/step-000000002/state.json", b'{"run": "r", "sha2')
    assert load_checkpoint(store, *learner(), "r").step == 1


def test_a_damaged_later_one_does_not_crowd_out_what_is_written_after_it(tmp_path):
    """With one checkpoint kept, the one just written was deleted in favour of the damaged one."""
    store = ObjectStore(str(tmp_path))
    save(store, 10)
    save(store, 20)
    store.write("checkpoints/step-000000020/model.safetensors", b"")
    assert load_checkpoint(store, *learner(), "r").step == 10
    save(store, 15, keep=1)
    assert checkpoint_steps(store) == [15]
    assert load_checkpoint(store, *learner(), "r").step == 15
