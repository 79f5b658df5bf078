"""Methods of distributed training as programs: what one learner does, apart from who makes it happen."""

from training.strategies.base import Replica, Seat, StrategyError
from training.strategies.registry import METHODS, STRATEGIES, Facts, Method, Strategy, find_method, find_strategy
from training.strategies.requests import (
    AllReduce,
    Compute,
    Elastic,
    Gather,
    Idle,
    Mix,
    Program,
    Pull,
    Push,
    Start,
    Ticket,
    Wait,
    Work,
)

__all__ = [
    "METHODS",
    "STRATEGIES",
    "AllReduce",
    "Compute",
    "Elastic",
    "Facts",
    "Gather",
    "Idle",
    "Method",
    "Mix",
    "Program",
    "Pull",
    "Push",
    "Replica",
    "Seat",
    "Start",
    "Strategy",
    "StrategyError",
    "Ticket",
    "Wait",
    "Work",
    "find_method",
    "find_strategy",
]
