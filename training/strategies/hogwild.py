"""Lock-free SGD on shared weights."""

from typing import ClassVar, Literal

from training.strategies.base import LearnerContext
from training.strategies.requests import Compute, Program
from training.strategies.strategy import NOBODY_WAITS, Facts, Method, StrategyConfig, Traits


class HogwildConfig(StrategyConfig):
    """Lock-free SGD on shared weights."""

    kind: Literal["hogwild"] = "hogwild"
    traits: ClassVar[Traits] = Traits(one_learner=True, shared=True)


def hogwild(context: LearnerContext, cfg: HogwildConfig) -> Program:
    """Hogwild (Niu et al. 2011): the learners of one machine update the same weights without locks.

        g = grad(W), at the current W;  W -= lr · g

    All replicas' weights are the same memory, which the engine or simulator provides; each learner keeps its own
    optimizer state.

    Staleness counts the updates by others while the gradient was computed: those of a slow learner are the stalest.
    """
    replica = context.replica
    while True:
        seen = replica.updates
        work = yield Compute()
        if work is None:
            return
        if work.weight:
            context.stale(replica.updates - seen)
            replica.update()


HOGWILD = Method(
    "hogwild",
    HogwildConfig,
    Facts(
        "nothing: the weights are in shared memory",
        lambda n, size, _: 0.0,
        "about N - 1",
        NOBODY_WAITS,
        "only its own work is lost",
        sent_text="nothing",
    ),
    program=hogwild,
)
