"""Grid search: every combination of values once, in the order of the space's fields."""

from collections.abc import Sequence
from typing import Literal

from tasks.search.methods.base import MethodConfig, SearchPlan, SearchTrial, WholeTrainings
from tasks.search.space import SpaceError, Values

_MOST = 100_000
"""Maximum number of points: a larger grid is a mistake."""


class GridConfig(MethodConfig):
    """All combinations of the space's values; ranges of fractions say how many (`points`)."""

    kind: Literal["grid"] = "grid"

    def build(self, plan: SearchPlan) -> "GridSearch":
        """The method, for a space that a grid can exhaust within `search.trials`."""
        return GridSearch(plan)


class GridSearch(WholeTrainings):
    """Tries every point of a grid once."""

    def __init__(self, plan: SearchPlan) -> None:
        super().__init__(plan)
        limit = plan.trials or _MOST
        if plan.space.grid_size(limit) > limit:
            section = plan.space.section
            said = f"{section}.trials is {plan.trials}" if plan.trials else f"at most {_MOST:,} are tried"
            raise SpaceError(
                f"{section}.space: the grid has more than {limit:,} points, and {said}: a grid tries all or it is none"
                f". Set {section}.trials=0, take fewer points or fields, or use another method"
            )
        self._points = list(plan.space.grid())

    @property
    def total(self) -> int:
        """The points of the grid."""
        return len(self._points)

    def propose(self, number: int, trials: Sequence[SearchTrial]) -> Values:
        """The grid's next point."""
        return dict(self._points[number])
