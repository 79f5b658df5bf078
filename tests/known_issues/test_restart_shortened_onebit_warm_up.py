"""Training that restarted in the same process continued counting onebit's steps, which shortened its second warm-up."""

from types import SimpleNamespace

import torch

from training.config import TrainConfig
from training.learner.flat import FlatParameters
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.node.program_stepper import ProgramStepper


def test_restarted_training_repeats_the_warm_up(tmp_path):
    group = NodeGroup(0, 1, tmp_path / "meet", torch.device("cpu"))
    group.size = 2  # pretend that there is another learner; nothing is sent here
    cfg = TrainConfig(strategy={"kind": "onebit", "warm_epochs": 1}, learners_per_node=2)
    learner = SimpleNamespace(cfg=cfg, flat=FlatParameters(torch.nn.Linear(3, 2)))
    ring = NodeExchange(0, group, learner.flat, None)
    stepper = ProgramStepper(SimpleNamespace(train=cfg), learner, ring, epoch_steps=2.5)
    stepper.start(0)
    assert stepper._request.codec.warm_steps == 3
    stepper._request.codec.step = 7
    stepper.start(7)
    assert stepper._request.codec.step == 7
    stepper.forget()
    stepper.start(0)
    assert stepper._request.codec.step == 0
