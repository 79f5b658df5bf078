"""Methods of distributed training as programs: what one learner does, apart from who makes it happen."""

from training.strategies.base import (
    AllReduce,
    Compute,
    Elastic,
    Gather,
    Idle,
    Mix,
    Program,
    Pull,
    Push,
    Replica,
    Seat,
    Start,
    StrategyError,
    Ticket,
    Wait,
    Work,
)
from training.strategies.registry import METHODS, Facts, Method, find_method

__all__ = [
    "METHODS",
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
    "StrategyError",
    "Ticket",
    "Wait",
    "Work",
    "find_method",
]
