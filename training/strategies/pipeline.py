"""Pipeline parallelism: the layers of one model are split over the learners.

There is one replica, so learners have no program: `training.node.pipeline` runs the schedule in the engine,
`training.simulation.pipeline` in the simulator.
"""

from typing import ClassVar, Literal

from pydantic import Field

from training.strategies.strategy import ALL_WAIT, Facts, Strategy, StrategyConfig, Traits

GPU_EACH = (
    "pipeline sends activations from GPU to GPU, which needs one for each learner: use at most as many learners as "
    "GPUs (train.learners_per_node), train.device=cpu, or a strategy whose learners may share a GPU, such as scpsgd"
)
"""Why learners of a pipeline cannot share a GPU, and the remedy."""


class LayerPipelineConfig(StrategyConfig):
    """The layers of one model, split over several learners."""

    kind: Literal["pipeline"] = "pipeline"
    traits: ClassVar[Traits] = Traits(one_node=True, split=True)
    micro_batches: int = Field(default=4, ge=1)
    """Parts of a batch that pass through the layers one after the other; more keep more learners busy at a time."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """`gpipe`: all parts forward, then all backward; `1f1b`: backward as soon as possible, which stores fewer
    activations."""


PIPELINE = Strategy(
    "pipeline",
    LayerPipelineConfig,
    Facts(
        "activations and their gradients, with the previous and the next stage; each learner has some of the layers",
        lambda n, size, _: 2 * (n - 1) * size,
        "0",
        ALL_WAIT,
        "training stops: its layers are missing",
        sent_text=(
            "the activations at the end of a stage, once forward and once back: 2(N−1) times those of a learner's "
            "share of the batch, over all N learners"
        ),
    ),
)
