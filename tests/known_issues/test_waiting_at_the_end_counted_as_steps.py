"""A ring's learner that waited for the others to agree at the end counted steps: one without rows had made 27."""

import threading
from concurrent.futures import ThreadPoolExecutor

import forks
import torch
from torch import nn

from training.ring.config import RingConfig
from training.ring.ring import Ring


def test_learners_together_have_made_a_step_for_each_piece(tmp_path):
    def learn(number):
        forks.THREADS.add(threading.current_thread())  # it waits until its coordinator has ended
        torch.manual_seed(number)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        config = RingConfig.model_validate({"membership": {"beat_s": 0.05}})
        with Ring(model, optimizer, folder=tmp_path, learners=2, config=config) as ring:
            for _ in ring.leases([1] * 12, epochs=2, batch=1):
                optimizer.zero_grad()
                (model(torch.ones(1, 3)) - number).square().sum().backward()
                optimizer.step()
        return ring.steps

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(learn, range(2))) == 24
