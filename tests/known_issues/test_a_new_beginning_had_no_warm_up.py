"""Training that began anew in the same process went on counting onebit's steps: its second warm-up was cut short."""

from types import SimpleNamespace

import torch

from training.config import TrainConfig
from training.flat import FlatParameters
from training.group import NodeGroup
from training.stepping import RingStepper


def test_it_has_one(tmp_path):
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    group.size = 2  # as if there were another learner: nothing is sent here
    cfg = TrainConfig(strategy="onebit", learners_per_node=2, onebit={"warm_epochs": 1})
    learner = SimpleNamespace(cfg=cfg, flat=FlatParameters(torch.nn.Linear(3, 2)))
    stepper = RingStepper(learner, group, SimpleNamespace(exchange=None), epoch_steps=2.5)
    state = stepper.hook.state
    assert state.warm_steps == 3
    state.step = 7
    stepper.forget()
    assert state.step == 0
